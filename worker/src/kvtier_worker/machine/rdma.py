"""RDMA devices as the kernel lists them. Mooncake falls back to TCP silently without one; we look and refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of one device.

    Attributes:
        state: the kernel's word, e.g. ``ACTIVE`` or ``DOWN``.
        link_layer: ``InfiniBand`` or ``Ethernet`` (RoCE).
    """

    device: str
    port: int
    state: str
    link_layer: str

    @property
    def is_active(self) -> bool:
        """Whether it can carry traffic."""
        return self.state == "ACTIVE"


def rdma_ports(sysfs: Path = SYSFS) -> tuple[RdmaPort, ...]:
    """Every port of every RDMA device, sorted; empty when there is none or no driver."""
    if not sysfs.is_dir():
        return ()
    return tuple(
        RdmaPort(
            device=device.name,
            port=int(port.name),
            state=_read(port / "state").rpartition(":")[2].strip() or "UNKNOWN",
            link_layer=_read(port / "link_layer") or "unknown",
        )
        for device in sorted(sysfs.iterdir())
        for port in sorted((device / "ports").glob("[0-9]*"), key=lambda path: int(path.name))
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def rdma_violations(devices: str, ports: Sequence[RdmaPort]) -> tuple[str, ...]:
    """Why RDMA over ``devices`` (comma separated, empty = any active one) cannot work here; empty = it can.

    Mooncake itself goes on over TCP without a word when no device is named and none exists.
    """
    found = ", ".join(f"{port.device}:{port.port} {port.state}" for port in ports) or "none"
    active = {port.device for port in ports if port.is_active}
    wanted = [name.strip() for name in devices.split(",") if name.strip()]
    if not wanted:
        if active:
            return ()
        problem = f"protocol rdma: no active RDMA device on this machine (found: {found})"
        return (f"{problem}; bring a link up, give the container its /dev/infiniband devices, or use tcp",)
    return tuple(
        f"RDMA device {name!r} is not active here (found: {found}); bring its link up, name another one, or use tcp"
        for name in wanted
        if name not in active
    )
