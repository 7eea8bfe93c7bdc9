from __future__ import annotations

from kvtier_worker.core.ids import Tier
from kvtier_worker.core.pool import BlockPool
from kvtier_worker.engine.histogram import Histogram
from kvtier_worker.engine.messages import WorkerStats
from kvtier_worker.engine.metrics import EngineMetrics
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families


def stats(restore_bytes: int, state: str = "closed") -> WorkerStats:
    return WorkerStats(0, 1, 4096, restore_bytes, 0.5, 0, 0.0, state, {"timeout": 2}, [])


def test_a_value_on_a_bound_belongs_to_that_bucket() -> None:
    histogram = Histogram("h", "text", (1, 2))
    for value in (0.5, 1, 1.5, 2, 99):
        histogram.observe(value)
    (family,) = histogram.collect()
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name == "h_bucket"}
    assert buckets == {"1": 2, "2": 4, "+Inf": 5}
    assert histogram.count == 5


def test_everything_can_be_scraped() -> None:
    metrics = EngineMetrics()
    metrics.watch({Tier.DEVICE: BlockPool(Tier.DEVICE, 5)}, lambda: {"num_running_requests": 3})
    metrics.prompt_counted(10, 2, 4, {Tier.DEVICE: 4, Tier.HOST: 0, Tier.STORE: 4})
    metrics.stats(stats(100))
    text = generate_latest(metrics.registry).decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {
        "engine_first_token_milliseconds",
        "engine_inter_token_milliseconds",
        "prefix_cache_block_matched_rate",
        "cache_tier_blocks",
        "cache_store_state",
        "num_running_requests",
        "num_preempted_requests",
    } <= names
    value = metrics.registry.get_sample_value
    assert value("cache_tier_blocks", {"tier": "device", "state": "free"}) == 4
    assert value("prompt_tokens_computed_total") == 2
    assert value("cache_store_errors_total", {"rank": "0", "error": "timeout"}) == 2


def test_a_workers_own_counters_are_added_as_they_grow() -> None:
    metrics = EngineMetrics()
    for restored in (100, 100, 250):
        metrics.stats(stats(restored))
    assert metrics.registry.get_sample_value("cache_tier_read_bytes_total", {"tier": "host"}) == 250
