from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from kvtier_worker.core.ids import BlockType, DType, TensorRole
from kvtier_worker.engine.messages import SamplingSpec, SequenceStep
from kvtier_worker.errors import ConfigError, ProtocolError, TransferFailed
from kvtier_worker.model.config import ModelConfig, parse_config
from kvtier_worker.model.factory import cache_shape, kv_layout
from kvtier_worker.model.runner import PagedRunner
from kvtier_worker.testing.thread_collective import thread_collectives

BLOCK = 8
NUM_BLOCKS = 64
GREEDY = SamplingSpec(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, 0, None)
Make = Callable[..., Any]


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed).randrange(131) for _ in range(length)]


def tables(count: int, blocks: int, seed: int) -> list[list[int]]:
    free = list(range(1, NUM_BLOCKS))
    random.Random(seed).shuffle(free)
    return [free[i * blocks : (i + 1) * blocks] for i in range(count)]


def step(tokens: Sequence[int], start: int, table: list[int], sample: bool = True, name: str = "r") -> SequenceStep:
    return SequenceStep(name, list(tokens), start, table, sample, GREEDY if sample else None)


class RecordingGate:
    """Notes the layers waited for; fails at one of them when told to."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.waited: list[int] = []
        self.fails_at = fails_at

    def wait(self, layer: int) -> None:
        self.waited.append(layer)
        if layer == self.fails_at:
            raise TransferFailed("restore aborted")


@pytest.mark.parametrize("seed", range(8))
def test_logits_do_not_depend_on_chunks_or_block_tables(make_tiny: Make, tiny_config: ModelConfig, seed: int) -> None:
    tokens = prompt(seed, 90)
    whole = make_tiny(tiny_config).logits([step(tokens, 0, list(range(1, 13)))])
    chunked, dice = make_tiny(tiny_config), random.Random(seed)
    (table,) = tables(1, 12, seed)
    start = 0
    while start < len(tokens):
        count = dice.choice([1, 1, 2, 5, 8, 16, 31])
        logits = chunked.logits([step(tokens[start : start + count], start, table)])
        start += count
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)
    pages = chunked.cache[:, :, table].transpose(2, 3).flatten(3, 4)[:, :, :, :90]
    assert pages.isfinite().all()


def test_logits_do_not_depend_on_what_else_is_in_the_batch(make_tiny: Make, tiny_config: ModelConfig) -> None:
    lengths = (1, 9, 23, 40)
    prompts = [prompt(length, length) for length in lengths]
    places = tables(4, 6, 1)
    alone, together = make_tiny(tiny_config), make_tiny(tiny_config)
    for position in range(3):
        steps = [
            step(tokens, 0, place) if position == 0 else step([position], len(tokens) + position - 1, place)
            for tokens, place in zip(prompts, places, strict=True)
        ]
        batched = together.logits(steps)
        single = torch.cat([alone.logits([one]) for one in steps])
        torch.testing.assert_close(batched, single, atol=1e-5, rtol=1e-5)


def test_rows_that_do_not_sample_are_cached_and_give_nothing(tiny: Any) -> None:
    tokens = prompt(1, 20)
    assert tiny.runner.forward([step(tokens[:12], 0, [3, 4, 5], sample=False)], None) == []
    (output,) = tiny.runner.forward([step(tokens[12:], 12, [3, 4, 5], name="x")], None)
    assert output.request_id == "x"


def test_a_step_that_samples_nothing_is_over_when_the_device_is(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waits.append(self.device)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(tiny.decoder, "forward", lambda *_: None)
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        monkeypatch.setattr(tiny.decoder, "device", device)
        assert tiny.runner.forward([step([1, 2, 3], 0, [1], sample=False)], None) == []
    assert waits == [torch.device("cuda", 1)]


def test_an_empty_step_gives_nothing(tiny: Any) -> None:
    assert tiny.runner.forward([], None) == []


@pytest.mark.parametrize("extra", [{}, {"architectures": ["Qwen2ForCausalLM"]}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("size", [3])
def test_ranks_together_compute_what_one_computes(
    make_tiny: Make, tiny_raw: dict[str, Any], extra: dict[str, Any], size: int
) -> None:
    config = parse_config(tiny_raw | extra)
    tokens = prompt(2, 41)
    steps = [step(tokens[:30], 0, [5, 2, 9, 7, 1, 3])], [step(tokens[30:], 30, [5, 2, 9, 7, 1, 3])]
    one = make_tiny(config)
    expected = [one.logits(part) for part in steps]
    ranks = [make_tiny(config, collective) for collective in thread_collectives(size)]
    with ThreadPoolExecutor(size) as pool:
        for part, logits in zip(steps, expected, strict=True):
            found = list(pool.map(lambda rank, part=part: rank.logits(part), ranks))
            torch.testing.assert_close(found[0], logits, atol=1e-5, rtol=1e-5)
            assert found[1:] == [None] * (size - 1)
    # The ranks' caches side by side are the whole cache.
    torch.testing.assert_close(
        torch.cat([rank.cache for rank in ranks], dim=3)[:, :, 5], one.cache[:, :, 5], atol=1e-5, rtol=1e-5
    )


def test_only_rank_0_has_outputs(make_tiny: Make, tiny_config: ModelConfig) -> None:
    ranks = [make_tiny(tiny_config, collective) for collective in thread_collectives(3)]
    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda rank: rank.runner.forward([step([1, 2, 3], 0, [1])], None), ranks))
    assert [len(part) for part in outputs] == [1, 0, 0]


def test_the_gate_is_asked_before_each_layer_in_order(tiny: Any) -> None:
    gate = RecordingGate()
    tiny.runner.forward([step([1, 2, 3], 0, [1])], gate)
    assert gate.waited == [0, 1, 2]


def test_no_cache_of_a_layer_is_touched_when_its_gate_fails(tiny: Any) -> None:
    gate = RecordingGate(fails_at=1)
    with pytest.raises(TransferFailed):
        tiny.runner.forward([step([1, 2, 3], 0, [1])], gate)
    assert gate.waited == [0, 1]
    assert tiny.cache[0, :, 1, :, :3].isfinite().all()
    assert tiny.cache[1:].isnan().all()


def test_a_rank_whose_restore_failed_does_not_leave_the_others_waiting(
    make_tiny: Make, tiny_config: ModelConfig
) -> None:
    ranks = [make_tiny(tiny_config, collective) for collective in thread_collectives(3)]
    gates = [RecordingGate(), RecordingGate(fails_at=0), RecordingGate()]
    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(rank.runner.forward, [step([1, 2, 3], 0, [1])], gate)
            for rank, gate in zip(ranks, gates, strict=True)
        ]
        assert [type(run.exception(timeout=30)) for run in runs] == [type(None), TransferFailed, type(None)]
        again = list(pool.map(lambda rank: rank.runner.forward([step([1, 2, 3], 0, [1])], None), ranks))
    assert len(again[0]) == 1


def test_bfloat16_is_near_float32(make_tiny: Make, tiny_config: ModelConfig) -> None:
    tokens = prompt(4, 33)
    steps = [step(tokens[:32], 0, [4, 6, 1, 2, 9])], [step(tokens[32:], 32, [4, 6, 1, 2, 9])]
    wide, narrow = make_tiny(tiny_config), make_tiny(tiny_config, dtype="bfloat16")
    for part in steps:
        expected, found = wide.logits(part), narrow.logits(part)
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < 0.1 * expected.abs().max()


def test_the_layout_has_heads_before_tokens_and_one_object_per_block(tiny_config: ModelConfig) -> None:
    layout = kv_layout(tiny_config, 3, BLOCK, DType.FLOAT32)
    objects = layout.objects[BlockType.KV]
    assert [tensor.role for tensor in objects.tensors] == [TensorRole.KEY, TensorRole.VALUE]
    assert objects.tensors[0].shape == (1, BLOCK, 8)
    assert objects.payload_bytes == 3 * 2 * BLOCK * 8 * 4
    assert cache_shape(layout, 5) == (3, 2, 5, 1, BLOCK, 8)
    assert layout.key_component == "main"


def test_a_layout_for_ranks_that_do_not_divide_the_heads_is_refused(tiny_config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="--tp_size is 2"):
        kv_layout(tiny_config, 2, BLOCK, DType.FLOAT32)


def test_a_cache_of_another_shape_is_refused(tiny: Any, tiny_config: ModelConfig) -> None:
    with pytest.raises(ValueError, match="expected"):
        PagedRunner(tiny.decoder, tiny.runner.layout, tiny.cache[:, :, :, :2].contiguous())
    with pytest.raises(ValueError, match="contiguous"):
        PagedRunner(tiny.decoder, tiny.runner.layout, tiny.cache[:, :, ::2])


def test_a_token_beyond_the_last_position_is_refused(make_tiny: Make, tiny_config: ModelConfig) -> None:
    model = make_tiny(replace(tiny_config, max_position=16))
    with pytest.raises(ProtocolError, match="16 positions"):
        model.runner.forward([step([1], 16, [1, 2, 3])], None)
