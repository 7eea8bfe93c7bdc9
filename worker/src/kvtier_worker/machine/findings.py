"""Judgements of `kvtier doctor`: facts of a machine in, findings out. Pure; the facts come from `machine.facts`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier_worker.machine.libraries import MOONCAKE_LIBRARIES, install_line
from kvtier_worker.machine.rdma import RdmaPort

_GIB = 1 << 30
_MIN_PYTHON = (3, 11)
_MIN_MEMLOCK_BYTES = 8 * _GIB
_MIN_FILES = 4096
_MIN_SHM_BYTES = 64 << 20
_SHM = "/dev/shm"  # noqa: S108 - a name in a table
_WHEEL = "mooncake-transfer-engine-non-cuda"


class Level(StrEnum):
    """How much a finding matters."""

    OK = "OK"
    WARN = "WARN"  # works, but slower or only in part
    FAIL = "FAIL"  # something required is missing


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table.

    Attributes:
        subject: what was looked at.
        found: what is there.
        fix: what to do; empty when nothing needs doing.
    """

    level: Level
    subject: str
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """A machine as `kvtier doctor` sees it.

    Attributes:
        python: major, minor, micro.
        cores: usable by this process.
        memory_bytes: of the machine or container.
        memlock_bytes: how much may be locked; None = no limit.
        open_files: how many a process may open.
        shm_bytes: size of /dev/shm; 0 = there is none.
        huge_pages: reserved 2 MiB pages.
        wants_huge_pages: whether MC_STORE_USE_HUGEPAGE is set.
        missing_libraries: of those that the Mooncake wheel needs.
        packages: version by distribution name; empty = not installed.
        programs: path by name; empty = not found.
        rdma: ports of RDMA devices.
        gpus: names.
        port_holders: who listens, for each default port of ours; empty = free.
        ephemeral_ports: first and last port that the kernel hands out.
        reserved_ports: text of ip_local_reserved_ports.
    """

    python: tuple[int, int, int]
    cores: int
    memory_bytes: int
    memlock_bytes: int | None
    open_files: int
    shm_bytes: int
    huge_pages: int
    wants_huge_pages: bool
    missing_libraries: Sequence[str]
    packages: Mapping[str, str]
    programs: Mapping[str, str]
    rdma: Sequence[RdmaPort]
    gpus: Sequence[str]
    port_holders: Mapping[int, str]
    ephemeral_ports: tuple[int, int]
    reserved_ports: str


def judge(facts: Facts) -> tuple[Finding, ...]:
    """Every finding, in the order of the table."""
    return (
        *_software(facts),
        *_mooncake(facts),
        *_memory(facts),
        *_devices(facts),
        *_network(facts),
    )


def _software(facts: Facts) -> Iterator[Finding]:
    version = ".".join(map(str, facts.python))
    if facts.python >= _MIN_PYTHON:
        yield Finding(Level.OK, "python", f"{version}, {facts.cores} cores")
    else:
        yield Finding(Level.FAIL, "python", version, "install Python 3.11 or later")
    for name in ("torch", "safetensors", "tokenizers", "fastapi", "uvicorn", "zmq"):
        found = facts.packages.get(name, "")
        if found:
            yield Finding(Level.OK, name, found)
        else:
            yield Finding(Level.FAIL, name, "not installed", "pip install 'kvtier[worker]'")


def _mooncake(facts: Facts) -> Iterator[Finding]:
    version = facts.packages.get("mooncake", "")
    if version:
        yield Finding(Level.OK, "mooncake wheel", version)
    else:
        yield Finding(Level.FAIL, "mooncake wheel", "not installed", f"pip install {_WHEEL}")
    for name in MOONCAKE_LIBRARIES:
        if name in facts.missing_libraries:
            yield Finding(Level.FAIL, name, "missing", install_line([name]))
        else:
            yield Finding(Level.OK, name, "found")
    for name in ("mooncake_master", "mooncake_client"):
        path = facts.programs.get(name, "")
        fix = "" if path else f"pip install {_WHEEL}"
        yield Finding(Level.OK if path else Level.FAIL, name, path or "not found", fix)
    etcd = facts.programs.get("etcd", "")
    fix = "" if etcd else "only for several masters: apt-get install -y etcd-server"
    yield Finding(Level.OK if etcd else Level.WARN, "etcd", etcd or "not found", fix)


