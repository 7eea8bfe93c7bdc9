"""`kvtier engine` as a process: it starts, serves, drains, dies and refuses as it should."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import tokenizers
from kvtier_worker.model.prepare import default_folder, prepare
from kvtier_worker.testing.processes import ChildProcess, free_port, http_status
from tokenizers import decoders, models, pre_tokenizers

START_S = 90  # torch alone takes many seconds to import on a busy machine
KVTIER = (sys.executable, "-m", "kvtier_worker.cli")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model: config and tokenizer; its weights are dummies."""
    folder = tmp_path_factory.mktemp("tiny-model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocab = {"<|end|>": 0} | {char: n + 1 for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Engine:
    """A running engine process."""

    def __init__(self, child: ChildProcess, port: int, key: str, admin_port: int) -> None:
        self.child = child
        self.port = port
        self.admin_url = f"http://127.0.0.1:{admin_port or port}/admin"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers)

    def complete(self, **body: Any) -> Any:
        answer = self.http.post("/v1/completions", json={"prompt": "hello", "temperature": 0} | body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait_ready(self) -> None:
        self.child.wait_until(lambda: http_status(self.port, "/ready") == 200, START_S)

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.child.pid).children()
        return [child for child in children if "worker_main" in " ".join(child.cmdline())]

    def exit_code(self, timeout_s: float = 60) -> int:
        assert self.child.process is not None
        return self.child.process.wait(timeout_s)

    @property
    def log(self) -> str:
        return self.child.log_path.read_text()


@contextmanager
def engine(
    model: Path, *flags: str, env: Mapping[str, str] | None = None, key: str = "", admin_port: int = 0
) -> Iterator[Engine]:
    """Start an engine on a free port; afterwards no process of it is left."""
    port = free_port()
    argv = [*KVTIER, "engine", f"--model={model}", f"--port={port}", "--max_cache_size=20000000", *flags]
    child = ChildProcess("engine", argv, {"OMP_NUM_THREADS": "1"} | dict(env or {}))
    child.start()
    running = Engine(child, port, key, admin_port)
    workers: list[psutil.Process] = []
    try:
        yield running
        workers = running.workers() if child.running else []
    finally:
        running.http.close()
        child.stop(timeout_s=60)
    _, left = psutil.wait_procs(workers, timeout=10)
    assert not left, running.log


KEY = "s3cret"
DUMMY = ("--load_format=dummy", "--block_size=16", "--host_blocks_factor=2")


