"""``kvtier up`` with everything real: Mooncake, the model, the engine."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from kvtier_operator.local.process_plan import plan_processes
from kvtier_operator.manifest import load
from kvtier_operator.resources.processes import Programs

pytestmark = [pytest.mark.mooncake, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

START_TIMEOUT_S = 180


class Up:
    """A running ``kvtier up``."""

    def __init__(self, process: subprocess.Popen[str], output: Path, url: str) -> None:
        self.process = process
        self.output = output
        self.url = url

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (found := re.search(pattern, self.output.read_text())):
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)
        return found[0]

    def family(self) -> dict[str, psutil.Process]:
        """Every descendant, by its pid and command."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return {f"{child.pid} {' '.join(child.cmdline())}": child for child in children}


@contextmanager
def kvtier_up(file: Path, tmp_path: Path) -> Iterator[Up]:
    output = tmp_path / "output"
    kvtier = Path(sys.executable).with_name("kvtier")
    with output.open("w") as out:
        process = subprocess.Popen(
            (kvtier, "up", file, f"--state-dir={tmp_path / 'state'}"), stdout=out, stderr=subprocess.STDOUT, text=True
        )
    try:
        yield Up(process, output, f"http://127.0.0.1:{load(file).roles[0].port}")
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def assert_gone(family: dict[str, psutil.Process]) -> None:
    _, left = psutil.wait_procs(list(family.values()), timeout=15)
    assert [name for name, child in family.items() if child in left] == []


@pytest.mark.parametrize(
    ("example", "end"),
    [
        ("local.yaml", signal.SIGINT),
        ("local-tcp.yaml", signal.SIGTERM),
        ("local-tensor-parallel.yaml", signal.SIGINT),
        ("local-without-store.yaml", signal.SIGTERM),
    ],
)
def test_every_example_serves_and_a_signal_stops_everything_in_order(
    manifest: Callable[..., Path], tmp_path: Path, example: str, end: signal.Signals
) -> None:
    file = manifest(example)
    with kvtier_up(file, tmp_path) as up:
        up.wait_for("is ready\n")
        family = up.family()
        body = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{up.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert "Paris" in answer.json()["choices"][0]["text"]
        assert httpx.get(f"{up.url}/admin/integrity", timeout=30).json()["ok"] is True
        up.process.send_signal(end)
        assert up.process.wait(60) == 0, up.output.read_text()
        assert_gone(family)
        stops = re.findall(r"^(\S+): stopping$", up.output.read_text(), re.MULTILINE)
        assert stops == [process.name for process in reversed(plan_processes(load(file), "/model", Programs()))]
        assert "killed" not in up.output.read_text()


def test_an_engine_that_cannot_start_is_named_and_everything_stops(
    manifest: Callable[..., Path], tmp_path: Path
) -> None:
    def changes(spec: dict[str, Any]) -> None:
        spec["roles"][0]["tiers"]["device"]["size"] = "1Mi"

    with kvtier_up(manifest("local.yaml", changes), tmp_path) as up:
        up.wait_for("store-dram-0: ready")
        family = up.family()
        assert up.process.wait(90) == 1
        assert re.search("engine-0 ended with exit status [12]; it wrote last:", up.output.read_text())
        assert_gone(family)


def test_ctrl_c_while_its_modules_load_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise KeyboardInterrupt  # as the default handler of SIGINT does\n")
    kvtier = Path(sys.executable).with_name("kvtier")
    argv = (kvtier, "up", "examples/local.yaml", "--dry-run")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def test_ctrl_c_while_the_model_is_prepared_leaves_nothing_half_made(
    manifest: Callable[..., Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    argv = (Path(sys.executable).with_name("kvtier"), "up", manifest("local.yaml"), f"--state-dir={tmp_path / 'state'}")
    with subprocess.Popen(
        argv,
        env={**os.environ, "KVTIER_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as up:
        assert up.stdout
        assert "preparing" in up.stdout.readline()
        deadline = time.monotonic() + 60
        while not (cache.exists() and any(cache.iterdir())):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(up.pid, signal.SIGINT)  # as a terminal does
        rest, _ = up.communicate(timeout=60)
    assert (up.returncode, rest) == (0, "stopped while the model was being prepared\n")
    assert list(cache.iterdir()) == []


def test_when_it_is_killed_itself_nothing_is_left(manifest: Callable[..., Path], tmp_path: Path) -> None:
    with kvtier_up(manifest("local.yaml"), tmp_path) as up:
        up.wait_for("is ready\n")
        family = up.family()
        os.kill(up.process.pid, signal.SIGKILL)
        up.process.wait(10)
        _, left = psutil.wait_procs(list(family.values()), timeout=45)
        assert [name for name, child in family.items() if child in left] == []


def test_ctrl_c_while_the_engine_loads_leaves_nothing(manifest: Callable[..., Path], tmp_path: Path) -> None:
    with kvtier_up(manifest("local.yaml"), tmp_path) as up:
        up.wait_for("store-dram-0: ready")
        family = up.family()
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(60) == 0, up.output.read_text()
        assert_gone(family)


def test_a_second_cluster_on_the_same_ports_is_refused_by_name(manifest: Callable[..., Path], tmp_path: Path) -> None:
    file = manifest("local.yaml")
    other = tmp_path / "other"
    other.mkdir()
    with kvtier_up(file, tmp_path) as up:
        up.wait_for("master-0: ready")
        with kvtier_up(file, other) as second:
            assert second.process.wait(60) == 2
            assert re.search(r"port \d+ \(master-0, RPC\) is in use", second.output.read_text())
