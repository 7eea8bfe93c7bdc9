"""Answers do not depend on the cache (N1): random schedules of the real engine against `transformers`.

A schedule is a seed: prompts that share prefixes, arrivals, cancels, tiny pools, chunking, one or three ranks, a store
that fails in every way the fault injector knows, dropped caches and a restart between waves. The engine's tokens are
fed back to the oracle in one forward: each must be its argmax and have the same log-probability within `TOLERANCE`
(ids alone would hide a slightly wrong block). After each wave every pool's check must be clean and no lease left (N2).
"""

from __future__ import annotations

import functools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from kvtier_worker.adapters.cpu_copy import CpuCopyEngine
from kvtier_worker.adapters.device_cache import TorchDeviceCache
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import RequestId, Tier
from kvtier_worker.core.sampling import SamplingParams
from kvtier_worker.engine.arena import HostArena
from kvtier_worker.engine.frontend import EngineRequest, FinishReason, RequestOutput
from kvtier_worker.engine.ports import CopyEngine, DeviceCache
from kvtier_worker.model.decoder import Decoder
from kvtier_worker.model.factory import build_runner, cache_dtype, kv_layout, load_config
from kvtier_worker.model.loader import DecoderWeights, Loader
from kvtier_worker.model.shard import Shard
from kvtier_worker.model.weights import SafetensorsSource
from kvtier_worker.testing.copy import ChaosCopyEngine, CopyFaults
from kvtier_worker.testing.faulty_store import FaultProfile, FaultyStore
from kvtier_worker.testing.store import MemoryBackend, MemoryStore
from kvtier_worker.testing.thread_collective import thread_collectives
from kvtier_worker.testing.thread_engine import CopyEngineOf, RankModel, ThreadEngine, ThreadEngineSpec, thread_engine
from transformers import LlamaConfig, LlamaForCausalLM

TOLERANCE = 1e-3
NOISE = 1e-4
"""Where the oracle's best two log-probabilities are closer than this, either may win: rounding, not a bug."""

CPU = torch.device("cpu")
MAX_OUTPUT = 24
CROWDED = 0.3
"""Share of schedules with short prompts and a pool that holds one long answer: they preempt one another."""

NUM_SCHEDULES = 300
REAL_SEEDS = (1004, 1011)
"""Schedules that read from every tier; each takes seconds on the real model."""

BATCH = 25
"""Schedules per test case, so that a failure is found by its case and the time limit holds for each."""


@dataclass(frozen=True)
class Model:
    """A folder with weights, the oracle over it, and each rank's weights, loaded once."""

    folder: Path
    oracle: LlamaForCausalLM
    max_prompt: int

    @functools.cached_property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return int(self.oracle.config.vocab_size)

    @functools.cache  # noqa: B019 - lives as long as the module
    def weights(self, rank: int, size: int) -> DecoderWeights:
        """One rank's weights; never written to."""
        with torch.inference_mode():
            shard = Shard(load_config(self.folder), rank, size)
            return Loader(shard, SafetensorsSource(self.folder), CPU, torch.float32).load()

    def ranks(self, settings: WorkerSettings, num_blocks: int) -> list[RankModel]:
        """Every rank's model over an empty cache of its own."""
        config = load_config(self.folder)
        size = settings.tp_size
        layout = kv_layout(config, size, settings.block_size, cache_dtype(settings, config, CPU))
        found = []
        for rank, collective in enumerate(thread_collectives(size)):
            cache = TorchDeviceCache(layout, num_blocks, CPU)
            decoder = Decoder(Shard(config, rank, size), self.weights(rank, size), collective, CPU)
            runner = build_runner(decoder, layout, cache.tensor())
            found.append(RankModel(runner, cache, config.vocab_size, config.max_position))
        return found


@dataclass(frozen=True)
class Planned:
    """One request: when it comes (outputs of others seen before), what it asks, when its client leaves."""

    request: EngineRequest
    after: int
    cancel_after: int | None


