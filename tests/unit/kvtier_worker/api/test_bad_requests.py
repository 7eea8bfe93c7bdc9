"""What is wrong with a request is told in OpenAI's shape, with the field to blame; nothing reaches the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request
from kvtier_worker.api.front import read_request_body
from kvtier_worker.api.problems import ApiError

from .conftest import Serve, byte_tokenizer, says

USER = [{"role": "user", "content": "hi"}]

COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "an empty list"),
    ({"prompt": [[]]}, "prompt", "prompt[0]: empty"),
    ({"prompt": ["a", ""]}, "prompt", "prompt[1]: empty"),
    ({"prompt": 5}, "prompt", "missing"),
    ({"prompt": {"a": 1}}, "prompt", "missing"),
    ({"prompt": [1, "a"]}, "prompt", "prompt[1]: must be a token id"),
    ({"prompt": [1, True]}, "prompt", "prompt[1]: must be a token id"),
    ({"prompt": [[1], 2]}, "prompt", "prompt[1]: must be a text or a list of token ids"),
    ({"prompt": [1, 512]}, "prompt", "token id 512 at position 1 is not in 0..511"),
    ({"prompt": [-1]}, "prompt", "token id -1 at position 0"),
    ({"prompt": ["a"] * 2049}, "prompt", "2049 prompts; at most 2048"),
    ({"prompt": ["a"] * 201}, "prompt", "201 prompts; this server runs at most 200"),
    ({"prompt": ["a"] * 3, "n": 128}, "prompt", "3 prompts with n=128; this server runs at most 200"),
    ({"prompt": "x" * 300}, "prompt", "300 prompt tokens; this model takes at most 256"),
    ({"max_tokens": 252}, "prompt", "5 prompt tokens and 252 to generate are 257; this model takes at most 256"),
    ({"max_tokens": 0}, "max_tokens", "expected int >= 1 (given 0)"),
    ({"max_tokens": "5"}, "max_tokens", "given '5'"),
    ({"max_tokens": 1.5}, "max_tokens", "given 1.5"),
    ({"n": 0}, "n", "given 0"),
    ({"n": 129}, "n", "given 129"),
    ({"temperature": -0.1}, "temperature", ">= 0"),
    ({"temperature": 2.1}, "temperature", "<= 2"),
    ({"temperature": "hot"}, "temperature", "given 'hot'"),
    ({"top_p": 0}, "top_p", "> 0"),
    ({"top_p": 1.1}, "top_p", "<= 1"),
    ({"top_k": -2}, "top_k", ">= -1"),
    ({"min_p": 2}, "min_p", "<= 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "> 0"),
    ({"presence_penalty": 3}, "presence_penalty", "<= 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", ">= -2"),
    ({"seed": 1.5}, "seed", "given 1.5"),
    ({"stop": ""}, "stop", "length >= 1"),
    ({"stop": [""]}, "stop[0]", "length >= 1"),
    ({"stop": ["x"] * 17}, "stop", "length <= 16"),
    ({"stop": 5}, "stop", "given 5"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ">= 0"),
    ({"logprobs": 21}, "logprobs", "<= 20"),
    ({"logprobs": True}, "logprobs", "given True"),
    ({"stream": "yes"}, "stream", "given 'yes'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only together with stream=true"),
    ({"stream": True, "stream_options": {"frobnicate": 1}}, "stream_options", "frobnicate"),
    ({"cache_salt": "x"}, "cache_salt", "--enable_cache_salt"),
    ({"echo": True}, "echo", "not supported by this version"),
    ({"suffix": "tail"}, "suffix", "not supported by this version"),
    ({"best_of": 2}, "best_of", "not supported by this version"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported by this version"),
    ({"temprature": 1}, "temprature", "no such field; did you mean temperature?"),
    ({"zzz": 1}, "zzz", "no such field"),
    ({"z" * 100_000: 1}, "z" * 57 + "...", "no such field"),
]

CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing"),
    ({"messages": []}, "messages", "missing"),
    ({"messages": ["hi"]}, "messages[0]", "must be an object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "must be one of"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "not 'king'"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "must be one of"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a text"),
    ({"messages": [*USER, {"role": "user", "content": 5}]}, "messages[1].content", "must be a text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "must be an object"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "only text parts",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "must be a text"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "not supported",
    ),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "at most 256"),
    ({"top_logprobs": 3}, "top_logprobs", "only together with logprobs=true"),
    ({"logprobs": 3}, "logprobs", "given 3"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported by this version"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported by this version"),
    ({"prompt": "x"}, "prompt", "no such field"),
    ({"n": 201}, "n", "given 201"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [("/v1/completions", {"prompt": "hello"} | body, param, text) for body, param, text in COMPLETIONS]
    + [("/v1/chat/completions", {"messages": USER} | body, param, text) for body, param, text in CHATS],
)
def test_a_malformed_request_is_400_and_names_the_field(
    serve: Serve, path: str, body: dict[str, Any], param: str, text: str
) -> None:
    served = serve(says("x"))
    answer = served.post(path, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert text in error["message"]
    assert served.engine.requests == ()


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"\xff\xfe", b"[" * 9999]
)
def test_a_body_that_is_no_json_object_is_400(serve: Serve, body: bytes) -> None:
    answer = serve(says("x")).client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert "body" in answer.json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_taken(serve: Serve) -> None:
    served = serve(says("x"))
    served.complete(
        user="me", metadata={"a": 1}, echo=False, suffix=None, best_of=1, logit_bias={}, seed=None, stop=None, n=None
    )
    answer = served.post(
        "/v1/chat/completions",
        messages=USER,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        service_tier="auto",
        parallel_tool_calls=True,
    )
    assert answer.status_code == 200


def test_another_models_name_is_404(serve: Serve) -> None:
    served = serve(says("x"), model_id="mine")
    answer = served.post("/v1/completions", model="gpt-4", prompt="x")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "'gpt-4'" in answer.json()["error"]["message"]
    assert served.post("/v1/completions", model="mine", prompt="x").status_code == 200


def test_an_unknown_path_and_a_wrong_method_have_openais_shape(serve: Serve) -> None:
    client = serve(says("x")).client
    assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/v1/completions").json()["error"]["message"].startswith("GET /v1/completions")


def test_a_chat_without_a_template_says_what_to_do(serve: Serve) -> None:
    served = serve(says("x"), tokenizer=byte_tokenizer(""))
    answer = served.post("/v1/chat/completions", messages=USER)
    assert answer.status_code == 400
    assert "--chat_template" in answer.json()["error"]["message"]


def test_a_body_beyond_the_limit_is_413_before_all_of_it_is_read() -> None:
    parts = [{"type": "http.request", "body": b"x" * 600, "more_body": True} for _ in range(3)]

    async def receive() -> Any:
        return parts.pop(0)

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_request_body(request, limit=1000))
    assert caught.value.status == 413
    assert "1000 bytes" in caught.value.message
    assert len(parts) == 1
