"""All workers of an engine, in memory and in virtual time: deterministic from a seed, with delays and faults.

`FakeWorkerGroup` stands behind the `WorkerGroup` port and keeps its promises: every request is answered once by every
rank, RegisterRestore and Forward of a rank run in the order sent, a Writeback copies after the Forwards sent before it,
and an answer means that nothing of the request is touched any more. Within that it is as unkind as it can be: ranks
drift apart, answers of different kinds overtake one another, copies take effect at the last moment, and a slot that is
written while somebody still uses it raises `Hazard`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from kvtier_worker.core.plans import PrefetchItem, RestoreItem
from kvtier_worker.engine.messages import (
    PROTOCOL_VERSION,
    Forward,
    ForwardDone,
    FromWorker,
    Prefetch,
    PrefetchDone,
    RegisterRestore,
    RestoreRegistered,
    SequenceStep,
    Shutdown,
    StatsRequest,
    StoreProbe,
    StoreProbed,
    TokenOutput,
    ToWorker,
    WorkerReady,
    WorkerStats,
    Writeback,
    WritebackCopied,
    WritebackStored,
)
from kvtier_worker.errors import WorkerDied
from kvtier_worker.testing.faults import Delays, Faults
from kvtier_worker.testing.symbolic import Content, SymbolicMemory, SymbolicRank, sample

FakeStore = dict[tuple[int, bytes], Content]
"""Objects by rank and block hash; give it to the next group to restart an engine over the same store."""


@dataclass(slots=True)
class FakeWorkerGroup:
    """See the module.

    Args:
        num_ranks: tensor-parallel ranks.
        num_device_blocks: including padding.
        num_host_slots: including padding; 0 = no host tier.
        block_size: tokens in a block.
        seed: of every delay and fault.
        store: its content; None = a new one.
        max_position: of the model.
    """

    num_ranks: int = 1
    num_device_blocks: int = 64
    num_host_slots: int = 128
    block_size: int = 4
    seed: int = 0
    store: FakeStore = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    delays: Delays = field(default_factory=Delays)
    vocab_size: int = 997
    max_position: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    now: float = 0.0
    sent: list[ToWorker] = field(default_factory=list)
    dead: str = ""
    ranks: list[SymbolicRank] = field(init=False)
    _random: Random = field(init=False)
    _events: list[tuple[float, int, Callable[[], object]]] = field(init=False, default_factory=list)
    _order: itertools.count[int] = field(init=False, default_factory=itertools.count)
    _lane_free: list[float] = field(init=False)
    _arrived: list[FromWorker] = field(init=False, default_factory=list)
    _restores: dict[tuple[int, int], list[RestoreItem]] = field(init=False, default_factory=dict)
    _short: set[tuple[int, int]] = field(init=False, default_factory=set)
    _woken: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)  # noqa: S311 - reproducible, not secret
        self._lane_free = [0.0] * self.num_ranks
        self.ranks = [
            SymbolicRank(
                SymbolicMemory(f"device of rank {rank}", self.num_device_blocks, self.block_size),
                SymbolicMemory(f"host of rank {rank}", self.num_host_slots, self.block_size),
            )
            for rank in range(self.num_ranks)
        ]

    # virtual time

    def clock(self) -> float:
        """Virtual seconds."""
        return self.now

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Call ``action`` at the virtual time ``when``, from inside `poll`."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), action))

    @property
    def busy(self) -> bool:
        """Whether anything is still to happen."""
        return bool(self._events or self._arrived)

    # WorkerGroup

    @property
    def ready(self) -> Sequence[WorkerReady]:
        """What each rank reported."""
        return [
            WorkerReady(
                version=PROTOCOL_VERSION,
                rank=rank,
                pid=0,
                num_device_blocks=self.num_device_blocks,
                num_host_slots=self.num_host_slots,
                object_bytes=self.block_size,
                vocab_size=self.vocab_size,
                max_position=self.max_position,
                eos_token_ids=list(self.eos_token_ids),
                resident_bytes=0,
            )
            for rank in range(self.num_ranks)
        ]

    def send(self, message: ToWorker) -> None:
        """Send to every rank."""
        self._check_alive()
        self.sent.append(message)
        if isinstance(message, Forward):  # the engine goes on to change its block tables
            message = Forward(message.batch_id, message.has_restore, [_copied(step) for step in message.sequences])
        for rank in range(self.num_ranks):
            self._receive(rank, message)

    def poll(self, timeout_s: float) -> Sequence[FromWorker]:
        """Let virtual time pass until a message arrives, `wake` is called or the timeout is over."""
        self._check_alive()
        deadline = self.now + timeout_s
        while not self._arrived and not self._woken and self._events and self._events[0][0] <= deadline:
            self.now, _, action = heapq.heappop(self._events)
            action()
            self._check_alive()
        if not self._arrived and not self._woken:
            self.now = deadline
        self._woken = False
        arrived, self._arrived = self._arrived, []
        return arrived

    def wake(self) -> None:
        """Make `poll` return."""
        self._woken = True

    def close(self, timeout_s: float) -> None:
        """Nothing to stop."""
        del timeout_s
        self.dead = "closed"

    # one rank

    def _receive(self, rank: int, message: ToWorker) -> None:
        if isinstance(message, RegisterRestore):
            self._register(rank, message)
        elif isinstance(message, Forward):
            self._forward(rank, message)
        elif isinstance(message, Prefetch):
            self._prefetch(rank, message)
        elif isinstance(message, Writeback):
            self._writeback(rank, message)
        elif isinstance(message, StoreProbe):
            self._later(self.delays.probe, lambda: self._answer(self._probed(rank, message)))
        elif isinstance(message, StatsRequest):
            self._later(self.delays.probe, lambda: self._answer(self._stats(rank, message)))
        elif isinstance(message, Shutdown):
            return

    def _register(self, rank: int, message: RegisterRestore) -> None:
        memory, user = self.ranks[rank], ("step", message.batch_id)
        for item in message.items:
            memory.host.use(item.host_slot, user, write=False)
            memory.device.use(item.device_block, user, write=True)
        count = len(message.items) - self._happens(self.faults.registers_short)
        self._restores[rank, message.batch_id] = list(message.items)
        if count < len(message.items):
            self._short.add((rank, message.batch_id))
        self._lane(rank, self.delays.register, lambda: self._answer(RestoreRegistered(rank, message.batch_id, count)))

    def _forward(self, rank: int, message: Forward) -> None:
        memory, user = self.ranks[rank], ("step", message.batch_id)
        for step in message.sequences:
            first = step.start // self.block_size
            stop = -(-(step.start + len(step.token_ids)) // self.block_size)
            for index in range(stop):
                memory.device.use(step.block_table[index], user, write=index >= first)
        self._lane(rank, self.delays.forward, lambda: self._compute(rank, message))

    def _compute(self, rank: int, message: Forward) -> None:
        memory = self.ranks[rank]
        items = self._restores.pop((rank, message.batch_id), [])
        error = "no restore registered" if message.has_restore and not items else ""
        if items and self._happens(self.faults.restore_aborts):
            error = "restore aborted"
        elif self._happens(self.faults.forward_fails):
            error = "out of luck"
        nonsense = (rank, message.batch_id) in self._short
        for item in items:
            if error or nonsense:
                memory.device.spoil(item.device_block)
            else:
                memory.device.put(item.device_block, memory.host.content(item.host_slot))
        outputs = []
        for step in () if error else message.sequences:
            after = 0 if nonsense else memory.device.write(step.block_table, step.start, step.token_ids)
            if step.sample:
                outputs.append(TokenOutput(step.request_id, sample(after, self.vocab_size)))
        memory.leave(("step", message.batch_id))
        self._answer(ForwardDone(rank, message.batch_id, [] if rank else outputs, 0.01, 0.001, error))

    def _prefetch(self, rank: int, message: Prefetch) -> None:
        user = ("prefetch", message.job_id, message.offset)
        for item in message.items:
            self.ranks[rank].host.use(item.host_slot, user, write=True)

        def done() -> None:
            hits = bytes(self._get(rank, item) for item in message.items)
            self.ranks[rank].leave(user)
            faults = len(hits) if self.faults.store_down else 0
            if self._happens(self.faults.prefetch_malformed):
                hits = hits[:-1]
            size = self.block_size * sum(hits)
            self._answer(PrefetchDone(rank, message.job_id, message.offset, hits, size, 0.001, faults, 0))

        self._later(self.delays.prefetch * len(message.items), done)

    def _get(self, rank: int, item: PrefetchItem) -> bool:
        host, content = self.ranks[rank].host, self.store.get((rank, bytes(item.block_hash)))
        if content is None or self.faults.store_down or self._happens(self.faults.prefetch_item_lost):
            host.spoil(item.host_slot)
            return False
        host.put(item.host_slot, content)
        return True

    def _writeback(self, rank: int, message: Writeback) -> None:
        memory, reading, storing = self.ranks[rank], ("copy", message.job_id), ("put", message.job_id)
        for item in message.items:
            memory.device.use(item.device_block, reading, write=False)
            memory.host.use(item.host_slot, reading, write=True)

        def copied() -> None:
            fails = self._happens(self.faults.copy_fails)
            for item in message.items:
                if fails:
                    memory.host.spoil(item.host_slot)
                else:
                    memory.host.put(item.host_slot, memory.device.content(item.device_block))
            memory.leave(reading)
            for item in message.items:
                memory.host.use(item.host_slot, storing, write=False)
            count = 0 if fails else len(message.items)
            error = "copy failed" if fails else ""
            self._answer(WritebackCopied(rank, message.job_id, count, self.block_size * count, 0.001, error))
            self._later(self.delays.put, lambda: self._put(rank, message, fails=fails))

        start = max(self.now, self._lane_free[rank])
        self.at(start + self._spread(self.delays.copy), copied)

    def _put(self, rank: int, message: Writeback, *, fails: bool) -> None:
        memory = self.ranks[rank]
        stored = existing = failed = 0
        for item in () if fails else message.items:
            key = (rank, bytes(item.block_hash))
            if self.faults.store_down or self._happens(self.faults.put_fails):
                failed += 1
            elif key in self.store:
                existing += 1
            else:
                stored += 1
                self.store[key] = memory.host.content(item.host_slot)
        memory.leave(("put", message.job_id))
        self._answer(WritebackStored(rank, message.job_id, stored, existing, failed, stored * self.block_size, 0.001))

    def _probed(self, rank: int, message: StoreProbe) -> StoreProbed:
        up = not self.faults.store_down
        exists = bytes(up and (rank, block_hash) in self.store for block_hash in message.block_hashes)
        return StoreProbed(rank, message.job_id, exists, up)

    def _stats(self, rank: int, message: StatsRequest) -> WorkerStats:
        state = "open" if self.faults.store_down else "closed"
        return WorkerStats(rank, message.job_id, 0, 0, 0.0, 0, 0.0, state, {}, [])

    # time and chance

    def _lane(self, rank: int, delay: float, action: Callable[[], object]) -> None:
        """After everything this rank's lane has to do already."""
        self._lane_free[rank] = max(self.now, self._lane_free[rank]) + self._spread(delay)
        self.at(self._lane_free[rank], action)

    def _later(self, delay: float, action: Callable[[], object]) -> None:
        self.at(self.now + self._spread(delay), action)

    def _spread(self, delay: float) -> float:
        return delay * (0.5 + self._random.random())

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability

    def _answer(self, message: FromWorker) -> None:
        self._arrived.append(message)

    def _check_alive(self) -> None:
        if self.dead:
            raise WorkerDied(self.dead)


def _copied(step: SequenceStep) -> SequenceStep:
    return SequenceStep(
        step.request_id, list(step.token_ids), step.start, list(step.block_table), step.sample, step.sampling
    )
