"""Who owns which ports: a record of disjoint blocks that survives restarts of the operator. Pure.

A block belongs to one key (cluster, group, lane, slot) for as long as the slot is wanted or a pod of it lives, and is
kept back for a quarantine afterwards, since closed connections hold their ports for a while. Clusters on the pod
network have a ledger each; those on the host network share one, because any two of them can meet on a node.

    wanted ──unwanted, a pod lives──▶ held ──the pod is gone──▶ released ──QUARANTINE_S──▶ free
       ▲                                                            │
       └───────────────────── wanted again, same width ─────────────┘

An owner that needs another width gets another block; the old one is *retired*: held while the owner has a pod, then
released like any other. Nothing ever moves or takes away the block of a living pod. `allocation` walks these edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvtier_operator.planning.ports import PortBlock

QUARANTINE_S = 60.0
"""Seconds that Linux keeps a closed connection's port in TIME_WAIT."""


def owner(namespace: str, name: str, uid: str) -> str:
    """A cluster in ledgers: one made later under the same name is another one. Without uid, in a file, the name."""
    return f"{namespace}.{name}.{uid}" if uid else name


@dataclass(frozen=True, slots=True, order=True)
class BlockKey:
    """Owner of a block.

    Attributes:
        cluster: as `owner` spells it.
        group: ``etcd``, ``master``, ``store-POOL``, ``router``, the name of a role, or ``api/ROLE`` for an HTTP port on
            the host network.
        lane: ``A`` or ``B`` for engines, so that two revisions never share ports; empty for others.
        slot: ordinal; -1 = one block for all pods of the group, which then never share a node.
    """

    cluster: str
    group: str
    lane: str
    slot: int

    def __str__(self) -> str:
        """Render as ``GROUP/LANE/SLOT``, the owner's name within its cluster."""
        return f"{self.group}/{self.lane}/{self.slot}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A block and since when nobody wants it (seconds since the epoch; None = wanted, or held by a pod)."""

    block: PortBlock
    released_at: float | None = None


@dataclass(frozen=True, slots=True)
class Retired:
    """A block whose owner has got another one; ``released_at`` is None while pods may still be on it."""

    key: BlockKey
    block: PortBlock
    released_at: float | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """All blocks.

    Attributes:
        entries: by owner; any two blocks are disjoint, retired ones included.
        retired: former blocks of owners.
        resource_version: of the ConfigMap that it was read from; empty = there is none yet.
    """

    entries: Mapping[BlockKey, Entry] = field(default_factory=dict)
    retired: tuple[Retired, ...] = ()
    resource_version: str = ""

    def claims(self) -> Iterator[tuple[PortBlock, BlockKey]]:
        """Every block that is not free, with its owner."""
        for key, entry in self.entries.items():
            yield entry.block, key
        for retired in self.retired:
            yield retired.block, retired.key

    @property
    def clusters(self) -> frozenset[str]:
        """Those that own blocks, or did until a moment ago."""
        return frozenset(key.cluster for _, key in self.claims())


@dataclass(frozen=True, slots=True)
class Want:
    """A block that a cluster needs.

    Attributes:
        width: number of ports.
        at: the first port, where the user chose it; None = anywhere in the range.
    """

    key: BlockKey
    width: int
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """Ports that one owner needs although another one holds some of them."""

    key: BlockKey
    block: PortBlock
    holder: BlockKey
