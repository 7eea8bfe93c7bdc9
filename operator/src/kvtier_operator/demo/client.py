"""Talks to a running engine the way a client and an operator would. IO; called by the demo."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from kvtier_operator.demo.answers import TIERS, Answer, Holdings
from kvtier_operator.errors import OperatorError

_TIMEOUT = httpx.Timeout(600, connect=5)
"""A cold prompt on a busy small machine may take minutes."""


class EngineAnswerError(OperatorError):
    """The engine refused a request or answered in a form that we do not understand."""


class EngineHttp:
    """One engine's HTTP API.

    Args:
        url: as in ``http://127.0.0.1:8010``.
        model: the name that it serves.
        api_key: sent when not empty.
    """

    def __init__(self, url: str, model: str, api_key: str = "") -> None:
        self._url = url
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def complete(self, prompt: str, max_tokens: int) -> Answer:
        """Stream a greedy completion and measure it.

        Raises:
            EngineAnswerError: refused, ended early, or not understood.
        """
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        started = time.perf_counter()
        arrivals: list[float] = []
        token_ids: list[int] = []
        usage: Mapping[str, Any] = {}
        text = ""
        for chunk in self._stream("/v1/completions", body):
            for choice in chunk.get("choices", ()):
                if choice.get("token_ids"):
                    arrivals.append(time.perf_counter())
                    token_ids += choice["token_ids"]
                text += choice.get("text") or ""
            usage = chunk.get("usage") or usage
        if not arrivals or not usage:
            raise EngineAnswerError(f"{self._url} ended the stream without tokens or usage")
        details = usage["prompt_tokens_details"]["kvtier"]
        return Answer(
            ttft_ms=(arrivals[0] - started) * 1000,
            total_ms=(arrivals[-1] - started) * 1000,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens={tier: details[tier] for tier in TIERS},
            token_ids=tuple(token_ids),
            text=text,
        )

    def probe(self, prompt: str) -> Holdings:
        """What each tier holds of a prompt; changes nothing."""
        report = self._post("/admin/cache/probe", {"prompt": prompt})
        return Holdings(
            prompt_tokens=report["prompt_tokens"],
            full_blocks=report["full_blocks"],
            block_size=report["block_size"],
            blocks={tier: report[tier]["blocks"] for tier in TIERS},
        )

    def drop(self, tiers: Sequence[str]) -> None:
        """Make tiers forget what they hold."""
        self._post("/admin/cache/drop", {"tiers": list(tiers)})

    def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            response = httpx.post(self._url + path, json=body, headers=self._headers, timeout=_TIMEOUT, trust_env=False)
        except httpx.HTTPError as error:
            raise EngineAnswerError(f"{self._url}{path}: {error}") from error
        if response.is_error:
            raise EngineAnswerError(f"{self._url}{path}: {response.status_code} {response.text}")
        answer: Mapping[str, Any] = response.json()
        return answer

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Events of a server-sent stream, up to its [DONE]."""
        with httpx.Client(trust_env=False, timeout=_TIMEOUT, headers=self._headers) as client:
            try:
                with client.stream("POST", self._url + path, json=body) as response:
                    if response.is_error:
                        response.read()
                        raise EngineAnswerError(f"{self._url}{path}: {response.status_code} {response.text}")
                    for line in response.iter_lines():
                        if line == "data: [DONE]":
                            return
                        if line.startswith("data: "):
                            yield _event(line.removeprefix("data: "))
            except httpx.HTTPError as error:
                raise EngineAnswerError(f"{self._url}{path}: {error}") from error
        raise EngineAnswerError(f"{self._url}{path} ended the stream without [DONE]")


def _event(text: str) -> Mapping[str, Any]:
    event: Mapping[str, Any] = json.loads(text)
    if "error" in event:
        raise EngineAnswerError(f"the stream ended with an error: {event['error']}")
    return event
