"""What a client asked of sampling, as one validated record. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one sequence; the API validates, the worker's sampler applies.

    Attributes:
        max_tokens: tokens to generate at most, at least 1.
        temperature: 0 = greedy.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 = off.
        top_k: keep this many tokens; 0 = off.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 = off.
        repetition_penalty: > 1 discourages tokens of prompt and output; 1 = off.
        presence_penalty: subtracted once from the logit of every generated token; 0 = off.
        frequency_penalty: subtracted per occurrence among generated tokens; 0 = off.
        seed: None = the engine draws one per request; equal seeds give equal tokens whatever else runs.
        stop_token_ids: generation ends after one of these.
        ignore_eos: generate past the model's end-of-sequence ids.
        logprobs: None = none; n = the chosen token's log-probability and the n likeliest.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the sampler must see the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
