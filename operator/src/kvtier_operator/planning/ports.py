"""What stands where in the block of ports that a process owns. Pure; builders ask it for offsets, `wants` for widths.

    etcd member               [ client | peer ]
    master                    [ RPC | admin ]
    storage node              [ label | http | shared memory | Mooncake's own ports ]
    engine with n ranks       [ rendezvous | label of rank 0..n-1 | Mooncake's own ports ]
    the same, split roles     [ rendezvous | label of rank 0..n-1 | transfer of rank 0..n-1 | disaggregation of rank
                                0..n-1 | Mooncake's own ports ]
    router                    [ RPC ]

A block is contiguous, so that rank i of an engine owns ``base + i``. A *label* port is never bound: Mooncake names a
client by it. The ports that a Mooncake client really binds are those of ``MC_MIN_RPC_PORT``…``MC_MAX_RPC_PORT``, two of
them at random, which is why a block covers both. HTTP APIs (``spec.roles[].port``, ``spec.router.port``) are the user's
choice and stand outside the range.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvtier_operator.api import Role, RoleType

PORTS_PER_STORE_CLIENT = 4
"""A Mooncake client binds two of its range, picked at random; the spare ones keep its retries short. The workers of an
engine divide the engine's range among themselves."""


class EtcdPort(IntEnum):
    """Offsets in the block of an etcd member."""

    CLIENT = 0
    PEER = 1


class MasterPort(IntEnum):
    """Offsets in the block of a master."""

    RPC = 0
    ADMIN = 1


class StorePort(IntEnum):
    """Offsets in the block of a storage node; ``DATA`` is the first of Mooncake's own."""

    LABEL = 0
    HTTP = 1
    SHM = 2
    DATA = 3


ETCD_PORTS = len(EtcdPort)
MASTER_PORTS = len(MasterPort)
ROUTER_PORTS = 1
STORE_PORTS = StorePort.DATA + 2 * PORTS_PER_STORE_CLIENT
"""A node that also serves shared memory holds two clients."""


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """Offsets in the block of an engine.

    Attributes:
        ranks: workers of the engine.
        split: it prefills or decodes for others, so that each rank has two ports more.
    """

    ranks: int
    split: bool

    @property
    def rendezvous(self) -> int:
        """Where the workers find one another."""
        return 0

    @property
    def labels(self) -> int:
        """Of rank 0."""
        return 1

    @property
    def transfer(self) -> int:
        """Of rank 0; split roles only."""
        assert self.split
        return 1 + self.ranks

    @property
    def disaggregation(self) -> int:
        """Of rank 0; split roles only."""
        assert self.split
        return 1 + 2 * self.ranks

    @property
    def data(self) -> int:
        """The first of Mooncake's own."""
        return 1 + (3 if self.split else 1) * self.ranks

    @property
    def width(self) -> int:
        """Length of the block."""
        return self.data + PORTS_PER_STORE_CLIENT * self.ranks


def engine_ports(role: Role) -> EnginePorts:
    """Layout of one engine of the role, its HTTP API apart."""
    return EnginePorts(role.tensor, split=role.type is not RoleType.FUSED)


@dataclass(frozen=True, slots=True)
class PortBlock:
    """Ports [start, stop) of one owner."""

    start: int
    stop: int

    @property
    def width(self) -> int:
        """How many ports."""
        return self.stop - self.start

    def meets(self, other: PortBlock) -> bool:
        """True when both have a port in common."""
        return self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        """Render with both ends included, as people read ports."""
        return f"{self.start}-{self.stop - 1}"

    def port(self, index: int) -> int:
        """The port at an offset of the block."""
        port = self.start + index
        assert self.start <= port < self.stop, f"port {index} outside a block of {self.stop - self.start}"
        return port

    def tail(self, index: int) -> PortBlock:
        """The rest of the block from an offset on."""
        return PortBlock(self.port(index), self.stop)