@dataclass
class Answer:
    """What came back of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str = ""
    cached: Counter[Tier] = field(default_factory=Counter)


@dataclass(frozen=True)
class Schedule:
    """Everything random about one schedule, from its seed."""

    seed: int
    settings: WorkerSettings
    num_device_blocks: int
    num_host_slots: int
    profile: FaultProfile
    copy_faults: CopyFaults | None
    waves: tuple[tuple[Planned, ...], ...]
    between: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"schedule {self.seed}: {self.settings}, {self.num_device_blocks=}, {self.num_host_slots=}, {self.profile}"
        )


def make_schedule(seed: int, model: Model, tp_size: int) -> Schedule:
    """Draw a schedule."""
    chance = random.Random(f"schedule/{seed}")
    crowded = chance.random() < CROWDED
    block_size = 4 if crowded else chance.choice((4, 8, 16))
    max_prompt = 3 * block_size if crowded else model.max_prompt
    longest = -(-(max_prompt + MAX_OUTPUT) // block_size)
    num_device_blocks = 1 + longest + (0 if crowded else chance.choice((0, 1, 4, 40)))
    num_host_slots = chance.choice((0, longest // 2 + 2, longest + 2, num_device_blocks + 4, 4 * num_device_blocks))
    settings = WorkerSettings(
        model=str(model.folder),
        tp_size=tp_size,
        dtype="float32",
        block_size=block_size,
        enable_kvcache_store=num_host_slots > 0,
        host_blocks_factor=max(1.1, num_host_slots / num_device_blocks),
        max_tokens_per_batch=chance.choice((16, 48, 96, 512)),
        max_seqs_per_batch=8 if crowded else chance.choice((1, 2, 4, 8)),
        max_tokens_per_chunk_for_prefill=chance.choice((-1, 5, 16)),
        enable_mix_batch=chance.random() < 0.7,
        enable_in_batch_prefix_cache=chance.random() < 0.4,
        prefetch_batch_size=chance.choice((1, 2, 3, 8)),
        prefetch_timeout=chance.choice((0, 0, 1, 20)),
        layers_wise_copy_batchs=chance.choice((0, 1, 2, 8)),
        enable_control_h2d_block_num=chance.random() < 0.3,
        max_h2d_blocks_per_step=chance.choice((1, 2, 5)),
        host_eviction=chance.choice(("lru", "s3fifo")),
        device_eviction=chance.choice(("lru", "s3fifo")),
        enable_prefix_cache=num_host_slots > 0 or chance.random() < 0.7,
    )
    between = tuple(chance.choice(("nothing", "drop device", "drop all", "restart", "lose store")) for _ in range(2))
    stems = [draw_tokens(chance, model, max_prompt) for _ in range(3)]
    waves = tuple(make_wave(chance, model, stems, f"{seed}-{wave}") for wave in range(1 + len(between)))
    faults = None
    if chance.random() < 0.2:
        faults = CopyFaults(frozenset(chance.sample(range(20), 3)), frozenset(chance.sample(range(20), 2)))
    return Schedule(seed, settings, num_device_blocks, num_host_slots, make_profile(chance), faults, waves, between)


def draw_tokens(chance: random.Random, model: Model, count: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(chance.randrange(model.vocab_size) for _ in range(count))


def make_wave(chance: random.Random, model: Model, stems: Sequence[tuple[int, ...]], name: str) -> tuple[Planned, ...]:
    """A few requests whose prompts begin like one of the stems."""
    wave = []
    for index in range(chance.randint(1, 5)):
        stem = chance.choice(stems)
        prompt = stem[: chance.randint(1, len(stem))] + draw_tokens(chance, model, chance.randint(0, 3))
        max_tokens = chance.choice((1, 3, 9, MAX_OUTPUT))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
        request = EngineRequest(RequestId(f"{name}-{index}"), prompt[: len(stem)], sampling)
        cancel_after = chance.randint(0, max_tokens) if chance.random() < 0.15 else None
        wave.append(Planned(request, chance.choice((0, 0, 0, 1, 3, 8)), cancel_after))
    return tuple(wave)


def make_profile(chance: random.Random) -> FaultProfile:
    """A healthy store half of the time, else one with several faults."""
    if chance.random() < 0.5:
        return FaultProfile()
    kinds = ("partial_get", "short_read", "corrupt", "vanish", "lease_expiry", "hidden", "failed_put", "lost_put")
    chances = {kind: chance.choice((0.0, 0.1, 0.4)) for kind in kinds}
    first = chance.randrange(30)
    outages = ((first, first + chance.randrange(20)),) if chance.random() < 0.3 else ()
    return FaultProfile(**chances, slow=0.1, delay_s=0.002, outages=outages)


class Runner:
    """Carries one schedule out.

    Args:
        schedule: what to do.
        model: on what.
    """

    def __init__(self, schedule: Schedule, model: Model) -> None:
        self.schedule = schedule
        self.model = model
        self.backend = MemoryBackend()
        self.answers: dict[RequestId, Answer] = defaultdict(Answer)
        self.facts: Counter[str] = Counter()

    def run(self) -> None:
        """All waves, with what happens between them."""
        with ExitStack() as stack:
            engine = stack.enter_context(thread_engine(self.spec()))
            for wave, after in zip(self.schedule.waves, (*self.schedule.between, "nothing"), strict=True):
                self.play(engine, wave)
                self.expect_clean(engine)
                if after == "restart":
                    self.count(engine)
                    stack.close()
                    engine = stack.enter_context(thread_engine(self.spec()))
                elif after == "lose store":
                    self.backend.clear()
                elif after.startswith("drop"):
                    tiers = {Tier.DEVICE} if after == "drop device" else {Tier.DEVICE, Tier.HOST}
                    engine.loop.drop_caches(frozenset(tiers)).result(30)
            self.count(engine)

    def spec(self) -> ThreadEngineSpec:
        """An engine over this schedule's store."""
        schedule = self.schedule
        settings = schedule.settings
        stores = [
            FaultyStore(MemoryStore(self.backend), schedule.profile, seed=schedule.seed + rank)
            for rank in range(settings.tp_size)
        ]
        return ThreadEngineSpec(
            settings,
            schedule.num_host_slots,
            self.model.ranks(settings, schedule.num_device_blocks),
            self.copy_engine(),
            stores if schedule.num_host_slots else (),
        )

    def copy_engine(self) -> CopyEngineOf:
        """The real one, or one that copies as late and in as odd an order as it may."""
        schedule = self.schedule

        def make(rank: int, arena: HostArena, caches: Sequence[DeviceCache]) -> CopyEngine:
            addressable = [cache for cache in caches if isinstance(cache, TorchDeviceCache)]
            if schedule.seed % 2 and schedule.copy_faults is None:
                return CpuCopyEngine(arena, addressable)
            return ChaosCopyEngine(arena, addressable, schedule.seed + rank, schedule.copy_faults)

        return make

    def play(self, engine: ThreadEngine, wave: Sequence[Planned]) -> None:
        """Hand requests in as planned, collect every output."""
        waiting = sorted(wave, key=lambda planned: planned.after)
        live: dict[RequestId, Planned] = {}
        seen = 0
        while waiting or live:
            while waiting and (waiting[0].after <= seen or not live):
                planned = waiting.pop(0)
                live[planned.request.request_id] = planned
                engine.submit(planned.request)
                if planned.cancel_after == 0:
                    engine.loop.cancel(planned.request.request_id)
            output = engine.next_output()
            seen += len(output.token_ids)
            answer = self.record(output)
            if output.finish_reason is not None:
                del live[output.request_id]
            elif len(answer.tokens) == live[output.request_id].cancel_after:
                engine.loop.cancel(output.request_id)

    def record(self, output: RequestOutput) -> Answer:
        """Append an output to its answer."""
        answer = self.answers[output.request_id]
        answer.tokens += output.token_ids
        answer.logprobs += [item.logprob for item in output.logprobs]
        answer.reason, answer.error = output.finish_reason, output.error
        answer.cached = Counter(output.cached_tokens)
        return answer

    def expect_clean(self, engine: ThreadEngine) -> None:
        """Every pool adds up, and nothing is leased once write-backs are over."""
        deadline = time.monotonic() + 30
        while True:
            reports = engine.loop.integrity().result(30)
            assert all(report.ok for report in reports), (str(self.schedule), reports)
            if not any(report.leased for report in reports):
                return
            assert time.monotonic() < deadline, (str(self.schedule), "leases left", reports)
            time.sleep(0.002)

    def count(self, engine: ThreadEngine) -> None:
        """Remember what this schedule exercised."""
        (preempted,) = engine.loop.metrics.preempted.collect()
        self.facts["preempted"] += int(preempted.samples[0].value)

    def check_answers(self) -> None:
        """Every token against the oracle."""
        for planned in (planned for wave in self.schedule.waves for planned in wave):
            answer = self.answers[planned.request.request_id]
            self.check_ending(planned, answer)
            self.facts["requests"] += 1
            self.facts["cancelled"] += answer.reason is FinishReason.CANCELLED
            self.facts += Counter({str(tier): count for tier, count in answer.cached.items()})
            assert answer.cached.total() < len(planned.request.prompt_token_ids)
            if answer.tokens:
                self.check_tokens(planned.request.prompt_token_ids, answer)

    def check_ending(self, planned: Planned, answer: Answer) -> None:
        """It ended as it had to."""
        context = (str(self.schedule), planned.request.request_id, answer)
        if planned.cancel_after is None:
            copies_fail = self.schedule.copy_faults is not None
            assert answer.reason is FinishReason.LENGTH or (copies_fail and answer.error), context
        else:
            assert answer.reason in (FinishReason.LENGTH, FinishReason.CANCELLED), context
        if answer.reason is FinishReason.LENGTH:
            assert len(answer.tokens) == planned.request.sampling.max_tokens, context

    def check_tokens(self, prompt: Sequence[int], answer: Answer) -> None:
        """Each token is the oracle's argmax, given the tokens before it, with the same log-probability."""
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *answer.tokens[:-1]]])
            logits = self.model.oracle(ids).logits[0, len(prompt) - 1 :].float()
        expected = torch.log_softmax(logits, dim=-1)
        for index, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            best = float(expected[index].max())
            context = (str(self.schedule), len(prompt), index, answer)
            assert abs(float(expected[index, token]) - logprob) < TOLERANCE, context
            if float(expected[index, token]) < best:
                assert best - float(expected[index, token]) < NOISE, context
                self.facts["ties"] += 1
            self.facts["tokens"] += 1


