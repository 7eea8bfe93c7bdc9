"""What the engine counts. Names as in xLLM where it has one; ours are per tier and start with ``cache_tier_``.

Conservation, which a test asserts: ``prompt_tokens_total = prompt_tokens_computed_total +
sum(prompt_tokens_cached_total{tier})``. A prompt counts once, when its first step succeeded; what it recomputes after a
preemption is not prompt again.

The engine thread writes, a scrape reads from another thread; numbers of one scrape may be a step apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtier_worker.core.ids import Tier
from kvtier_worker.core.pool import BlockPool
from kvtier_worker.engine.histogram import Histogram
from kvtier_worker.engine.messages import ForwardDone, PrefetchDone, WorkerStats, WritebackCopied, WritebackStored
from kvtier_worker.engine.prefetch_job import PrefetchReport

TTFT_MS: Final = (5, 10, 20, 50, 100, 200, 300, 500, 750, 1000, 2000, 3000, 5000, 10000, 20000, 60000)
ITL_MS: Final = (1, 2, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000)
SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
PERCENT: Final = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)
BLOCKS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

Gauges = Callable[[], Mapping[str, float]]


class EngineMetrics:
    """All counters of one engine, in a registry of their own.

    Attributes:
        registry: what /metrics shows.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ttft_ms = Histogram(
            "engine_first_token_milliseconds", "From submission to first token, inside the engine.", TTFT_MS
        )
        self.itl_ms = Histogram(
            "engine_inter_token_milliseconds", "Between two tokens of a sequence, inside the engine.", ITL_MS
        )
        self.step_s = Histogram("engine_step_seconds", "From dispatch of a step to its last rank's answer.", SECONDS)
        self.prefetch_s = Histogram("cache_prefetch_seconds", "From start to end of a prefetch.", SECONDS)
        self.matched_rate = Histogram("prefix_cache_block_matched_rate", "Percent of a prompt's full blocks.", PERCENT)
        self.matched_num = Histogram("prefix_cache_block_matched_num", "Blocks of a prompt found cached.", BLOCKS)
        self._histograms = (
            self.ttft_ms,
            self.itl_ms,
            self.step_s,
            self.prefetch_s,
            self.matched_rate,
            self.matched_num,
        )
        self.requests = self._counter("requests", "Requests ended.", "reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests whose first step succeeded.")
        self.prompt_cached = self._counter("prompt_tokens_cached", "Prompt tokens not computed, by tier.", "tier")
        self.prompt_computed = self._counter("prompt_tokens_computed", "Prompt tokens computed.")
        self.matched_length = self._counter("prefix_cache_match_length", "Prompt tokens found cached, all tiers.")
        self.generated_tokens = 0
        self.match_s = self._counter("prefix_cache_latency_seconds_match", "Time of looking prompts up.")
        self.insert_s = self._counter("prefix_cache_latency_seconds_insert", "Time of publishing computed blocks.")
        self.allocate_s = self._counter("allocate_blocks_latency_seconds", "Time of leasing, evictions included.")
        self.preempted = self._counter("num_preempted_requests", "Times a running request gave up its blocks.")
        self.failed_steps = self._counter("engine_failed_steps", "Steps whose results were dropped.")
        self.failed_sinks = self._counter("engine_failed_sinks", "Outputs that a client's sink could not take.")
        self.stall_s = self._counter("cache_layer_stall_seconds", "Time forwards waited for restores, slowest rank.")
        self.compute_s = self._counter("engine_compute_seconds", "Time of forwards, slowest rank.")
        self.prefetches = self._counter("cache_prefetch_requests", "Prefetches ended.", "outcome")
        self.probes = self._counter("cache_tier_probes", "Blocks looked for in a tier.", "tier")
        self.hits = self._counter("cache_tier_hits", "Blocks found whole in a tier.", "tier")
        self.tokens = self._counter("cache_tier_tokens", "Tokens of prompts taken from a tier.", "tier")
        self.read_bytes = self._counter("cache_tier_read_bytes", "Bytes read from a tier, all ranks.", "tier")
        self.read_s = self._counter("cache_tier_read_seconds", "Time of reads from a tier, summed over ranks.", "tier")
        self.written_bytes = self._counter("cache_tier_written_bytes", "Bytes written to a tier, all ranks.", "tier")
        self.written_s = self._counter("cache_tier_written_seconds", "Time of writes, summed over ranks.", "tier")
        self.faults = self._counter("cache_tier_faults", "Errors of a tier, none of them a request's.", "tier", "kind")
        self.puts = self._counter("cache_store_put_objects", "Objects offered to the store.", "outcome")
        for tier in Tier:
            for counter in (self.prompt_cached, self.probes, self.hits, self.tokens):
                counter.labels(tier)
        self._pools: dict[Tier, BlockPool] = {}
        self._gauges: Gauges = dict
        self._reported: dict[int, WorkerStats] = {}
        self.registry.register(self)

    def watch(self, pools: Mapping[Tier, BlockPool], gauges: Gauges) -> None:
        """Show these pools, and whatever ``gauges`` returns, at every scrape."""
        self._pools = dict(pools)
        self._gauges = gauges

    # events

    def prompt_counted(self, prompt_tokens: int, full_blocks: int, block_size: int, cached: Mapping[Tier, int]) -> None:
        """The first step of a prompt succeeded."""
        hit = sum(cached.values())
        self.prompt_tokens.inc(prompt_tokens)
        self.prompt_computed.inc(prompt_tokens - hit)
        self.matched_length.inc(hit)
        for tier, tokens in cached.items():
            self.prompt_cached.labels(tier).inc(tokens)
            self.tokens.labels(tier).inc(tokens)
        self.matched_num.observe(hit // block_size)
        if full_blocks:
            self.matched_rate.observe(100 * hit / (full_blocks * block_size))

    def probed(self, tier: Tier, probes: int, hits: int) -> None:
        """Blocks were looked for in a tier."""
        self.probes.labels(tier).inc(probes)
        self.hits.labels(tier).inc(hits)

    def prefetch_ended(self, report: PrefetchReport) -> None:
        """A prefetch job is over."""
        self.prefetches.labels(report.outcome).inc()
        self.prefetch_s.observe(report.seconds)
        self.probed(Tier.STORE, report.num_asked, report.num_hits)

    def prefetch_done(self, message: PrefetchDone) -> None:
        """A rank ended a prefetch batch."""
        self.read_bytes.labels(Tier.STORE).inc(message.num_bytes)
        self.read_s.labels(Tier.STORE).inc(message.seconds)
        self._faults(Tier.STORE, "get", message.num_faults)
        self._faults(Tier.STORE, "corrupt", message.num_corrupt)

    def copied(self, message: WritebackCopied) -> None:
        """A rank ended the device -> host copies of a job."""
        self.written_bytes.labels(Tier.HOST).inc(message.num_bytes)
        self.written_s.labels(Tier.HOST).inc(message.seconds)
        self._faults(Tier.HOST, "writeback", int(bool(message.error)))

    def stored(self, message: WritebackStored) -> None:
        """A rank ended the puts of a job."""
        self.written_bytes.labels(Tier.STORE).inc(message.num_bytes)
        self.written_s.labels(Tier.STORE).inc(message.seconds)
        self._faults(Tier.STORE, "put", message.num_failed)
        for outcome, count in (
            ("stored", message.num_stored),
            ("exists", message.num_existing),
            ("failed", message.num_failed),
        ):
            self.puts.labels(outcome).inc(count)

    def step_ended(self, done: Mapping[int, ForwardDone], seconds: float) -> None:
        """Every rank answered a step."""
        self.step_s.observe(seconds)
        self.compute_s.inc(max((message.compute_s for message in done.values()), default=0.0))
        self.stall_s.inc(max((message.stall_s for message in done.values()), default=0.0))

    def stats(self, message: WorkerStats) -> None:
        """A worker reported its own counters."""
        before = self._reported.get(message.rank)
        self._reported[message.rank] = message
        self.read_bytes.labels(Tier.HOST).inc(max(0, message.restore_bytes - (before.restore_bytes if before else 0)))
        self.read_s.labels(Tier.HOST).inc(max(0.0, message.restore_s - (before.restore_s if before else 0.0)))

    # scrape

    def collect(self) -> Iterator[Metric]:
        """What is read at the scrape; called by the registry."""
        for histogram in self._histograms:
            yield from histogram.collect()
        blocks = GaugeMetricFamily("cache_tier_blocks", "Slots of a tier by state.", labels=["tier", "state"])
        evictions = CounterMetricFamily("cache_tier_evictions", "Cached blocks given up for others.", labels=["tier"])
        for tier, pool in self._pools.items():
            counts = pool.counts()
            for state in ("usable", "free", "leased", "cached", "published"):
                blocks.add_metric([tier, state], getattr(counts, state))
            evictions.add_metric([tier], pool.num_evictions)
        yield blocks
        yield evictions
        yield CounterMetricFamily("generation_tokens", "Tokens sampled.", value=self.generated_tokens)
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(name, name.replace("_", " ") + ".", value=value)
        memory = GaugeMetricFamily("worker_resident_bytes", "Resident memory of a worker.", labels=["rank"])
        breaker = GaugeMetricFamily("cache_store_state", "1 = the rank's store is in it.", labels=["rank", "state"])
        errors = CounterMetricFamily("cache_store_errors", "Errors of a rank's store.", labels=["rank", "error"])
        for rank, stats in list(self._reported.items()):
            memory.add_metric([str(rank)], stats.resident_bytes)
            breaker.add_metric([str(rank), stats.store_state], 1)
            for error, count in stats.store_errors.items():
                errors.add_metric([str(rank), error], count)
        yield from (memory, breaker, errors)

    # private

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _faults(self, tier: Tier, kind: str, count: int) -> None:
        if count:
            self.faults.labels(tier, kind).inc(count)