def _memory(facts: Facts) -> Iterator[Finding]:
    yield Finding(Level.OK, "memory", f"{facts.memory_bytes / _GIB:.1f} GiB")
    if facts.memlock_bytes is None:
        yield Finding(Level.OK, "memlock limit", "none")
    elif facts.memlock_bytes >= _MIN_MEMLOCK_BYTES:
        yield Finding(Level.OK, "memlock limit", f"{facts.memlock_bytes / _GIB:.1f} GiB")
    else:
        yield Finding(
            Level.WARN,
            "memlock limit",
            f"{facts.memlock_bytes / (1 << 20):.0f} MiB, less than a host tier needs",
            "ulimit -l unlimited, LimitMEMLOCK=infinity, or docker --ulimit memlock=-1",
        )
    if facts.open_files >= _MIN_FILES:
        yield Finding(Level.OK, "open files", str(facts.open_files))
    else:
        yield Finding(Level.WARN, "open files", str(facts.open_files), f"ulimit -n {_MIN_FILES} or more")
    if facts.shm_bytes >= _MIN_SHM_BYTES:
        yield Finding(Level.OK, _SHM, f"{facts.shm_bytes / _GIB:.1f} GiB")
    else:
        fix = "docker --shm-size=1g, or an emptyDir of medium Memory at /dev/shm; collectives between ranks use it"
        yield Finding(Level.WARN, _SHM, f"{facts.shm_bytes >> 20} MiB", fix)
    yield _huge_pages(facts)


def _huge_pages(facts: Facts) -> Finding:
    if facts.wants_huge_pages and not facts.huge_pages:
        fix = "sysctl vm.nr_hugepages=N (request hugepages-2Mi in a pod), or unset MC_STORE_USE_HUGEPAGE"
        return Finding(Level.FAIL, "huge pages", "MC_STORE_USE_HUGEPAGE is set, none is reserved", fix)
    return Finding(Level.OK, "huge pages", f"{facts.huge_pages} reserved" if facts.huge_pages else "none, none needed")


def _devices(facts: Facts) -> Iterator[Finding]:
    if not facts.rdma:
        yield Finding(Level.OK, "RDMA", "no device; the store uses --store_protocol=tcp")
    for port in facts.rdma:
        fix = "" if port.is_active else f"bring the link up: rdma link, ip link set up; {port.device} is not usable"
        level = Level.OK if port.is_active else Level.WARN
        yield Finding(level, f"RDMA {port.device}:{port.port}", f"{port.state}, {port.link_layer}", fix)
    if not facts.gpus:
        yield Finding(Level.OK, "GPU", "none; the engine runs with --device=cpu")
        return
    yield Finding(Level.OK, "GPU", ", ".join(facts.gpus))
    if "+cpu" in facts.packages.get("torch", ""):
        fix = "pip install torch from the CUDA index of pytorch.org"
        yield Finding(Level.WARN, "torch for CUDA", "this torch was built without CUDA", fix)


def _network(facts: Facts) -> Iterator[Finding]:
    for port, holder in facts.port_holders.items():
        fix = f"stop it, or choose another port than {port}" if holder else ""
        yield Finding(Level.WARN if holder else Level.OK, f"port {port}", holder or "free", fix)
    first, last = facts.ephemeral_ports
    inside = [
        port for port in facts.port_holders if first <= port <= last and not _is_reserved(port, facts.reserved_ports)
    ]
    if inside:
        ports = ",".join(map(str, inside))
        fix = f"sysctl -w net.ipv4.ip_local_reserved_ports={ports} on machines that run a master or a storage node"
        found = f"{ports} lie in the kernel's own range {first}-{last}, which may take them first"
        yield Finding(Level.WARN, "ephemeral ports", found, fix)


def _is_reserved(port: int, text: str) -> bool:
    """Whether ``port`` is in a list like ``50051,50060-50070``."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.strip().isdecimal() and int(first) <= port <= int(last or first):
            return True
    return False
