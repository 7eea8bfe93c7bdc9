"""``make cluster`` and ``make cluster-down``, on a folder of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kvtier_worker.testing.processes import port_answers

SCRIPT = Path(__file__).parents[2] / "scripts" / "cluster.py"

Script = Callable[..., str]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "cluster"


@pytest.fixture
def script(state: Path) -> Iterator[Script]:
    def run(*arguments: str) -> str:
        command = [sys.executable, str(SCRIPT), *arguments, "--state", str(state)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    yield run
    run("down")


def api_port(state: Path) -> int:
    config = json.loads((state / "control-plane" / "admin.kubeconfig").read_text())
    return urlsplit(config["clusters"][0]["cluster"]["server"]).port or 0


def test_a_cluster_stays_up_says_so_the_second_time_and_goes(script: Script, state: Path) -> None:
    said = script("up", "--nodes", "1")
    assert f"export KUBECONFIG={state}/control-plane/admin.kubeconfig" in said
    assert "kubectl apply -f crds/" in said
    pid = (state / "pid").read_text()
    port = api_port(state)
    assert port_answers(port)
    assert "already running" in script("up")
    assert (state / "pid").read_text() == pid
    assert "is stopped" in script("down")
    assert not port_answers(port)
    assert not state.exists()
    assert "no control plane is running" in script("down")


def test_nothing_outlives_the_process_that_owns_the_cluster(script: Script, state: Path) -> None:
    script("up", "--nodes", "0")
    port = api_port(state)
    os.kill(int((state / "pid").read_text()), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while port_answers(port):
        assert time.monotonic() < deadline, "the API server outlived its owner"
        time.sleep(0.1)
    # A stale process id is no running cluster.
    assert "is ready" in script("up", "--nodes", "0")
