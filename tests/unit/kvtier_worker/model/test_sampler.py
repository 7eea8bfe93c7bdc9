from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.engine.messages import SamplingSpec, SequenceStep
from kvtier_worker.model.sampler import candidates, penalise, sample, uniform

VOCAB = 40


def spec(**changes: Any) -> SamplingSpec:
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 1,
        "logprobs": None,
    }
    return SamplingSpec(**(values | changes))


def step(sampling: SamplingSpec, start: int = 10, name: str = "r") -> SequenceStep:
    return SequenceStep(name, [1], start, [1], sample=True, sampling=sampling)


def row(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


logits = st.integers(0, 2**31).map(row)
cuts = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.1, 3.0),
        "top_p": st.floats(0.01, 1.0),
        "top_k": st.integers(0, VOCAB + 5),
        "min_p": st.floats(0.0, 1.0),
    }
)


def allowed(values: torch.Tensor, sampling: SamplingSpec) -> set[int]:
    """By definition, in plain Python: top-k, then top-p of what is left, then min-p."""
    weights = [math.exp((value - max(values.tolist())) / sampling.temperature) for value in values.tolist()]
    order = sorted(range(VOCAB), key=lambda token: -weights[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(weights[token] for token in order)
    kept: list[int] = []
    before = 0.0
    for token in order:
        if sampling.top_p < 1.0 and before >= sampling.top_p and kept:
            break
        kept.append(token)
        before += weights[token] / total
    return {token for token in kept if weights[token] >= sampling.min_p * weights[order[0]]}


@given(logits, cuts)
def test_the_candidates_are_those_of_the_definition(values: torch.Tensor, cut: dict[str, Any]) -> None:
    sampling = spec(**cut)
    probabilities, tokens = candidates(values, sampling)
    assert set(tokens.tolist()) == allowed(values, sampling)
    assert probabilities.tolist() == sorted(probabilities.tolist(), reverse=True)


@given(logits, cuts, st.integers(0, 2**63 - 1), st.integers(0, 100_000))
def test_a_token_depends_on_seed_position_and_logits_only(
    values: torch.Tensor, cut: dict[str, Any], seed: int, position: int
) -> None:
    sampling = spec(seed=seed, **cut)
    (alone,) = sample(values[None], [step(sampling, position)])
    batch = torch.stack([row(1), values, row(2)])
    others = [step(spec(seed=9), 3, "a"), step(sampling, position), step(spec(temperature=0.0), 4, "b")]
    assert sample(batch, others)[1].token_id == alone.token_id
    assert alone.token_id in allowed(values, sampling)


def test_draws_follow_the_probabilities() -> None:
    values = torch.tensor([0.0, 1.0, 2.0, -1.0])
    sampling = spec(temperature=0.8)
    draws = 4000
    found = Counter(sample(values[None], [step(sampling, position)])[0].token_id for position in range(draws))
    for token, probability in enumerate((values / 0.8).softmax(0).tolist()):
        spread = 4 * math.sqrt(draws * probability * (1 - probability))
        assert abs(found[token] - draws * probability) < spread


def test_seeds_and_positions_give_different_numbers_in_the_unit_interval() -> None:
    numbers = {uniform(seed, position) for seed in range(40) for position in range(40)}
    assert len(numbers) == 1600
    assert 0.0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1.0


@pytest.mark.parametrize("sampling", [spec(temperature=0.0), spec(top_k=1), spec(top_p=1e-9), spec(min_p=1.0)])
def test_every_cut_taken_to_its_end_is_greedy(sampling: SamplingSpec) -> None:
    for seed in range(20):
        values = row(seed)
        assert sample(values[None], [step(sampling)])[0].token_id == int(values.argmax())


def test_penalties_act_on_the_tokens_they_are_defined_for() -> None:
    values = torch.tensor([2.0, -2.0, 1.0, 0.5])
    sampling = spec(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        prompt_token_ids=[0],
        output_token_ids=[1, 1, 2],
    )
    assert penalise(values, sampling).tolist() == [1.0, -4.0 - 0.5 - 0.5, 0.5 - 0.5 - 0.25, 0.5]
    assert values.tolist() == [2.0, -2.0, 1.0, 0.5]
    assert sample(values[None], [step(sampling)])[0].token_id in range(4)
    greedy = spec(temperature=0.0, repetition_penalty=9.0, prompt_token_ids=[0])
    assert sample(values[None], [step(greedy)])[0].token_id == 2


def test_logprobs_are_the_models_own_whatever_is_cut_or_penalised() -> None:
    values = row(3)
    best = int(values.argmax())
    sampling = spec(
        temperature=0.0, logprobs=3, presence_penalty=50.0, frequency_penalty=1.0, output_token_ids=[best], top_k=1
    )
    (output,) = sample(values[None], [step(sampling)])
    expected = values.log_softmax(0)
    assert output.token_id != best
    assert output.logprob == pytest.approx(float(expected[output.token_id]))
    assert [token for token, _ in output.top] == expected.topk(3).indices.tolist()
    assert [value for _, value in output.top] == pytest.approx(expected.topk(3).values.tolist())


def test_no_alternatives_asked_for_gives_the_chosen_one_only() -> None:
    (output,) = sample(row(4)[None], [step(spec(temperature=0.0, logprobs=0))])
    assert output.top == []
    assert output.logprob == pytest.approx(float(row(4).log_softmax(0).max()))


def test_a_batch_of_greedy_rows_takes_each_row_maximum() -> None:
    batch = torch.stack([row(seed) for seed in range(6)])
    outputs = sample(batch, [step(spec(temperature=0.0), name=str(i)) for i in range(6)])
    assert [output.token_id for output in outputs] == batch.argmax(1).tolist()
    assert [output.request_id for output in outputs] == [str(i) for i in range(6)]


@pytest.mark.parametrize("temperature", [1e-30, 1e-310, 5e-324])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    for seed in range(20):
        values = row(seed)
        [output] = sample(values[None], [step(spec(temperature=temperature, seed=seed))])
        assert output.token_id == int(values.argmax())
