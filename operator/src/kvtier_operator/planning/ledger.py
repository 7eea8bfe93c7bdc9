"""Who owns which ports: a record of disjoint blocks that survives restarts of the operator. Pure.

A block belongs to one key (cluster, group, lane, slot) for as long as the slot is wanted or a pod of it lives, and is
kept back for a quarantine afterwards, since closed connections hold their ports for a while. Clusters on the pod
network have a ledger each; those on the host network share one, because any two of them can meet on a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier_operator.planning.ports import PortBlock

QUARANTINE_S = 60.0
"""Seconds that Linux keeps a closed connection's port in TIME_WAIT."""


@dataclass(frozen=True, slots=True, order=True)
class BlockKey:
    """Owner of a block.

    Attributes:
        cluster: uid of the KVCacheCluster; its name in the local runtime.
        group: ``etcd``, ``master``, ``store-POOL``, or the name of a role.
        lane: ``A`` or ``B`` for engines, so that two revisions never share ports; empty for others.
        slot: ordinal; -1 = one block for all pods of the group, which then never share a node.
    """

    cluster: str
    group: str
    lane: str
    slot: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A block and since when nobody wants it (seconds since the epoch; None = wanted)."""

    block: PortBlock
    released_at: float | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """All blocks.

    Attributes:
        entries: by owner; any two blocks are disjoint.
        resource_version: of the ConfigMap that it was read from; empty = there is none yet.
    """

    entries: Mapping[BlockKey, Entry] = field(default_factory=dict)
    resource_version: str = ""
