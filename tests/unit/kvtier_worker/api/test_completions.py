"""`/v1/completions` and `/v1/chat/completions`: text, token ids, stops, log-probabilities, usage, streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kvtier_worker.api.chat_template import ChatTemplate
from kvtier_worker.engine.frontend import EngineRequest, FinishReason
from kvtier_worker.testing.engine import DEFAULT_INFO, ScriptedFailure

from .conftest import Serve, Served, byte_tokenizer, ids, says


def events(answer: Any) -> list[Any]:
    """The events of a stream, [DONE] checked and left out."""
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def stream(served: Served, path: str = "/v1/completions", **body: Any) -> list[Any]:
    answer = served.post(path, stream=True, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer)


def test_a_text_is_answered_with_text_and_usage(serve: Serve) -> None:
    answer = serve(says(" world")).complete(max_tokens=50)
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": " world", "logprobs": None, "finish_reason": "stop"}
    assert answer["object"] == "text_completion"
    assert answer["model"] == "scripted"
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0, "kvtier": {"device": 0, "host": 0, "store": 0}},
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [ids("hi")]),
        (["hi", "you"], [ids("hi"), ids("you")]),
        (list(ids("hi")), [ids("hi")]),
        ([list(ids("hi")), list(ids("you"))], [ids("hi"), ids("you")]),
        ([list(ids("hi")), "you"], [ids("hi"), ids("you")]),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_either(serve: Serve, prompt: Any, expected: list[Any]) -> None:
    served = serve(lambda request: iter((*request.prompt_token_ids, 0)))
    answer = served.complete(prompt=prompt, return_token_ids=True)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[*tokens, 0] for tokens in expected]
    assert [request.prompt_token_ids for request in served.engine.requests] == expected


def test_choices_share_a_leader_and_differ_by_seed(serve: Serve) -> None:
    served = serve(says("x"))
    answer = served.complete(prompt=["a", "b"], n=2, seed=10)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    requests = served.engine.requests
    assert [request.sampling.seed for request in requests] == [10, 11, 10, 11]
    first = requests[0].request_id
    assert [request.leader for request in requests] == [None, first, None, requests[2].request_id]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 8


def test_every_sampling_field_reaches_the_engine(serve: Serve) -> None:
    served = serve(says("x"))
    served.complete(
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=2,
        stop_token_ids=[5],
        ignore_eos=True,
        logprobs=3,
        priority=-4,
    )
    (request,) = served.engine.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.0, 0.5, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.0, 2.0)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.logprobs) == ((5,), True, 3)
    assert (request.priority, request.extra_key, sampling.seed) == (-4, b"", None)


def test_without_max_tokens_a_completion_has_16_and_a_chat_all_that_fits(serve: Serve) -> None:
    served = serve(says("y" * 500, end=False))
    assert served.complete()["usage"]["completion_tokens"] == 16
    answer = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}]).json()
    assert answer["usage"]["total_tokens"] == DEFAULT_INFO.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_is_cut_across_tokens_and_the_engine_is_told(serve: Serve) -> None:
    served = serve(says("one END. two" * 20, end=False), step_s=0.002)
    answer = served.complete(stop=["END."], max_tokens=240, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["text"] == "one "
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == list(ids("one END."))
    assert answer["usage"]["completion_tokens"] == 8
    assert served.engine.wait_cancelled(1, 5)
    assert list(served.engine.cancelled.values()) == [FinishReason.STOP]


def test_what_only_looks_like_a_stop_string_comes_at_the_end(serve: Serve) -> None:
    chunks = stream(serve(says("one EN")), prompt="p", stop="END.")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one EN"
    assert [chunk["choices"][0]["text"] for chunk in chunks[-1:]] == ["EN"]


def test_stop_tokens_are_counted_but_not_shown(serve: Serve) -> None:
    served = serve(says("one two"))
    (space,) = ids(" ")
    answer = served.complete(stop_token_ids=[space], return_token_ids=True)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("one", list(ids("one ")), "stop")


def test_a_stop_token_met_at_the_length_limit_is_still_not_shown(serve: Serve) -> None:
    answer = serve(says("ab")).complete(stop_token_ids=list(ids("b")), max_tokens=2)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("a", "stop")


def test_streamed_text_is_the_whole_text_without_half_characters(serve: Serve) -> None:
    text = "naïve 🙂 end"
    chunks = stream(serve(says(text)), prompt="p", max_tokens=50)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_each_streamed_chunk_has_its_own_token_ids(serve: Serve) -> None:
    chunks = stream(serve(says("🙂!")), prompt="p", return_token_ids=True)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == [*ids("🙂!"), 0]
    assert chunks[0]["choices"][0]["text"] == ""


def test_usage_ends_a_stream_that_asked_for_it(serve: Serve) -> None:
    served = serve(says("hi"))
    chunks = stream(served, prompt="p", stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert "usage" not in stream(served, prompt="p")[0]


def test_cached_tokens_are_told_by_tier(serve: Serve) -> None:
    served = serve(says("x"))
    prompt = list(ids("0123456789" * 4))
    served.complete(prompt=prompt)
    details = served.complete(prompt=prompt, n=2)["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 32, "kvtier": {"device": 32, "host": 0, "store": 0}}


def test_completion_logprobs_have_openais_shape(serve: Serve) -> None:
    (choice,) = serve(says("ab", end=False)).complete(logprobs=2, max_tokens=2)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"] == [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}]
    assert logprobs["text_offset"] == [0, 1]


def test_text_offsets_count_text_that_might_have_begun_a_stop_string(serve: Serve) -> None:
    served = serve(says("one END two"))
    (choice,) = served.complete(stop=["END!"], logprobs=0)["choices"]
    assert choice["text"] == "one END two"
    assert choice["logprobs"]["text_offset"] == list(range(12))
    chunks = stream(served, prompt="p", stop=["END!"], logprobs=0)
    told = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert told == list(range(12))


def test_no_likeliest_tokens_are_told_when_none_are_asked_for(serve: Serve) -> None:
    (choice,) = serve(says("ab")).complete(logprobs=0, max_tokens=2)["choices"]
    assert choice["logprobs"]["top_logprobs"] is None


def test_chat_logprobs_have_openais_shape(serve: Serve) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1, "max_tokens": 2}
    answer = serve(says("é", end=False)).post("/v1/chat/completions", **body).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert content[0]["top_logprobs"] == [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}]


def test_a_chat_goes_through_the_template(serve: Serve) -> None:
    served = serve(says("hello"))
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "d", "name": "me"},
    ]
    answer = served.post("/v1/chat/completions", messages=messages, model="scripted").json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    assert answer["object"] == "chat.completion"
    (request,) = served.engine.requests
    assert request.prompt_token_ids == ids("<system>be<user>ab<assistant>c<user>d<assistant>")


def test_template_options_reach_the_template(serve: Serve) -> None:
    served = serve(says("x"), tokenizer=byte_tokenizer("{{ mood }}{% if add_generation_prompt %}!{% endif %}"))
    served.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "q"}],
        chat_template_kwargs={"mood": "calm"},
        add_generation_prompt=False,
    )
    assert served.engine.requests[0].prompt_token_ids == ids("calm")


def test_a_streamed_chat_opens_with_the_role(serve: Serve) -> None:
    chunks = stream(serve(says("hi")), "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], n=2)
    for index in (0, 1):
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "hi"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_the_salt_is_mixed_in_only_where_the_server_allows_it(serve: Serve) -> None:
    served = serve(says("x"), enable_cache_salt=True)
    served.complete(cache_salt="tenant-1")
    assert served.engine.requests[0].extra_key == b"tenant-1"


def failing(request: EngineRequest) -> Iterator[int]:
    yield from ids("ok")
    if request.leader is not None:
        raise ScriptedFailure("a worker died")
    yield from ids("still here " * 100)


def test_a_failing_choice_fails_the_request_and_frees_the_others(serve: Serve) -> None:
    served = serve(failing, step_s=0.001)
    answer = served.post("/v1/completions", prompt="p", n=2, max_tokens=200)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "a worker died" in answer.json()["error"]["message"]
    assert served.engine.wait_cancelled(1, 5)


def test_a_failure_in_a_stream_is_an_event(serve: Serve) -> None:
    chunks = stream(serve(failing), prompt="p", n=2, max_tokens=5)
    assert "a worker died" in chunks[-1]["error"]["message"]


def test_a_busy_engine_is_429_and_keeps_nothing_of_the_request(serve: Serve) -> None:
    served = serve(says("x" * 200, end=False), limit=1, step_s=0.001)
    answer = served.post("/v1/completions", prompt="p", n=2, max_tokens=200)
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.headers["retry-after"] == "1"
    assert served.engine.wait_cancelled(1, 5)


def test_a_template_that_refuses_is_the_clients_400(serve: Serve) -> None:
    served = serve(says("x"), tokenizer=byte_tokenizer("{{ raise_exception('roles must alternate') }}"))
    answer = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "q"}])
    assert answer.status_code == 400
    assert "roles must alternate" in answer.json()["error"]["message"]


def test_a_template_cannot_reach_out_of_its_sandbox(serve: Serve) -> None:
    served = serve(says("x"), tokenizer=byte_tokenizer("{{ messages.__class__.__mro__ }}"))
    assert served.post("/v1/chat/completions", messages=[{"role": "user", "content": "q"}]).status_code == 400


def test_templates_know_what_hugging_faces_know() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([{"content": "é"}, {}], {}) == '<s>{"content": "é"}'
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([], {}).startswith("2")


def test_metrics_count_requests_tokens_and_waits(serve: Serve) -> None:
    served = serve(says("abc"))
    served.complete()
    served.post("/v1/completions", prompt="")
    assert served.sample("server_request_in_total") == 2
    assert served.sample("server_responses_total", endpoint="/v1/completions", code="200") == 1
    assert served.sample("server_responses_total", endpoint="/v1/completions", code="400") == 1
    assert served.sample("server_open_requests") == 0
    assert served.sample("server_prompt_tokens_total") == 5
    assert served.sample("server_output_tokens_total") == 4
    assert served.sample("time_to_first_token_latency_milliseconds_count") == 1
    assert served.sample("inter_token_latency_milliseconds_count") == 3


def test_a_long_text_is_encoded_like_a_short_one(serve: Serve) -> None:
    served = serve(says("x"), info=replace(DEFAULT_INFO, max_model_len=10_000))
    text = "long " * 1000
    served.complete(prompt=text)
    assert served.engine.requests[0].prompt_token_ids == ids(text)
