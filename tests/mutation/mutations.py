"""Breaks one rule of the engine on purpose: a pytest plugin for the runs that `test_mutations.py` starts.

``KVTIER_MUTATION=name pytest -p mutations …`` replaces one decision before tests are collected. Each function says
which rule it breaks and how the broken engine would still look plausible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvtier_worker.core.hits import HitMatrix
from kvtier_worker.core.plans import PrefetchItem, RestoreItem
from kvtier_worker.engine.block_manager import TieredBlockManager
from kvtier_worker.engine.host_tier import HostTier, WritebackEntry
from kvtier_worker.engine.messages import Writeback
from kvtier_worker.engine.ports import Event
from kvtier_worker.engine.store_objects import PrefetchResult, StoreObjects
from kvtier_worker.engine.synchronizer import LayerSynchronizer
from kvtier_worker.engine.writeback import WritebackJobs


def hit_on_any_rank() -> None:
    """AND over ranks: a block that one rank has counts as a hit of all."""

    def merged(self: HitMatrix) -> tuple[bool, ...]:
        rows = self._rows
        return tuple(any(cell == 1 for cell in column) for column in zip(*rows, strict=True))

    HitMatrix.merged = merged  # type: ignore[method-assign]


def forward_does_not_wait() -> None:
    """Wait at the layer: the forward passes the gate of a layer whose copies are still under way."""

    def wait_event(self: LayerSynchronizer, event: Event, what: str) -> None:
        del self, event, what

    LayerSynchronizer._wait_event = wait_event  # type: ignore[method-assign]


def publish_before_copy() -> None:
    """D2H before publish: a host block can be found as soon as its write-back was sent."""
    flush, end_copy = WritebackJobs.flush, HostTier.end_copy

    def publish_at_once(self: WritebackJobs, job_ids: Iterator[int]) -> list[Writeback]:
        before = set(self.jobs)
        messages = flush(self, job_ids)
        for job_id in set(self.jobs) - before:
            end_copy(self.host, self.jobs[job_id].entries, ok=True)
        return messages

    def end_once(self: HostTier, entries: Sequence[WritebackEntry], *, ok: bool) -> None:
        end_copy(self, [entry for entry in entries if entry.item.block_hash in self.outgoing], ok=ok)

    WritebackJobs.flush = publish_at_once  # type: ignore[method-assign]
    HostTier.end_copy = end_once  # type: ignore[method-assign]


def get_without_asking() -> None:
    """Exists before get: every key is read, there or not, so blocks whose objects are not all there are read too."""
    prefetch = StoreObjects.prefetch

    class Everything:
        """A store that says that it has whatever it is asked for."""

        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def exists(self, keys: Sequence[str]) -> Sequence[bool]:
            return [True] * len(keys)

    def prefetch_blindly(self: StoreObjects, items: Sequence[PrefetchItem]) -> PrefetchResult:
        store = self._store
        self._store = Everything(store)
        try:
            return prefetch(self, items)
        finally:
            self._store = store

    StoreObjects.prefetch = prefetch_blindly  # type: ignore[method-assign]


def restore_by_reference_count() -> None:
    """Provenance: a host slot that somebody else holds too is taken to be on the device already."""
    allocate = TieredBlockManager.allocate

    def allocate_by_count(self: TieredBlockManager, *args: Any, **kwargs: Any) -> tuple[RestoreItem, ...] | None:
        items = allocate(self, *args, **kwargs)
        if items is None or self.host is None:
            return items
        return tuple(item for item in items if self.host.pool.leases(item.host_slot) == 1)

    TieredBlockManager.allocate = allocate_by_count  # type: ignore[method-assign]


MUTATIONS: dict[str, Callable[[], None]] = {
    "and over ranks": hit_on_any_rank,
    "wait at the layer": forward_does_not_wait,
    "D2H before publish": publish_before_copy,
    "exists before get": get_without_asking,
    "provenance": restore_by_reference_count,
}


def pytest_configure() -> None:
    """Apply the mutation that the environment names."""
    MUTATIONS[os.environ["KVTIER_MUTATION"]]()
