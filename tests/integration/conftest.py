"""Manifests on ports that nobody uses."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtier_operator.api import PortRange
from kvtier_operator.local.probes import port_is_free

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
PORTS = 60
COMPUTE_ONLY = frozenset({"test_differential.py", "test_model_oracle.py", "test_model_smollm2.py", "test_tokenizer.py"})
"""Files whose tests start no servers, bind no ports and have no times to meet."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start servers run one by one; beside them, in another process, those that only compute."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.name not in COMPUTE_ONLY:
            item.add_marker(pytest.mark.xdist_group("servers"))


def free_range(size: int) -> PortRange:
    """Consecutive ports that can be bound now, below the range of outgoing connections."""
    chooser = random.SystemRandom()
    for _ in range(200):
        start = chooser.randrange(20000, 32000 - size)
        if all(port_is_free(port) for port in range(start, start + size)):
            return PortRange(start, size)
    raise AssertionError(f"no {size} free ports in a row")


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., Path]:
    """Copies an example onto free ports; ``changes`` edits its spec."""

    def copy(example: str, changes: Callable[[dict[str, Any]], None] = lambda spec: None) -> Path:
        document = yaml.safe_load((EXAMPLES / example).read_text())
        ports = free_range(PORTS)
        spec = document["spec"]
        spec.setdefault("transport", {})["ports"] = {"range": {"start": ports.start, "size": ports.size - 1}}
        spec["roles"][0]["port"] = ports.stop - 1
        changes(spec)
        file = tmp_path / example
        file.write_text(yaml.safe_dump(document))
        return file

    return copy
