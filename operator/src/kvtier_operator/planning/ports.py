"""Gives every process of a cluster its own block of ports. Pure; called by the builders of processes.

A block is contiguous, so that rank i of an engine owns ``base + i``; blocks are disjoint by construction. The order
of the wants decides, so the same manifest always gives the same ports.

    block of an engine with n ranks   [ rendezvous | label of rank 0..n-1 | Mooncake's own ports ]
    block of a storage node           [ label | http | shared memory | Mooncake's own ports ]
    block of a master                 [ rpc | admin ]

A *label* port is never bound: Mooncake names a client by it. The ports a Mooncake client really binds are taken from
``MC_MIN_RPC_PORT``…``MC_MAX_RPC_PORT``, which is why a block covers both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier_operator.api import PortRange

PORTS_PER_STORE_CLIENT = 4
"""A Mooncake client binds two of its range, picked at random; the spare ones keep its retries short. The workers of an
engine divide the engine's range among themselves."""


@dataclass(frozen=True, slots=True)
class PortBlock:
    """Ports [start, stop) of one process."""

    start: int
    stop: int

    def port(self, index: int) -> int:
        """The port at an offset of the block."""
        port = self.start + index
        assert self.start <= port < self.stop, f"port {index} outside a block of {self.stop - self.start}"
        return port

    def tail(self, index: int) -> PortBlock:
        """The rest of the block from an offset on."""
        return PortBlock(self.port(index), self.stop)


@dataclass(frozen=True, slots=True)
class PortWant:
    """How many ports a process needs."""

    process: str
    count: int


def allocate(ports: PortRange, wants: Sequence[PortWant]) -> Mapping[str, PortBlock]:
    """Blocks by process name, in the order of the wants, packed from the start of the range.

    The caller has checked with `ports_needed` that they fit.
    """
    assert ports_needed(wants) <= ports.size, "the range is too small"
    blocks: dict[str, PortBlock] = {}
    start = ports.start
    for want in wants:
        assert want.process not in blocks, f"two processes are called {want.process}"
        blocks[want.process] = PortBlock(start, start + want.count)
        start += want.count
    return blocks


def ports_needed(wants: Sequence[PortWant]) -> int:
    """Length of the range that the wants need."""
    return sum(want.count for want in wants)
