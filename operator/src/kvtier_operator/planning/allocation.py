"""Gives, holds and takes back blocks of ports; also after the ledger was lost. Pure; called by `wants`.

See `ledger` for the life of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvtier_operator.api import PortRange
from kvtier_operator.planning.claims import Claims, FirstFit
from kvtier_operator.planning.ledger import QUARANTINE_S, BlockKey, Entry, Ledger, Retired, Taken, Want
from kvtier_operator.planning.ports import PortBlock


@dataclass(frozen=True, slots=True)
class Allocation:
    """What `allocate` decided.

    Attributes:
        ledger: to be saved before anything is made with its blocks; the given one when nothing changed.
        blocks: of every want; when something is refused, only of those that have had theirs before.
        exhausted: wants that do not fit.
        missing: how much larger the range would have to be for them.
        taken: wants of certain ports that somebody else holds.
    """

    ledger: Ledger
    blocks: Mapping[BlockKey, PortBlock]
    exhausted: tuple[Want, ...] = ()
    missing: int = 0
    taken: tuple[Taken, ...] = ()

    @property
    def refused(self) -> bool:
        """True when no want got anything new."""
        return bool(self.exhausted or self.taken)


def allocate(
    ledger: Ledger, ports: PortRange, cluster: str, wants: Sequence[Want], *, live: frozenset[BlockKey], now: float
) -> Allocation:
    """Bring the blocks of one cluster in line with what it wants: all of it, or nothing new at all.

    Blocks stay where they are, new ones come from the lowest gap in the order of the wants. Outside ``ports`` (the user
    moved the range) a block stays only while its owner is live. Blocks of other clusters are respected, never changed.

    Args:
        ledger: as it was read.
        ports: the cluster's range.
        cluster: whose blocks; as in the keys of ``wants``.
        wants: every block that the cluster needs now, each key once.
        live: owners with a pod, or with a workload that may still make one.
        now: seconds since the epoch.
    """
    assert len({want.key for want in wants}) == len(wants), "an owner wants two blocks"
    wanted = {want.key: want for want in wants}
    settled = _settle(ledger, ports, cluster, wanted, live=live, now=now)
    blocks = {
        key: entry.block
        for key, entry in settled.entries.items()
        if key in wanted and _serves(entry.block, wanted[key], ports, live)
    }
    search = _place([want for want in wants if want.key not in blocks], settled, ports)
    if search.exhausted or search.taken:
        return Allocation(
            _unless_equal(ledger, settled),
            blocks,
            search.exhausted,
            max((search.placed[want.key].stop - ports.stop for want in search.exhausted), default=0),
            search.taken,
        )
    renewed = _renew(settled, search.placed, live, now)
    return Allocation(_unless_equal(ledger, renewed), {**blocks, **search.placed})


def adopt(ledger: Ledger, found: Mapping[BlockKey, PortBlock]) -> Ledger:
    """Take up blocks that live pods use although the ledger does not know them, as after its loss.

    An owner that the ledger gives another block keeps that one; the found one counts as retired. What meets a block of
    the ledger is known already, or somebody edited it: it stays out.
    """
    claims = Claims(ledger.claims())
    entries, retired = dict(ledger.entries), list(ledger.retired)
    for key, block in sorted(found.items(), key=lambda item: item[0]):
        if claims.holder(block) is not None:
            continue
        claims.add(block, key)
        if key in entries:
            retired.append(Retired(key, block))
        else:
            entries[key] = Entry(block)
    return _unless_equal(ledger, Ledger(entries, tuple(retired), ledger.resource_version))


def release_absent(ledger: Ledger, present: frozenset[str], now: float) -> Ledger:
    """Release what clusters hold that are gone; for the shared ledger, where no owner reference does it.

    Args:
        ledger: as it was read.
        present: owners that exist, or of which pods still do.
        now: seconds since the epoch.
    """
    for cluster in sorted(ledger.clusters - present):
        settled = _settle(ledger, PortRange(0, 0), cluster, {}, live=frozenset(), now=now)
        ledger = _unless_equal(ledger, settled)
    return ledger


def _settle(
    ledger: Ledger,
    ports: PortRange,
    cluster: str,
    wanted: Mapping[BlockKey, Want],
    *,
    live: frozenset[BlockKey],
    now: float,
) -> Ledger:
    """Hold, release and forget one cluster's blocks; give nothing new."""
    entries: dict[BlockKey, Entry] = {}
    for key, entry in ledger.entries.items():
        stays = key.cluster != cluster or key in live
        if stays or (key in wanted and _serves(entry.block, wanted[key], ports, live)):
            entries[key] = entry if key.cluster != cluster else Entry(entry.block)
        elif (since := _still_released(entry.released_at, now)) is not None:
            entries[key] = Entry(entry.block, since)
    retired = []
    for former in ledger.retired:
        held = former.released_at is None and former.key in live
        if former.key.cluster != cluster or held:
            retired.append(former)
        elif (since := _still_released(former.released_at, now)) is not None:
            retired.append(replace(former, released_at=since))
    return Ledger(entries, tuple(retired), ledger.resource_version)


def _still_released(released_at: float | None, now: float) -> float | None:
    """When a block that nobody wants was released; None = long enough ago to be free."""
    since = now if released_at is None else min(released_at, now)  # a clock may have been ahead of ours
    return since if now - since < QUARANTINE_S else None


def _serves(block: PortBlock, want: Want, ports: PortRange, live: frozenset[BlockKey]) -> bool:
    if block.width != want.width:
        return False
    if want.at is not None:
        return block.start == want.at
    return want.key in live or (ports.start <= block.start and block.stop <= ports.stop)


@dataclass(frozen=True, slots=True)
class _Search:
    placed: Mapping[BlockKey, PortBlock]
    exhausted: tuple[Want, ...]
    taken: tuple[Taken, ...]


def _place(wants: Sequence[Want], ledger: Ledger, ports: PortRange) -> _Search:
    """Find a block for each want; one that ends behind the range does not fit."""
    placed: dict[BlockKey, PortBlock] = {}
    if not wants:
        return _Search(placed, (), ())
    claims = Claims(ledger.claims())
    taken = []
    for want in wants:
        if want.at is None:
            continue
        block = PortBlock(want.at, want.at + want.width)
        if holder := claims.holder(block):
            taken.append(Taken(want.key, block, holder[1]))
        else:
            claims.add(block, want.key)
            placed[want.key] = block
    anywhere = [want for want in wants if want.at is None]
    free = FirstFit(claims.gaps(ports.start))
    for want in anywhere:
        placed[want.key] = free.take(want.width)
    exhausted = tuple(want for want in anywhere if placed[want.key].stop > ports.stop)
    return _Search(placed, exhausted, tuple(taken))


def _renew(settled: Ledger, placed: Mapping[BlockKey, PortBlock], live: frozenset[BlockKey], now: float) -> Ledger:
    """Enter the new blocks; what their owners had before is retired."""
    entries, retired = dict(settled.entries), list(settled.retired)
    for key, block in placed.items():
        if former := entries.get(key):
            released_at = now if former.released_at is None else former.released_at
            retired.append(Retired(key, former.block, None if key in live else released_at))
        entries[key] = Entry(block)
    return Ledger(entries, tuple(retired), settled.resource_version)


def _unless_equal(ledger: Ledger, changed: Ledger) -> Ledger:
    return ledger if ledger == changed else changed
