"""Collects what `kvtier doctor` judges. Imports neither torch nor mooncake: they may be what is broken."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier_worker.machine.findings import Facts
from kvtier_worker.machine.libraries import missing_libraries
from kvtier_worker.machine.memory import memlock_limit_bytes, physical_memory_bytes
from kvtier_worker.machine.ports import answers, port_holder
from kvtier_worker.machine.rdma import rdma_ports

DEFAULT_PORTS = (8010, 12345, 50051, 50052, 9003, 9300)
"""API, first store client, master, shared-memory clients, master's metrics, storage node's health."""

_PACKAGES: Mapping[str, Sequence[str]] = {
    "torch": ("torch",),
    "safetensors": ("safetensors",),
    "tokenizers": ("tokenizers",),
    "fastapi": ("fastapi",),
    "uvicorn": ("uvicorn",),
    "zmq": ("pyzmq",),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
}
_PROGRAMS = ("mooncake_master", "mooncake_client", "etcd")
_EPHEMERAL = (32768, 60999)


def collect(environment: Mapping[str, str]) -> Facts:
    """Look at this machine."""
    return Facts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=physical_memory_bytes(),
        memlock_bytes=memlock_limit_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shm_bytes=_file_system_bytes(Path("/dev/shm")),  # noqa: S108 - looked at, not written
        huge_pages=_huge_pages(),
        wants_huge_pages=environment.get("MC_STORE_USE_HUGEPAGE", "") not in ("", "0", "false"),
        missing_libraries=missing_libraries(),
        packages={name: _version(distributions) for name, distributions in _PACKAGES.items()},
        programs={name: find_program(name) for name in _PROGRAMS},
        rdma=rdma_ports(),
        gpus=_gpus(),
        port_holders={port: _holder(port) for port in DEFAULT_PORTS},
        ephemeral_ports=_port_range(),
        reserved_ports=_read(Path("/proc/sys/net/ipv4/ip_local_reserved_ports")),
    )


def find_program(name: str) -> str:
    """Its path: beside this Python first, then in PATH; empty = not found."""
    beside_python = Path(sys.executable).parent / name
    return str(beside_python) if os.access(beside_python, os.X_OK) else shutil.which(name) or ""


def _version(distributions: Sequence[str]) -> str:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _file_system_bytes(path: Path) -> int:
    return shutil.disk_usage(path).total if path.is_dir() else 0


def _huge_pages() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("HugePages_Total:"):
            return int(line.split()[1])
    return 0


def _gpus() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if not program:
        return ()
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip()) if done.returncode == 0 else ()


def _holder(port: int) -> str:
    return port_holder(port) if answers("127.0.0.1", port, 0.2) else ""


def _port_range() -> tuple[int, int]:
    words = _read(Path("/proc/sys/net/ipv4/ip_local_port_range")).split()
    return (int(words[0]), int(words[1])) if len(words) == len(_EPHEMERAL) else _EPHEMERAL


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
