"""The demo as ``make demo`` runs it, on ports of its own."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.mooncake, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("example", ["local.yaml", "local-tcp.yaml"])
def test_every_phase_meets_its_tier_with_equal_tokens(
    manifest: Callable[..., Path], tmp_path: Path, example: str
) -> None:
    report_path = tmp_path / "demo" / "report.json"
    command = (
        sys.executable,
        "-m",
        "kvtier_operator.demo",
        f"--manifest={manifest(example)}",
        f"--report={report_path}",
    )
    demo = subprocess.run(command, capture_output=True, text=True, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    report = json.loads(report_path.read_text())
    assert report["token_ids_equal"] is True
    phases = {phase["name"]: phase for phase in report["phases"]}
    full = phases["cold"]["prompt_tokens"] // 128 * 128
    assert full >= 2900
    for name, tier in {"device hit": "device", "host hit": "host", "store hit": "store"}.items():
        assert phases[name]["cached_tokens"][tier] >= 0.95 * full
    assert phases["store hit"]["ttft_ms"] <= phases["cold"]["ttft_ms"] / 8
    assert phases["store gone"]["cached_tokens"] == {"device": 0, "host": 0, "store": 0}
    assert "curl" not in demo.stdout
