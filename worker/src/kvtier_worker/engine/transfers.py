"""All copies of one worker between device, host and store: the `HierarchyKVCacheTransfer` (K1).

    prefetch    store -> host              any thread, the call lasts as long as the reads
    restore     host -> device             compute thread, queued; the forward waits layer range by layer range
    writeback   device -> host -> store    queued behind the compute event; two stages, two callbacks

It knows ids, layouts and ports; tensors, sockets and processes are somebody else's.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier_worker.core.ids import BatchId, BlockHash, BlockId, BlockType, CacheRole, HostSlot, Rank
from kvtier_worker.core.keys import DEFAULT_HASH_SEED, KeySpace, schema_hash
from kvtier_worker.core.layout import DomainLayout, layer_ranges
from kvtier_worker.core.plans import PrefetchItem, RestorePlan, WritebackPlan
from kvtier_worker.engine.arena import ArenaMemory, HostArena, arena_bytes, bind_arena, plan_regions
from kvtier_worker.engine.call_gate import CallGate
from kvtier_worker.engine.copy_streams import CopyStreamPool
from kvtier_worker.engine.ports import CopyCounters, CopyEngine, CopyJob, CopyStream, DeviceCache, Event, KVCacheStore
from kvtier_worker.engine.quarantine import Quarantine
from kvtier_worker.engine.store_objects import PrefetchResult, ProbeResult, PutResult, StoreObjects
from kvtier_worker.engine.synchronizer import FailedGate, LayerSynchronizer, SynchronizerTable
from kvtier_worker.engine.writeback_pipeline import CopyResult, OnCopied, OnStored, StoreResult, WritebackPipeline
from kvtier_worker.errors import ConfigError, ProtocolError, TransferFailed

log = logging.getLogger(__name__)

CopyEngineFactory = Callable[[HostArena, Sequence[DeviceCache]], CopyEngine]
_FIRST_RANK = Rank(0)
_NO_COPIES = CopyCounters()
_Pairs = Sequence[tuple[BlockType, HostSlot, BlockId]]


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """What a transfer needs to know of its worker.

    Attributes:
        model_id: namespace of the store keys.
        num_host_slots: slots of every BlockType including padding slot 0; 0 = no host tier.
        layer_copies: ``--layers_wise_copy_batchs``.
        verify: ``--enable_store_integrity``.
        num_streams: copy streams at most, leased one per restore or write-back under way.
        max_queued_puts: write-back jobs that may wait for the store.
        quarantine_s: how long a corrupt key is not fetched.
        quarantine_keys: corrupt keys remembered at most.
    """

    model_id: str
    num_host_slots: int
    tp_size: int = 1
    tp_rank: Rank = _FIRST_RANK
    mla: bool = False
    hash_seed: int = DEFAULT_HASH_SEED
    layer_copies: int = 4
    verify: bool = True
    num_streams: int = 6
    max_queued_puts: int = 64
    quarantine_s: float = 300.0
    quarantine_keys: int = 4096


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counters since the start."""

    copies: CopyCounters = _NO_COPIES
    store_state: str = "off"
    store_errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Built:
    """What exists once registration is final and there is a host tier."""

    arena: HostArena
    engine: CopyEngine
    streams: CopyStreamPool
    pipeline: WritebackPipeline
    objects: StoreObjects | None


