"""Probes, models, the key, and `/admin`."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from kvtier_worker.api.app import create_admin_app, create_app
from kvtier_worker.api.late import LateEngine
from kvtier_worker.api.metrics import FrontMetrics
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import RequestId
from kvtier_worker.core.sampling import SamplingParams
from kvtier_worker.engine.frontend import EngineRequest, RequestOutput
from kvtier_worker.testing.engine import ScriptedEngine
from prometheus_client import CollectorRegistry

from .conftest import TOKENIZER, Serve, ids, says

PROMPT = list(ids("0123456789" * 4))


def test_probes_answer_without_a_key_and_the_rest_does_not(serve: Serve) -> None:
    client = serve(says("x"), api_key="secret").client
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert client.get(path).status_code == 200, path
    for method, path in [("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/admin/integrity"), ("GET", "/")]:
        answer = client.request(method, path)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("header", ["Bearer wrong", "Bearer secretx", "secret", "bearer secret", "", "Bearer sécret"])
def test_only_the_exact_key_is_let_in(serve: Serve, header: str) -> None:
    client = serve(says("x"), api_key="secret").client
    assert client.get("/v1/models", headers={b"Authorization": header.encode("latin-1")}).status_code == 401
    assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_models_lists_the_one_that_is_served(serve: Serve) -> None:
    client = serve(says("x"), model="/models/tiny/").client
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["object"] == "model"
    assert model["max_model_len"] == 256
    assert client.get("/v1/models/tiny").json() == model
    assert client.get("/v1/models/other").status_code == 404


def test_dropping_and_probing_the_cache(serve: Serve) -> None:
    served = serve(says("x"))
    served.complete(prompt=PROMPT)
    probe = served.post("/admin/cache/probe", prompt=PROMPT).json()
    assert probe == {
        "prompt_tokens": 40,
        "full_blocks": 2,
        "block_size": 16,
        "device": {"blocks": 2, "tokens": 32},
        "host": {"blocks": 0, "tokens": 0},
        "store": {"blocks": 0, "tokens": 0, "available": False},
    }
    assert served.post("/admin/cache/drop", tiers=["device", "host"]).json() == {"dropped": {"device": 2, "host": 0}}
    assert served.post("/admin/cache/probe", prompt=PROMPT).json()["device"]["blocks"] == 0


def test_a_chat_can_be_probed(serve: Serve) -> None:
    served = serve(says("x"))
    answer = served.post("/admin/cache/probe", messages=[{"role": "user", "content": "hello"}]).json()
    assert answer["prompt_tokens"] == len("<user>hello<assistant>")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("drop", {}, None),
        ("drop", {"tiers": []}, "tiers"),
        ("drop", {"tiers": ["store"]}, "tiers"),
        ("drop", {"tiers": ["hots"]}, "tiers"),
        ("drop", {"tiers": "host"}, "tiers"),
        ("drop", {"tiers": ["host"], "now": True}, "now"),
        ("probe", {}, "prompt"),
        ("probe", {"prompt": ["a", "b"]}, "prompt"),
        ("probe", {"prompt": [999]}, "prompt"),
        ("probe", {"prompt": "a", "cache_salt": "x"}, "cache_salt"),
    ],
)
def test_a_malformed_admin_request_is_400(serve: Serve, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = serve(says("x")).post(f"/admin/cache/{path}", **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_integrity_reports_every_pool(serve: Serve) -> None:
    served = serve(says("x"))
    report = served.client.get("/admin/integrity").json()
    assert report["ok"] is True
    (pool,) = report["pools"]
    assert pool["name"] == "device"
    assert pool["free"] + pool["leased"] + pool["cached"] == pool["usable"]


def test_a_drained_engine_is_alive_and_not_ready(serve: Serve) -> None:
    served = serve(says("x"))
    assert served.post("/admin/drain").json() == {"drained": True}
    assert served.client.get("/health").status_code == 200
    assert served.client.get("/ready").status_code == 503
    assert served.client.get("/ready").json()["reason"] == "draining"
    answer = served.post("/v1/completions", prompt="x")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_not_ready"


def test_a_drain_waits_for_running_requests(serve: Serve) -> None:
    served = serve(says("x" * 20, end=False), step_s=0.001)
    ends: list[RequestOutput] = []
    running = EngineRequest(RequestId("long"), ids("p"), SamplingParams(max_tokens=20))
    served.engine.submit(running, lambda output: ends.append(output) if output.finish_reason else None)
    assert served.post("/admin/drain").json() == {"drained": True}
    assert [output.request_id for output in ends] == ["long"]
    assert served.client.get("/ready").status_code == 503


def test_metrics_are_prometheus_text(serve: Serve) -> None:
    served = serve(says("x"))
    served.complete()
    answer = served.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "server_request_in_total 1.0" in answer.text


def test_admin_port_moves_admin_away_from_the_api(serve: Serve) -> None:
    served = serve(says("x"), admin_port=9)
    assert served.post("/admin/drain").status_code == 404
    settings = WorkerSettings(model="/m/scripted", admin_port=9, api_key="k")
    metrics = FrontMetrics(CollectorRegistry())
    with (
        ScriptedEngine(says("x")) as engine,
        TestClient(create_admin_app(engine, TOKENIZER, settings, metrics)) as client,
    ):
        assert client.get("/health").status_code == 200
        assert client.get("/admin/integrity").status_code == 401
        assert client.get("/admin/integrity", headers={"Authorization": "Bearer k"}).json()["ok"] is True
        assert client.post("/v1/completions", headers={"Authorization": "Bearer k"}).status_code == 404


def test_an_engine_that_is_starting_is_alive_and_refuses_with_the_reason() -> None:
    late = LateEngine()
    settings = WorkerSettings(model="/m/scripted")
    app = create_app(late, TOKENIZER, settings, FrontMetrics(CollectorRegistry()))
    with TestClient(app) as client, ScriptedEngine(says("hi")) as engine:
        late.progress("loading the model")
        assert client.get("/health").status_code == 200
        assert client.get("/ready").json() == {"status": "not ready", "reason": "loading the model"}
        assert "max_model_len" not in client.get("/v1/models").json()["data"][0]
        for method, path, body in [
            ("POST", "/v1/completions", {"prompt": "x"}),
            ("POST", "/admin/cache/probe", {"prompt": "x"}),
            ("POST", "/admin/cache/drop", {"tiers": ["host"]}),
            ("GET", "/admin/integrity", None),
        ]:
            answer = client.request(method, path, json=body)
            assert answer.status_code == 503, path
            assert "loading the model" in answer.json()["error"]["message"]
        assert client.post("/admin/drain").json() == {"drained": True}
        late.attach(engine)
        assert client.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"] == "hi"
        late.fail("rank 0 died")
        assert client.get("/health").json() == {"status": "dead", "reason": "rank 0 died"}
        assert client.get("/health").status_code == 503
