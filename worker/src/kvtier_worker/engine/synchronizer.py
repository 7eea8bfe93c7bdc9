"""What makes a forward wait for its restores, layer range by layer range (R3).

One `LayerSynchronizer` per batch: made when the restore is queued, taken by that batch's Forward, finished after it.
It owns the copy stream's lease until then, so nobody else can be blamed for, or hurt by, its failure. All of this is
called by the compute thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier_worker.core.ids import BatchId
from kvtier_worker.engine.ports import CopyEngine, Event
from kvtier_worker.errors import ProtocolError, TransferFailed


@dataclass(slots=True)
class LayerSynchronizer:
    """The `LayerGate` of one batch.

    Attributes:
        batch_id: the batch whose blocks are being restored.
        ranges: half-open layer ranges of the target model, in copy order.
        events: one event per range.
        draft_event: after all copies of the draft domain; None = there is no draft.
        release: gives the stream back; called once. True = the stream must be drained before its next use.
        hold_failure: with several ranks, an exception in the middle of a forward would leave the other ranks alone in
            a collective. Then a failed wait is kept, the forward runs on in step, and `finish` raises: the outputs
            are dropped either way.
    """

    batch_id: BatchId
    engine: CopyEngine
    ranges: Sequence[tuple[int, int]]
    events: Sequence[Event]
    draft_event: Event | None
    release: Callable[[bool], None]
    hold_failure: bool = False
    stall_s: float = field(default=0.0, init=False)
    _index: dict[int, int] = field(init=False)
    _waited: set[int] = field(init=False, default_factory=set)
    _failure: str = field(default="", init=False)
    _finished: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if len(self.ranges) != len(self.events):
            msg = f"batch {self.batch_id}: {len(self.ranges)} layer ranges, {len(self.events)} events"
            raise ProtocolError(msg)
        self._index = {start: index for index, (start, _) in enumerate(self.ranges)}

    @property
    def failed(self) -> bool:
        """Whether a wait failed or the batch was aborted."""
        return bool(self._failure)

    def wait(self, layer: int) -> None:
        """Order compute submitted from now on behind ``layer``'s copies; free except at the start of a range.

        Raises:
            TransferFailed: the restore failed or was aborted (at once, or in `finish` under ``hold_failure``).
        """
        index = self._index.get(layer)
        if index is None:
            return
        self._waited.add(index)
        self._wait_event(self.events[index], f"layers {self.ranges[index]}")

    def wait_draft(self) -> None:
        """The same for the draft model, which waits once for everything.

        Raises:
            TransferFailed: see `wait`.
        """
        if self.draft_event is not None:
            self._wait_event(self.draft_event, "the draft domain")

    def abort(self, reason: str) -> None:
        """Make every later wait, or `finish`, fail."""
        self._failure = self._failure or reason

    def finish(self) -> None:
        """The forward returned: wait for the last copy, then give the stream back.

        The wait is free if the forward read its tokens, because they depend on the copies. A forward that samples
        nothing may return while the device still waits for copies, and the host slots they read are freed after this.

        Raises:
            TransferFailed: a copy failed, or some range was never waited for: the outputs are worthless.
        """
        missed = [self.ranges[index] for index in range(len(self.ranges)) if index not in self._waited]
        if missed and not self._failure:
            self._failure = f"the forward never waited for layers {missed}"
        if not self._failure:
            self._await_copies()
        self._close()
        if self._failure:
            msg = f"batch {self.batch_id}: {self._failure}"
            raise TransferFailed(msg)

    def abandon(self, reason: str) -> None:
        """Drain and give the stream back: this batch's forward failed or will never run. Idempotent."""
        self.abort(reason)
        self._close()

    def _wait_event(self, event: Event, what: str) -> None:
        if not self._failure:
            try:
                self.stall_s += self.engine.compute_waits(event)
            except TransferFailed as error:
                self._failure = f"restore of {what} failed: {error}"
        if self._failure and not self.hold_failure:
            msg = f"batch {self.batch_id}: {self._failure}"
            raise TransferFailed(msg)

    def _await_copies(self) -> None:
        try:
            for event in self.events:
                event.synchronize()
        except TransferFailed as error:
            self._failure = f"restore failed: {error}"

    def _close(self) -> None:
        if not self._finished:
            self._finished = True
            self.release(bool(self._failure) or self.draft_event is not None)


@dataclass(slots=True)
class FailedGate:
    """Stands in for a synchroniser that should exist and does not, where ranks must stay in step: fails at the end."""

    reason: str
    stall_s: float = 0.0
    failed: bool = True

    def wait(self, layer: int) -> None:
        """Let the forward run on; its outputs are dropped in `finish`."""

    def finish(self) -> None:
        """Raise what `wait` held back.

        Raises:
            TransferFailed: always.
        """
        raise TransferFailed(self.reason)

    def abandon(self, reason: str) -> None:
        """Nothing to give back."""


@dataclass(slots=True)
class SynchronizerTable:
    """Synchronisers by batch, between RegisterRestore and Forward."""

    hold_failure: bool = False
    _entries: dict[BatchId, LayerSynchronizer] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, batch_id: BatchId) -> bool:
        return batch_id in self._entries

    def register(self, synchronizer: LayerSynchronizer) -> None:
        """Keep a synchroniser until its Forward.

        Raises:
            ProtocolError: its batch has one already; the first one stays.
        """
        if synchronizer.batch_id in self._entries:
            msg = f"batch {synchronizer.batch_id} registered its restore twice"
            raise ProtocolError(msg)
        self._entries[synchronizer.batch_id] = synchronizer

    def take(self, batch_id: BatchId, *, expected: bool) -> LayerSynchronizer | FailedGate | None:
        """Remove and return the gate of a batch that is about to run; None = it restores nothing.

        Older entries belong to forwards that were never sent: they are drained first, because their destination
        blocks may be in use again by this batch.

        Raises:
            TransferFailed: a restore was announced and is missing, or the other way round.
        """
        for older in sorted(key for key in self._entries if key < batch_id):
            self._entries.pop(older).abandon(f"overtaken by batch {batch_id}")
        entry = self._entries.pop(batch_id, None)
        if expected == (entry is not None):
            return entry
        reason = f"batch {batch_id}: a restore was announced and never registered"
        if entry is not None:
            reason = f"batch {batch_id}: a restore was registered and not announced by its forward"
            entry.abandon(reason)
        if self.hold_failure:
            return FailedGate(reason)
        raise TransferFailed(reason)

    def abort_all(self, reason: str) -> None:
        """Drain and drop every entry."""
        while self._entries:
            self._entries.popitem()[1].abandon(reason)
