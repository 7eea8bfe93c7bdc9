"""A small tokenizer, a scripted engine and a client of the app over both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tokenizers
from fastapi.testclient import TestClient
from kvtier_worker.api.app import create_app
from kvtier_worker.api.chat_template import ChatTemplate
from kvtier_worker.api.metrics import FrontMetrics
from kvtier_worker.api.tokenizer import TextTokenizer
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.engine.frontend import EngineInfo, EngineRequest
from kvtier_worker.testing.engine import DEFAULT_INFO, ScriptedEngine
from prometheus_client import CollectorRegistry
from tokenizers import decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(template: str = TEMPLATE) -> TextTokenizer:
    """One token per byte: ids are easy to foresee, token 0 is the special end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0} | {char: place + 1 for place, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return TextTokenizer(tokenizer, ChatTemplate(template, {}) if template else None)


TOKENIZER = byte_tokenizer()


def ids(text: str) -> tuple[int, ...]:
    """Token ids of a text."""
    return TOKENIZER.encode(text)


def says(text: str, *, end: bool = True) -> Callable[[EngineRequest], Iterator[int]]:
    """A script that answers every request with ``text``, then the end token."""
    return lambda _: iter((*ids(text), *((0,) if end else ())))


@dataclass(frozen=True)
class Served:
    """A client and what is behind it."""

    client: TestClient
    engine: ScriptedEngine
    metrics: FrontMetrics

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> Any:
        answer = self.post("/v1/completions", **{"prompt": "hello"} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start an app over a scripted engine; ends with the test."""
    with ExitStack() as stack:

        def start(
            script: Callable[[EngineRequest], Iterator[int]],
            *,
            info: EngineInfo = DEFAULT_INFO,
            tokenizer: TextTokenizer = TOKENIZER,
            limit: int = 1000,
            step_s: float = 0,
            **settings: Any,
        ) -> Served:
            record = replace(WorkerSettings(model="/models/scripted"), **settings)
            engine = stack.enter_context(ScriptedEngine(script, info, limit=limit, step_s=step_s))
            metrics = FrontMetrics(CollectorRegistry())
            app = create_app(engine, tokenizer, record, metrics)
            client: AbstractContextManager[TestClient] = TestClient(app, raise_server_exceptions=True)
            return Served(stack.enter_context(client), engine, metrics)

        yield start