class HierarchyKVCacheTransfer:
    """One per worker process. Register every cache, finalise, then copy.

    Args:
        options: see `TransferOptions`.
        copy_engine: builds the device's copy engine over the arena.
        memory: gives the arena its bytes.
        store: third tier; None = off. Closed by `shutdown`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        options: TransferOptions,
        *,
        copy_engine: CopyEngineFactory,
        memory: ArenaMemory,
        store: KVCacheStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._copy_engine = copy_engine
        self._memory = memory
        self._store = store
        self._clock = clock
        self._caches: list[DeviceCache] = []
        self._built: _Built | None = None
        self._final = False
        self._calls = CallGate()
        self._last_restore: Event | None = None
        self._table = SynchronizerTable(hold_failure=options.tp_size > 1)

    # registration

    def register_cache(self, cache: DeviceCache) -> int:
        """Add a domain; returns its handle, which counts from 0.

        Raises:
            ConfigError: too late, empty, or its role or key component is taken or missing.
        """
        layout = cache.layout
        faults: list[str] = []
        if self._final:
            faults.append(f"cache domain {layout.role}: registration is final")
        if not layout.objects or cache.num_blocks < 2:  # noqa: PLR2004 - block 0 is padding
            faults.append(f"cache domain {layout.role}: no blocks")
        if not layout.key_component:
            faults.append(f"cache domain {layout.role}: empty key component")
        for other in self._caches:
            if other.layout.role == layout.role:
                faults.append(f"cache domain {layout.role} is registered twice")
            elif other.layout.key_component == layout.key_component:
                faults.append(f"cache domains {other.layout.role} and {layout.role} share {layout.key_component!r}")
        if faults:
            raise ConfigError(faults)
        self._caches.append(cache)
        return len(self._caches) - 1

    def finalize_registration(self) -> None:
        """Build arena, copy engine and store access over all registered domains.

        Raises:
            ConfigError: nothing registered, finalised twice, or no memory for the arena.
            StoreUnavailable: the store refuses the arena.
        """
        roles = [str(cache.layout.role) for cache in self._caches]
        if self._final or CacheRole.TARGET not in roles:
            raise ConfigError([f"cache domains {roles} cannot be finalised (already final: {self._final})"])
        self._final = True
        if not self._options.num_host_slots:
            return
        regions = plan_regions([cache.layout for cache in self._caches], self._options.num_host_slots)
        arena = bind_arena(self._memory.allocate(arena_bytes(regions)), regions)
        engine = self._copy_engine(arena, tuple(self._caches))
        objects = None
        if self._store is not None:
            self._store.register(arena.address, arena.nbytes)
            objects = self._store_objects(self._store, arena)
        streams = CopyStreamPool(engine, self._options.num_streams)
        pipeline = WritebackPipeline(self._copy_out, self._put, self._options.max_queued_puts)
        self._built = _Built(arena, engine, streams, pipeline, objects)

    @property
    def arena_bytes(self) -> int:
        """Host memory that registration took."""
        return self._built.arena.nbytes if self._built is not None else 0

    # host -> device

    def restore(self, plan: RestorePlan) -> int:
        """Queue the copies of one batch and register its synchroniser; returns the number of items scheduled.

        Copies start behind everything computed and restored so far, because the destination blocks may have been in
        use until now.

        Raises:
            TransferFailed: the plan cannot be carried out; nothing will be copied for it and nothing is registered.
            ProtocolError: the batch has a restore already.
        """
        built = self._require()
        if plan.batch_id in self._table:
            msg = f"batch {plan.batch_id} registered its restore twice"
            raise ProtocolError(msg)
        pairs = [(item.block_type, item.host_slot, item.device_block) for item in plan.items]
        self._validate(f"restore of batch {plan.batch_id}", pairs)
        stream = built.streams.lease()
        try:
            self._table.register(self._submit_restore(built, stream, plan.batch_id, self._jobs(pairs)))
        except Exception:  # whatever it was, copies queued so far must not outlive the lease of their blocks
            built.streams.release(stream, drain=True)
            raise
        return len(plan.items)

    def take(self, batch_id: BatchId, *, expected: bool) -> LayerSynchronizer | FailedGate | None:
        """The gate of a batch that is about to run; see `SynchronizerTable.take`.

        Raises:
            TransferFailed: announced and not registered, or registered and not announced.
        """
        return self._table.take(batch_id, expected=expected)

    # store -> host

    def prefetch(self, items: Sequence[PrefetchItem]) -> PrefetchResult:
        """Read one batch of blocks into their host slots; misses where anything at all is in the way."""
        with self._calls.enter() as accepted:
            built = self._built
            if not accepted or built is None or built.objects is None:
                return PrefetchResult(bytes(len(items)))
            return built.objects.prefetch(items)

    def probe(self, block_hashes: Sequence[BlockHash]) -> ProbeResult:
        """Which KV blocks the store holds for this rank."""
        with self._calls.enter() as accepted:
            built = self._built
            if not accepted or built is None or built.objects is None:
                return ProbeResult(bytes(len(block_hashes)), available=False)
            return built.objects.probe(block_hashes)

    # device -> host -> store

    def writeback(self, plan: WritebackPlan, on_copied: OnCopied, on_stored: OnStored) -> None:
        """Queue one job behind everything computed so far. Called by the compute thread.

        ``on_copied`` and then ``on_stored`` are called exactly once each, from other threads, unless this raises.

        Raises:
            TransferFailed: the plan cannot be carried out.
        """
        built = self._require()
        pairs = [(item.block_type, item.host_slot, item.device_block) for item in plan.items]
        self._validate(f"write-back job {plan.job_id}", pairs)
        if len({(item.block_type, item.host_slot) for item in plan.items}) < len(plan.items):
            msg = f"write-back job {plan.job_id} names a host slot twice"
            raise TransferFailed(msg)
        built.pipeline.submit(plan, built.engine.record_compute(), on_copied, on_stored)

    # the rest

    def stats(self) -> TransferStats:
        """Counters since the start."""
        copies = self._built.engine.counters if self._built is not None else _NO_COPIES
        if self._store is None:
            return TransferStats(copies)
        errors = dict(self._store.error_counts)
        if self._built is not None and (skipped := self._built.pipeline.num_skipped_puts):
            errors["put_left_out"] = skipped
        return TransferStats(copies, self._store.state, errors)

    def check_integrity(self) -> list[str]:
        """What does not add up here. Called by the compute thread between forwards."""
        if self._built is None or self._built.pipeline.num_pending:  # none starts now, but one may end, so ask first
            return []
        leased, waiting = self._built.streams.num_leased, len(self._table)
        if leased == waiting:
            return []
        return [f"{leased} copy streams leased, {waiting} restores waiting for their forward, no write-back running"]

    def shutdown(self) -> None:
        """Stop accepting, finish every copy and put, close the store, then give the arena back. Idempotent.

        The order matters: the store may touch the arena until it is closed.
        """
        if not self._calls.close():
            return
        self._table.abort_all("the worker is shutting down")
        if self._built is not None:
            self._built.pipeline.close()
            self._built.engine.close()
        if self._store is not None:
            self._store.close()
        if self._built is not None:
            self._built = None
            self._memory.free()

    def _require(self) -> _Built:
        if self._built is None or self._calls.closed:
            msg = "no host tier: nothing can be restored or written back"
            raise TransferFailed(msg)
        return self._built

    def _store_objects(self, store: KVCacheStore, arena: HostArena) -> StoreObjects:
        options = self._options
        return StoreObjects(
            store,
            arena,
            {cache.layout.role: self._key_space(cache.layout) for cache in self._caches},
            Quarantine(options.quarantine_s, options.quarantine_keys, self._clock),
            Quarantine(options.quarantine_s, options.quarantine_keys, self._clock),
            tried=Quarantine(options.quarantine_s, options.quarantine_keys, self._clock),
            verify=options.verify,
            writes=not options.mla or options.tp_rank == 0,
        )

    def _key_space(self, domain: DomainLayout) -> KeySpace:
        options = self._options
        schema = schema_hash(domain, tp_size=options.tp_size, mla=options.mla, seed=options.hash_seed)
        return KeySpace(
            options.model_id, domain.key_component, schema, options.tp_size, options.tp_rank, mla=options.mla
        )

    def _validate(self, what: str, pairs: _Pairs) -> None:
        faults = [] if pairs else [f"{what} is empty"]
        for block_type, slot, block in pairs:
            owners = [cache for cache in self._caches if block_type in cache.layout.objects]
            if not owners:
                faults.append(f"{what}: no domain has blocks of type {block_type.name}")
            if not 0 < slot < self._options.num_host_slots:
                faults.append(f"{what}: host slot {slot} is outside [1, {self._options.num_host_slots})")
            faults += [
                f"{what}: device block {block} is outside [1, {cache.num_blocks}) of {cache.layout.role}"
                for cache in owners
                if not 0 < block < cache.num_blocks
            ]
        targets = Counter((block_type, block) for block_type, _, block in pairs)
        faults += [f"{what}: device block {block} twice" for (_, block), count in targets.items() if count > 1]
        if faults:
            raise TransferFailed("; ".join(faults))

    def _jobs(self, pairs: _Pairs) -> list[CopyJob]:
        """One job per (domain, BlockType), in registration order."""
        by_type: dict[BlockType, list[tuple[HostSlot, BlockId]]] = {}
        for block_type, slot, block in pairs:
            by_type.setdefault(block_type, []).append((slot, block))
        return [
            CopyJob(cache.layout.role, block_type, tuple(found))
            for cache in self._caches
            for block_type, found in by_type.items()
            if block_type in cache.layout.objects
        ]

    def _submit_restore(
        self, built: _Built, stream: CopyStream, batch_id: BatchId, jobs: Sequence[CopyJob]
    ) -> LayerSynchronizer:
        """Target ranges with an event each, then the draft with its own.

        Only KV is cut by layers: other types number their layers on their own and travel ahead of the first range.
        """
        stream.wait(built.engine.record_compute())
        if self._last_restore is not None:
            stream.wait(self._last_restore)
        target = [job for job in jobs if job.role is CacheRole.TARGET]
        for job in target:
            if job.block_type is not BlockType.KV:
                stream.restore(job, 0, self._num_layers(job))
        layered = [job for job in target if job.block_type is BlockType.KV]
        ranges = first_layer_alone(layer_ranges(self._target_layers(), self._options.layer_copies))
        events: list[Event] = []
        for start, stop in ranges:
            for job in layered:
                stream.restore(job, start, stop)
            events.append(stream.record())
        draft = [job for job in jobs if job.role is not CacheRole.TARGET]
        for job in draft:
            stream.restore(job, 0, self._num_layers(job))
        draft_event = stream.record() if draft else None
        self._last_restore = draft_event or events[-1]
        return LayerSynchronizer(
            batch_id,
            built.engine,
            ranges,
            events,
            draft_event,
            release=lambda drain: built.streams.release(stream, drain=drain),
            hold_failure=self._options.tp_size > 1,
        )

    def _num_layers(self, job: CopyJob) -> int:
        return next(
            cache.layout.objects[job.block_type].num_layers for cache in self._caches if cache.layout.role is job.role
        )

    def _target_layers(self) -> int:
        """Layers that the target's forward walks through."""
        target = next(cache.layout for cache in self._caches if cache.layout.role is CacheRole.TARGET)
        return max(layout.num_layers for layout in target.objects.values())

    def _copy_out(self, plan: WritebackPlan, after: Event) -> CopyResult:
        built = self._built
        assert built is not None
        started = self._clock()
        stream = None
        try:
            stream = built.streams.lease()
            stream.wait(after)
            jobs = self._jobs([(item.block_type, item.host_slot, item.device_block) for item in plan.items])
            for job in jobs:
                stream.writeback(job)
            stream.synchronize()
        except Exception as error:  # top of the copying thread: every job is answered
            if stream is not None:
                built.streams.release(stream, drain=True)
            log.exception("write-back failed job=%d", plan.job_id)
            return CopyResult(0, 0, self._clock() - started, f"{type(error).__name__}: {error}")
        built.streams.release(stream, drain=False)
        num_bytes = sum(
            len(job.pairs) * built.arena.regions[job.role, job.block_type].layout.payload_bytes for job in jobs
        )
        return CopyResult(len(plan.items), num_bytes, self._clock() - started)

    def _put(self, plan: WritebackPlan) -> StoreResult:
        built = self._built
        assert built is not None
        started = self._clock()
        try:
            result = built.objects.put(plan.items) if built.objects is not None else PutResult()
        except Exception:  # top of the putting thread: every job is answered
            log.exception("put failed job=%d", plan.job_id)
            result = PutResult(num_failed=len(plan.items))
        return StoreResult(result, self._clock() - started)


def first_layer_alone(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Cut the first layer off the first range, unless everything is one range by choice.

    A forward can hide every copy but the one of its first range, so that one is made as short as it can be.
    """
    (start, stop), *others = ranges
    if not others or stop - start == 1:
        return tuple(ranges)
    return ((start, start + 1), (start + 1, stop), *others)
