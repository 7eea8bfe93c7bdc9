"""The official `openai` client against a real server over the scripted engine: it works unchanged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, repeat

import openai
import pytest
import tokenizers
import uvicorn
from kvtier_worker.api.app import create_app
from kvtier_worker.api.chat_template import ChatTemplate
from kvtier_worker.api.metrics import FrontMetrics
from kvtier_worker.api.tokenizer import TextTokenizer
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.engine.frontend import EngineRequest
from kvtier_worker.machine.ports import hold_port
from kvtier_worker.testing.engine import Script, ScriptedEngine, ScriptedFailure
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client import CollectorRegistry
from tokenizers import decoders, models, pre_tokenizers

KEY = "test-key"
CHAT: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
]


def byte_tokenizer() -> TextTokenizer:
    """One token per byte; token 0 is the end."""
    vocab = {"<|end|>": 0} | {char: n + 1 for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    return TextTokenizer(tokenizer, ChatTemplate(template, {}))


TOKENIZER = byte_tokenizer()


@dataclass(frozen=True)
class Running:
    """A server and a client of it."""

    client: openai.OpenAI
    engine: ScriptedEngine
    metrics: FrontMetrics
    base_url: str


@contextmanager
def running(script: Script, *, step_s: float = 0, limit: int = 100) -> Iterator[Running]:
    settings = WorkerSettings(model="/models/scripted", api_key=KEY)
    metrics = FrontMetrics(CollectorRegistry())
    with ScriptedEngine(script, step_s=step_s, limit=limit) as engine, hold_port("127.0.0.1", 0) as held:
        app = create_app(engine, TOKENIZER, settings, metrics)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[held])))
        thread.start()
        base_url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        try:
            with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0, timeout=30) as client:
                yield Running(client, engine, metrics, base_url)
        finally:
            server.should_exit = True
            thread.join()


def says(text: str) -> Script:
    return lambda _: iter((*TOKENIZER.encode(text), 0))


def test_completions_whole_and_streamed_are_the_same_text() -> None:
    with running(says("one naïve 🙂 text")) as server:
        create = server.client.completions.create
        whole = create(model="scripted", prompt="p", max_tokens=50, seed=1)
        assert whole.choices[0].text == "one naïve 🙂 text"
        assert whole.choices[0].finish_reason == "stop"
        chunks = list(create(model="scripted", prompt="p", max_tokens=50, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_chats_whole_and_streamed_are_the_same_text() -> None:
    with running(says("Hello there.")) as server:
        create = server.client.chat.completions.create
        whole = create(model="scripted", messages=CHAT, max_completion_tokens=50, n=2)
        assert [choice.message.content for choice in whole.choices] == ["Hello there."] * 2
        assert whole.choices[0].message.role == "assistant"
        stream = create(model="scripted", messages=CHAT, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "Hello there."
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.completion_tokens == 13
        assert server.engine.requests[0].prompt_token_ids == TOKENIZER.encode("[system]Be brief.[user]Hello?")


def test_cached_tokens_and_token_ids_reach_the_client() -> None:
    with running(says("x")) as server:
        prompt = list(TOKENIZER.encode("0123456789" * 4))
        for cached in (0, 32):
            answer = server.client.completions.create(
                model="scripted", prompt=prompt, extra_body={"return_token_ids": True, "top_k": 5}
            )
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            assert details is not None
            assert details.cached_tokens == cached
            assert (details.model_extra or {})["kvtier"] == {"device": cached, "host": 0, "store": 0}
            assert (answer.choices[0].model_extra or {})["token_ids"] == [*TOKENIZER.encode("x"), 0]


def test_logprobs_parse() -> None:
    with running(says("é")) as server:
        chat = server.client.chat.completions.create(model="scripted", messages=CHAT, logprobs=True, top_logprobs=2)
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [entry.bytes for entry in logprobs.content] == [[0xC3], [0xA9], list(b"<|end|>")]
        assert len(logprobs.content[0].top_logprobs) == 2
        text = server.client.completions.create(model="scripted", prompt="p", logprobs=2).choices[0].logprobs
        assert text is not None
        assert text.text_offset == [0, 0, 1]


def test_models_can_be_listed_and_retrieved() -> None:
    with running(says("x")) as server:
        assert [model.id for model in server.client.models.list()] == ["scripted"]
        assert server.client.models.retrieve("scripted").owned_by == "kvtier"


def test_errors_become_the_clients_own_exceptions() -> None:
    with running(says("x")) as server:
        create = server.client.completions.create
        with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist"):
            create(model="gpt-9", prompt="p")
        with pytest.raises(openai.BadRequestError) as caught:
            create(model="scripted", prompt="p" * 300)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"
        assert "300 prompt tokens; this model takes at most 256" in str(caught.value)
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            create(model="scripted", prompt="p", logit_bias={"5": 1})
        with pytest.raises(openai.AuthenticationError):
            server.client.with_options(api_key="wrong").completions.create(model="scripted", prompt="p")


def test_a_busy_engine_is_a_rate_limit_error_that_clients_retry() -> None:
    with running(lambda _: cycle(TOKENIZER.encode("x")), step_s=0.1, limit=1) as server:
        create = server.client.completions.create
        first = create(model="scripted", prompt="p", max_tokens=200, stream=True)
        next(iter(first))
        with pytest.raises(openai.RateLimitError):
            create(model="scripted", prompt="q")
        first.close()


def test_a_failure_in_a_stream_is_an_api_error() -> None:
    def failing(_: EngineRequest) -> Iterator[int]:
        yield from TOKENIZER.encode("ok")
        raise ScriptedFailure("a worker died")

    with running(failing) as server:
        stream = server.client.completions.create(model="scripted", prompt="p", stream=True)
        with pytest.raises(openai.APIError, match="a worker died"):
            list(stream)


@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_closes_its_stream_cancels_every_choice(choices: int) -> None:
    with running(lambda _: cycle(TOKENIZER.encode("x")), step_s=0.02) as server:
        create = server.client.completions.create
        with create(model="scripted", prompt="p", n=choices, max_tokens=200, stream=True) as stream:
            next(iter(stream))
        assert server.engine.wait_cancelled(choices, 10)
    assert server.metrics.registry.get_sample_value("server_client_disconnects_total") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_gives_up_before_the_first_token_is_noticed(stream: bool) -> None:
    with running(lambda _: repeat(None), step_s=0.02) as server:
        create = server.client.with_options(timeout=1.5).completions.create  # the request has arrived by then
        with pytest.raises(openai.APITimeoutError):
            list(create(model="scripted", prompt="p", n=2, stream=stream))
        assert server.engine.wait_cancelled(2, 10)
    assert server.metrics.registry.get_sample_value("server_client_disconnects_total") == 1


def test_hundreds_of_streams_at_once_all_end_whole() -> None:
    async def run(base_url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:

            async def one(number: int) -> str:
                stream = await client.completions.create(
                    model="scripted", prompt=f"{number}", max_tokens=30, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(number) for number in range(100)))

    with running(
        lambda request: iter((*request.prompt_token_ids, *TOKENIZER.encode("!" * 20), 0)), limit=1000
    ) as server:
        assert asyncio.run(run(server.base_url)) == [f"{number}" + "!" * 20 for number in range(100)]
