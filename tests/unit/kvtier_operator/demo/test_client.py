"""The demo's client against a scripted server."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kvtier_operator.demo.client import EngineAnswerError, EngineHttp

USAGE = {
    "prompt_tokens": 300,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 256, "kvtier": {"device": 128, "host": 0, "store": 128}},
}
CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "text": "", "token_ids": []}]},
    {"choices": [{"index": 0, "text": " a", "token_ids": [4]}]},
    {"choices": [{"index": 0, "text": " b c", "token_ids": [5, 6]}]},
    {"choices": [], "usage": USAGE},
]


@contextmanager
def server(*events: str, status: int = 200) -> Iterator[tuple[EngineHttp, list[dict[str, Any]]]]:
    """An engine that answers every POST with these bytes; yields a client and the requests it received."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append({"path": self.path, "key": self.headers["Authorization"], **body})
            content = "".join(events).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,)).start()
        try:
            yield EngineHttp(f"http://127.0.0.1:{http.server_port}", "tiny", "key"), received
        finally:
            http.shutdown()


def sse(*chunks: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)


def test_a_stream_becomes_an_answer() -> None:
    with server(sse(*CHUNKS), "data: [DONE]\n\n") as (engine, received):
        answer = engine.complete("a prompt", 3)
    assert answer.token_ids == (4, 5, 6)
    assert answer.text == " a b c"
    assert answer.prompt_tokens == 300
    assert answer.cached_tokens == {"device": 128, "host": 0, "store": 128}
    assert 0 < answer.ttft_ms <= answer.total_ms
    assert received[0]["path"] == "/v1/completions"
    assert received[0]["key"] == "Bearer key"
    assert (received[0]["temperature"], received[0]["return_token_ids"]) == (0, True)


def test_a_stream_that_breaks_off_is_an_error() -> None:
    with server(sse(*CHUNKS)) as (engine, _), pytest.raises(EngineAnswerError, match=r"without \[DONE\]"):
        engine.complete("a prompt", 3)


def test_a_stream_without_tokens_is_an_error() -> None:
    with server("data: [DONE]\n\n") as (engine, _), pytest.raises(EngineAnswerError, match="without tokens"):
        engine.complete("a prompt", 3)


def test_an_error_inside_the_stream_is_an_error() -> None:
    broken = sse(CHUNKS[1], {"error": {"message": "worker died"}})
    with server(broken) as (engine, _), pytest.raises(EngineAnswerError, match="worker died"):
        engine.complete("a prompt", 3)


def test_a_refusal_is_told_in_the_engines_words() -> None:
    with server('{"error": {"message": "too long"}}', status=400) as (engine, _):
        with pytest.raises(EngineAnswerError, match=r"400 .*too long"):
            engine.complete("a prompt", 3)
        with pytest.raises(EngineAnswerError, match=r"400 .*too long"):
            engine.drop(["device"])


def test_an_engine_that_is_not_there_is_an_error() -> None:
    with server() as (engine, _):
        pass
    with pytest.raises(EngineAnswerError):
        engine.complete("a prompt", 3)


def test_a_probe_says_what_each_tier_holds() -> None:
    report = {
        "prompt_tokens": 300,
        "full_blocks": 2,
        "block_size": 128,
        "device": {"blocks": 0, "tokens": 0},
        "host": {"blocks": 1, "tokens": 128},
        "store": {"blocks": 2, "tokens": 256, "available": True},
    }
    with server(json.dumps(report)) as (engine, received):
        held = engine.probe("a prompt")
    assert (held.full_blocks, held.block_size, held.blocks) == (2, 128, {"device": 0, "host": 1, "store": 2})
    assert received[0]["path"] == "/admin/cache/probe"
