"""Reads a KVCacheCluster from a YAML file, and finds programs on this machine. IO; called by both runtimes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from kvtier_operator.api import KVCacheCluster, parse
from kvtier_operator.errors import MachineError, SpecError, Violation
from kvtier_operator.resources.processes import Programs


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a field stands once: plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name} stands twice in one mapping", node.value[index][0].start_mark
                )
        return super().construct_mapping(node, deep)


def load(path: Path) -> KVCacheCluster:
    """Read and parse a manifest.

    Raises:
        SpecError: the file cannot be read, is no YAML, or has violations.
    """
    try:
        with path.open(encoding="utf-8") as file:
            document = yaml.load(file, Loader=_StrictLoader)  # noqa: S506 - derived from SafeLoader
    except OSError as error:
        raise SpecError([Violation("FILE", str(path), f"cannot be read: {error.strerror}")]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError([Violation("FILE", str(path), f"is no YAML with one document: {error}")]) from error
    except RecursionError as error:
        raise SpecError([Violation("FILE", str(path), "is nested too deeply for a manifest")]) from error
    return parse(document)


def find_programs(*, etcd: bool = False) -> Programs:
    """Commands of this Python environment, or of PATH.

    Args:
        etcd: whether it is needed, too.

    Raises:
        MachineError: naming every program that is missing and what installs it.
    """
    packages = {
        "kvtier": 'pip install "kvtier[worker,operator]"',
        "mooncake_master": "pip install mooncake-transfer-engine-non-cuda",
        "mooncake_client": "pip install mooncake-transfer-engine-non-cuda",
    }
    if etcd:
        packages["etcd"] = "apt-get install -y etcd-server, or name a running one in spec.coordination.etcd.external"
    found = {name: _program(name) for name in packages}
    if missing := [name for name, path in found.items() if not path]:
        raise MachineError([f"{name} is not installed: {packages[name]}" for name in missing])
    return Programs(**{name: (path,) for name, path in found.items()})


def _program(name: str) -> str:
    beside_python = Path(sys.executable).with_name(name)
    return str(beside_python) if beside_python.is_file() else shutil.which(name) or ""