def tiny_model(folder: Path) -> Model:
    """Nine query and three key heads, like SmolLM2; sizes that three ranks do not divide; weights with wide margins."""
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=499,
        hidden_size=72,
        intermediate_size=100,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    oracle = LlamaForCausalLM(config)
    oracle.save_pretrained(folder)
    return Model(folder, oracle, max_prompt=72)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny model."""
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def run_schedules(model: Model, seeds: Iterable[int], tp_size: int) -> Counter[str]:
    """Run and check schedules; what they exercised."""
    facts: Counter[str] = Counter()
    for seed in seeds:
        runner = Runner(make_schedule(seed, model, tp_size), model)
        runner.run()
        runner.check_answers()
        facts += runner.facts
    return facts


@pytest.mark.timeout(240)
@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, BATCH))
def test_tokens_do_not_depend_on_the_cache(tiny: Model, first: int) -> None:
    """Two of three batches run one rank, the third runs three."""
    tp_size = 3 if first // BATCH % 3 == 2 else 1
    facts = run_schedules(tiny, range(first, first + BATCH), tp_size)
    assert facts["ties"] <= facts["tokens"] / 100
    # Schedules that exercise nothing would prove nothing.
    unused = [name for name in (*Tier, "preempted", "cancelled") if not facts[name]]
    assert not unused, facts


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Model:
    """The demo model."""
    return Model(smollm2, LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32), max_prompt=72)


@pytest.mark.model
@pytest.mark.timeout(240)
@pytest.mark.parametrize("tp_size", [1, 3])
def test_tokens_of_the_real_model_do_not_depend_on_the_cache(real: Model, tp_size: int) -> None:
    facts = run_schedules(real, REAL_SEEDS, tp_size)
    assert facts["ties"] <= facts["tokens"] / 100
    assert facts[Tier.STORE], facts
