"""The command line of the original page, paths and ports substituted, serves: `xllm`, one master, one store client."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from kvtier_worker.model.prepare import default_folder, prepare
from kvtier_worker.testing.mooncake import running_master, running_mooncake_client
from kvtier_worker.testing.processes import ChildProcess, free_port, http_status

XLLM = str(Path(sys.executable).parent / "xllm")
NEEDED_BYTES = 14 << 30
"""Its factor of 4 makes an arena of 4 times the default device cache, which is a tenth of memory."""


def argv(model: Path, master: str, hostname: str, port: int) -> list[str]:
    return [
        XLLM,
        f"--model={model}",
        "--model_id=my-model-revision-v1",
        "--enable_prefix_cache=true",
        "--host_blocks_factor=4",
        "--enable_kvcache_store=true",
        "--store_protocol=tcp",
        f"--store_master_server_address={master}",
        "--store_metadata_server=P2PHANDSHAKE",
        f"--store_local_hostname={hostname}",
        "--prefetch_batch_size=8",
        "--prefetch_timeout=30000",
        f"--port={port}",  # the page takes the default one, which somebody else may hold here
    ]


def is_ready(port: int) -> bool:
    return http_status(port, "/ready") == 200


@contextmanager
def serving(command: list[str], port: int, log_path: Path) -> Iterator[ChildProcess]:
    """The engine, ready; on the way out it must end well."""
    child = ChildProcess(log_path.name, command, {})
    child.log_path = log_path
    child.start()
    try:
        child.wait_until(partial(is_ready, port), 120)
        yield child
    finally:
        code = child.stop(60)
    assert code == 0, child.log_tail()


def ask(port: int, prompt: list[int], max_tokens: int = 4) -> dict[str, Any]:
    body = {"model": "my-model-revision-v1", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    url = f"http://127.0.0.1:{port}/v1/completions"
    answer = httpx.post(url, json=body | {"return_token_ids": True, "ignore_eos": True}, timeout=110)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


@pytest.mark.mooncake
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    psutil.virtual_memory().available < NEEDED_BYTES, reason=f"needs {NEEDED_BYTES >> 30} GiB of available memory"
)
def test_the_original_command_line_serves_and_finds_its_blocks_in_the_store(tmp_path: Path) -> None:
    model = prepare(default_folder(os.environ))
    prompt = list(range(100, 100 + 128 * 3 + 5))
    tokens = []
    with running_master() as master, running_mooncake_client(master.address):
        for life in ("first", "second"):
            port = free_port()
            command = argv(model, master.address, f"127.0.0.1:{free_port()}", port)
            with serving(command, port, tmp_path / life) as child:
                answer = ask(port, prompt)
            tokens.append(answer["choices"][0]["token_ids"])
            cached = answer["usage"]["prompt_tokens_details"]["kvtier"]
            assert cached == {"device": 0, "host": 0, "store": 0 if life == "first" else 384}, child.log_tail()
    assert tokens[0] == tokens[1]


@pytest.mark.mooncake
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_master_killed_under_load_loses_no_request_and_changes_no_token(tmp_path: Path) -> None:
    model = prepare(default_folder(os.environ))
    prompts = [list(range(start, start + 140)) for start in range(100, 2100, 250)]
    port = free_port()
    with running_master() as master, running_mooncake_client(master.address):
        command = [*argv(model, master.address, f"127.0.0.1:{free_port()}", port), f"--max_cache_size={1 << 28}"]
        with serving(command, port, tmp_path / "engine"):
            alone = [ask(port, prompt)["choices"][0]["token_ids"] for prompt in prompts]
            killer = threading.Timer(0.5, master.kill)
            killer.start()
            rounds = [[*prompt, 7 + turn] for turn in range(4) for prompt in prompts]  # new tails, known heads
            with ThreadPoolExecutor(8) as clients:
                answers = list(clients.map(partial(ask, port), [*rounds, *prompts]))
            killer.join()
            assert [answer["choices"][0]["token_ids"] for answer in answers[len(rounds) :]] == alone
            assert all(len(answer["choices"][0]["token_ids"]) == 4 for answer in answers)
            integrity = httpx.get(f"http://127.0.0.1:{port}/admin/integrity", timeout=60).json()
            assert integrity["ok"], integrity