def refused(*argv: str) -> list[str]:
    """What a command line is refused with."""
    done = subprocess.run([*KVTIER, *argv], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done
    assert done.stdout == ""
    return done.stderr.splitlines()


def check_tiers(running: Engine) -> None:
    """The same prompt cold, from the device and from the host: same tokens, each from its tier."""
    body = {"prompt": "0123456789abcdef" * 4 + "!", "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    answers = [running.complete(**body), running.complete(**body)]
    dropped = httpx.post(f"{running.admin_url}/cache/drop", json={"tiers": ["device"]}, headers=running.http.headers)
    assert dropped.json()["dropped"]["device"] >= 4
    answers.append(running.complete(**body))
    tiers = [answer["usage"]["prompt_tokens_details"]["kvtier"] for answer in answers]
    assert [(tier["device"], tier["host"], tier["store"]) for tier in tiers] == [(0, 0, 0), (64, 0, 0), (0, 64, 0)]
    assert len({tuple(answer["choices"][0]["token_ids"]) for answer in answers}) == 1
    report = httpx.get(f"{running.admin_url}/integrity", headers=running.http.headers).json()
    assert report["ok"] is True, report


def check_metrics(running: Engine) -> None:
    metrics = httpx.get(f"http://127.0.0.1:{running.port}/metrics").text  # no key needed
    assert metrics.count("# TYPE time_to_first_token_latency_milliseconds ") == 1
    assert 'prompt_tokens_cached_total{tier="host"} 64.0' in metrics
    assert "_created" not in metrics


def check_key(running: Engine) -> None:
    assert httpx.get(f"http://127.0.0.1:{running.port}/v1/models").status_code == 401
    assert httpx.get(f"{running.admin_url}/integrity").status_code == 401
    for process in (psutil.Process(running.child.pid), *running.workers()):
        assert KEY not in " ".join(process.cmdline())
    for worker in running.workers():
        assert "KVTIER_API_KEY" not in worker.environ()


def check_too_long(running: Engine) -> None:
    answer = running.http.post("/v1/completions", json={"prompt": "x" * 900, "max_tokens": 200})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "1100" in message
    assert "1024" in message


def check_disconnect(running: Engine) -> None:
    """A client that leaves gives its blocks back."""
    body = {"prompt": "hello", "max_tokens": 900, "n": 3, "ignore_eos": True, "stream": True}
    with running.http.stream("POST", "/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    metrics = f"http://127.0.0.1:{running.port}/metrics"
    running.child.wait_until(lambda: "num_used_blocks 0.0" in httpx.get(metrics).text, 30)
    assert "num_running_requests 0.0" in httpx.get(metrics).text
    assert 'requests_total{reason="cancelled"} 3.0' in httpx.get(metrics).text


def check_drain(running: Engine) -> None:
    """A running request ends whole, new ones are refused, then the process ends."""
    answers: list[Any] = []
    long = {"max_tokens": 600, "ignore_eos": True}  # still running when everything below has been asked
    thread = threading.Thread(target=lambda: answers.append(running.complete(**long)["usage"]))
    thread.start()
    running.child.wait_until(lambda: "num_running_requests 1.0" in running.http.get("/metrics").text, 30)
    running.child.signal(signal.SIGTERM)
    running.child.wait_until(lambda: http_status(running.port, "/ready") == 503, 10)
    assert running.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    assert http_status(running.port, "/health") == 200
    thread.join()
    assert answers[0]["completion_tokens"] == 600
    assert running.exit_code() == 0
    assert "draining signal=SIGTERM" in running.log
    assert "stopped exit_code=0" in running.log


def test_an_engine_serves_from_the_first_probe_to_the_drain(model: Path) -> None:
    admin = free_port()
    flags = (*DUMMY, f"--admin_port={admin}", "--max_model_len=1024", "--drain_timeout=100000")
    with engine(model, *flags, env={"KVTIER_API_KEY": KEY}, key=KEY, admin_port=admin) as running:
        running.child.wait_until(lambda: http_status(running.port, "/health") == 200, START_S)
        assert http_status(running.port, "/ready") == 503  # the workers need seconds, the front does not
        assert running.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        running.wait_ready()
        assert running.http.get("/admin/integrity").status_code == 404
        check_tiers(running)
        check_metrics(running)
        check_key(running)
        check_too_long(running)
        check_disconnect(running)
        check_drain(running)


def test_a_second_signal_ends_running_requests_at_once(model: Path) -> None:
    with engine(model, *DUMMY) as running:
        running.wait_ready()
        body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with running.http.stream("POST", "/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.child.signal(signal.SIGTERM)
            running.child.wait_until(lambda: "draining" in running.log, 10)
            running.child.signal(signal.SIGINT)
            assert "error" in "".join(lines)
        assert running.exit_code() == 0
        assert "drain_cut_short" in running.log


def test_a_signal_while_the_workers_start_stops_everything(model: Path) -> None:
    with engine(model, *DUMMY) as running:
        running.child.wait_until(lambda: bool(running.workers()), START_S)
        workers = running.workers()
        running.child.signal(signal.SIGINT)
        assert running.exit_code(30) == 0
        assert not psutil.wait_procs(workers, timeout=10)[1]


def test_a_worker_that_dies_fails_its_requests_and_the_engine_exits_non_zero(model: Path) -> None:
    with engine(model, *DUMMY, "--tp_size=3") as running:
        running.wait_ready()
        assert len(running.workers()) == 3
        body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with running.http.stream("POST", "/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            workers = running.workers()
            workers[1].send_signal(signal.SIGKILL)
            text = "".join(lines)
        assert "error" in text
        assert "data: [DONE]" in text
        assert running.exit_code() == 1
        assert "engine_died" in running.log
        assert "SIGKILL" in running.log
        assert not psutil.wait_procs(workers, timeout=10)[1]


def test_everything_wrong_is_told_at_once_with_exit_code_2(tmp_path: Path) -> None:
    lines = refused(
        "engine",
        f"--model={tmp_path}",
        "--host_blocks_factor=1",
        "--enable_kvcache_store",
        "--enable_prefix_cache=false",
        "--store_protocol=rdma",
        "--store_master_server_address=127.0.0.1:1",
        "--num_speculative_tokens=3",
        "--prot=1",
    )
    text = "\n".join(lines)
    for part in (
        "--num_speculative_tokens=3: speculative decoding is not supported yet",
        "--prot=1: unknown flag; did you mean --port?",
        "--host_blocks_factor=1.0: --enable_kvcache_store=true needs more than 1",
        "--enable_prefix_cache=false: --enable_kvcache_store=true needs the prefix cache",
        "config.json",
        "no active RDMA device",
    ):
        assert part in text, text
    assert lines[0].startswith("kvtier engine: ")


def test_a_port_in_use_is_told_with_its_holder(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        (_, line, _) = refused("engine", f"--model={model}", *DUMMY, f"--port={port}")
    assert f"--port={port}: cannot listen on 127.0.0.1: Address already in use, held by pid {os.getpid()}" in line


def test_what_only_the_workers_can_know_is_also_told_with_exit_code_2(model: Path) -> None:
    with engine(model, *DUMMY, "--max_cache_size=10") as running:
        assert running.exit_code(START_S) == 2
        assert "--max_cache_size=10: two blocks need" in running.log
        assert "kvtier engine: a setting cannot work" in running.log


@pytest.mark.mooncake
def test_a_store_that_is_down_at_the_start_is_a_clear_error(model: Path) -> None:
    dead, base = free_port(), free_port()
    flags = [f"--store_master_server_address=127.0.0.1:{dead}", f"--store_local_hostname=127.0.0.1:{base}"]
    with engine(model, *DUMMY, "--enable_kvcache_store", *flags) as running:
        assert running.exit_code(START_S) == 1
        assert f"127.0.0.1:{dead}" in running.log.splitlines()[-2] + running.log.splitlines()[-1]


def test_help_names_every_group(capfd: pytest.CaptureFixture[str]) -> None:
    assert subprocess.run([*KVTIER, "engine", "--help"], timeout=60, check=False).returncode == 0
    out = capfd.readouterr().out
    for heading in ("Model:", "Server:", "KV cache:", "Scheduler:", "Distributed:"):
        assert f"\n{heading}\n" in out


def test_the_engine_process_imports_no_torch_and_no_numpy() -> None:
    code = "import sys, kvtier_worker.main; print([m for m in ('torch', 'numpy', 'mooncake') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_model_answers_over_the_official_client() -> None:
    folder = prepare(default_folder(os.environ))
    with engine(folder, "--host_blocks_factor=2") as running:
        running.wait_ready()
        with openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", timeout=110) as client:
            name = client.models.list().data[0].id
            answer = client.completions.create(
                model=name, prompt="The capital of France is", max_tokens=3, temperature=0
            )
            assert answer.choices[0].text.startswith(" Paris")
            chat = client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                max_tokens=8,
                temperature=0,
                stream=True,
            )
            assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chat)
