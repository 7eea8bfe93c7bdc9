"""Choosing tokens from logits, on rank 0.

A token depends on its request's seed, its position and its logits, and on nothing else in the batch: greedy is an
argmax, and a random choice compares a threshold that a counter-based generator makes of seed and position with the
cumulative probabilities. Log-probabilities are the model's own: of the logits before penalties, temperature and cuts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import xxhash

from kvtier_worker.engine.messages import SamplingSpec, SequenceStep, TokenOutput


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from its arguments only: the top 53 bits of xxh3-64 of the position under the seed."""
    mask = 0xFFFF_FFFF_FFFF_FFFF
    return (xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), seed & mask) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, steps: Sequence[SequenceStep]) -> list[TokenOutput]:
    """One token per step.

    Args:
        logits: float32 ``[len(steps), vocab]``; not changed.
        steps: those that sample, in row order.
    """
    specs = [step.sampling for step in steps]
    if all(spec is None or _is_plain_greedy(spec) for spec in specs):
        chosen = logits.argmax(dim=-1).tolist()
        return [TokenOutput(step.request_id, token) for step, token in zip(steps, chosen, strict=True)]
    return [
        TokenOutput(step.request_id, int(row.argmax()))
        if spec is None or _is_plain_greedy(spec)
        else _sample_row(row, step, spec)
        for step, spec, row in zip(steps, specs, logits, strict=True)
    ]


def _is_plain_greedy(spec: SamplingSpec) -> bool:
    return spec.temperature <= 0 and spec.logprobs is None and not _has_penalty(spec)


def _has_penalty(spec: SamplingSpec) -> bool:
    return spec.repetition_penalty != 1.0 or spec.presence_penalty != 0.0 or spec.frequency_penalty != 0.0


def _sample_row(row: torch.Tensor, step: SequenceStep, spec: SamplingSpec) -> TokenOutput:
    adjusted = penalise(row, spec) if _has_penalty(spec) else row
    position = step.start + len(step.token_ids)
    token = int(adjusted.argmax()) if spec.temperature <= 0 else draw(adjusted, spec, position)
    if spec.logprobs is None:
        return TokenOutput(step.request_id, token)
    logprobs = torch.log_softmax(row, dim=-1)
    values, ids = logprobs.topk(min(spec.logprobs, row.shape[0]))
    top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenOutput(step.request_id, token, float(logprobs[token]), top)


def penalise(row: torch.Tensor, spec: SamplingSpec) -> torch.Tensor:
    """A copy of ``row`` with the penalties on tokens of the past.

    Repetition divides positive and multiplies negative logits of every token of prompt and output (arXiv 1909.05858);
    presence and frequency are subtracted for tokens of the output only, as OpenAI defines them.
    """
    row = row.clone()
    if spec.repetition_penalty != 1.0 and (spec.prompt_token_ids or spec.output_token_ids):
        seen = torch.tensor(sorted({*spec.prompt_token_ids, *spec.output_token_ids}), device=row.device)
        part = row[seen]
        row[seen] = torch.where(part > 0, part / spec.repetition_penalty, part * spec.repetition_penalty)
    if spec.output_token_ids and (spec.presence_penalty or spec.frequency_penalty):
        counted = Counter(spec.output_token_ids)
        tokens = torch.tensor(list(counted), device=row.device)
        counts = torch.tensor(list(counted.values()), device=row.device)
        row[tokens] -= spec.presence_penalty + spec.frequency_penalty * counts
    return row


def draw(row: torch.Tensor, spec: SamplingSpec, position: int) -> int:
    """A token at random, after temperature, top-k, top-p and min-p, in this order.

    Candidates are sorted by falling probability, so each cut keeps a head of the list. Ties keep token order.
    """
    probabilities, tokens = candidates(row, spec)
    cumulative = probabilities.cumsum(0)
    threshold = uniform(spec.seed, position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, threshold, right=True))
    return int(tokens[min(index, len(tokens) - 1)])


def candidates(row: torch.Tensor, spec: SamplingSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that may be drawn, likeliest first: their probabilities (float64, not renormalised) and their ids."""
    scaled = (row.double() - row.max()) / spec.temperature  # the best stays finite however small the temperature is
    ordered, tokens = scaled.sort(descending=True, stable=True)
    if spec.top_k > 0:
        ordered, tokens = ordered[: spec.top_k], tokens[: spec.top_k]
    probabilities = ordered.softmax(0)
    keep = len(tokens)
    if spec.top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities
        keep = max(int((before < spec.top_p).sum()), 1)
    if spec.min_p > 0.0:
        keep = min(keep, max(int((probabilities >= spec.min_p * probabilities[0]).sum()), 1))
    return probabilities[:keep], tokens[:keep]
