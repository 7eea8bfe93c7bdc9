"""A small OpenAI client that adds little to what it times: one socket, no JSON parsed before the clock stops.

Every system under test is asked through it in the same words: token ids in, greedy, streamed.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One streamed answer.

    Attributes:
        ttft_s: from the first byte sent to the first chunk that carries a token.
        total_s: to the end of the stream.
        arrival_s: when each chunk with a token came, since the start.
        text: the answer.
        prompt_tokens: as the server counted them.
        cached_tokens: prompt tokens that the server says it did not compute.
        tiers: kvtier's split of them; empty for others.
    """

    ttft_s: float
    total_s: float
    arrival_s: tuple[float, ...]
    text: str
    prompt_tokens: int
    cached_tokens: int
    tiers: Mapping[str, int] = field(default_factory=dict)

    @property
    def token_s(self) -> float:
        """Median seconds between tokens."""
        gaps = [after - before for before, after in zip(self.arrival_s, self.arrival_s[1:], strict=False)]
        return statistics.median(gaps) if gaps else 0.0


@dataclass(frozen=True, slots=True)
class Client:
    """Where one server listens and what it calls the model."""

    host: str
    port: int
    model: str

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """Stream a greedy completion of exactly ``max_tokens`` tokens."""
        body = json.dumps(
            {
                "model": self.model,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{self.host}:{self.port} answered {response.status}: {response.read()[:500]!r}")
        lines: list[tuple[float, bytes]] = []
        while line := response.readline():
            if line.startswith(b"data: {"):
                lines.append((time.perf_counter() - started, line[6:]))
        total = time.perf_counter() - started
        connection.close()
        return parse(lines, total)

    def post(self, path: str, body: object = None) -> bytes:
        """POST ``body`` and return the answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        payload = json.dumps(body) if body is not None else ""
        connection.request("POST", path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{path} answered {response.status}: {answer[:500]!r}")
        return answer

    def together(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Completion]:
        """All prompts at the same time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, max_tokens), prompts))


def parse(lines: Sequence[tuple[float, bytes]], total_s: float) -> Completion:
    """Make sense of a finished stream."""
    arrivals: list[float] = []
    text: list[str] = []
    usage: dict[str, Any] = {}
    for when, line in lines:
        chunk = json.loads(line)
        # A token may decode to no text yet (half a character): the chunk still counts as its arrival.
        if chunk.get("choices") and not (chunk["choices"][0].get("finish_reason") and not chunk["choices"][0]["text"]):
            arrivals.append(when)
            text.append(chunk["choices"][0]["text"])
        usage = chunk.get("usage") or usage
    if not arrivals:
        raise RuntimeError(f"the server streamed no token: {[line for _, line in lines]!r}")
    details = usage.get("prompt_tokens_details") or {}
    return Completion(
        ttft_s=arrivals[0],
        total_s=total_s,
        arrival_s=tuple(arrivals),
        text="".join(text),
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        cached_tokens=int(details.get("cached_tokens") or 0),
        tiers=details.get("kvtier") or {},
    )


def make_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    """Random token ids: no two prompts share a block, so that what should be cold is cold."""
    generator = random.Random(seed)
    return [generator.randrange(100, vocab_size) for _ in range(length)]


def step_seconds(completions: Sequence[Completion]) -> float:
    """Seconds of one decode step while all of them were running.

    Only the time between the last first token and the first last token counts: before and after, fewer run.
    """
    start = max(item.arrival_s[0] for item in completions)
    stop = min(item.arrival_s[-1] for item in completions)
    tokens = sum(1 for item in completions for when in item.arrival_s if start < when <= stop)
    return (stop - start) * len(completions) / tokens
