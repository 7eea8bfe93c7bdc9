"""The command line of the original page, paths and ports substituted, serves: `xllm`, one master, one store client."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

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
            child = ChildProcess(life, argv(model, master.address, f"127.0.0.1:{free_port()}", port), {})
            child.log_path = tmp_path / life
            child.start()
            try:
                child.wait_until(partial(is_ready, port), 120)
                body = {"model": "my-model-revision-v1", "prompt": prompt, "max_tokens": 4, "temperature": 0}
                answer = httpx.post(
                    f"http://127.0.0.1:{port}/v1/completions", json=body | {"return_token_ids": True}, timeout=110
                ).json()
            finally:
                code = child.stop(60)
            assert code == 0, child.log_tail()
            tokens.append(answer["choices"][0]["token_ids"])
            cached = answer["usage"]["prompt_tokens_details"]["kvtier"]
            assert cached == {"device": 0, "host": 0, "store": 0 if life == "first" else 384}, child.log_tail()
    assert tokens[0] == tokens[1]
