"""``kvtier up examples/ha.yaml`` with everything real: the leader dies while prompts run, and nobody notices."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from kvtier_operator.local.report import ProcessReport
from kvtier_operator.local.state import STATE_FILE, read_state
from kvtier_operator.local.status import report_of
from kvtier_operator.manifest import load
from kvtier_operator.testing.serving import eventually

pytestmark = [
    pytest.mark.mooncake,
    pytest.mark.model,
    pytest.mark.etcd,
    pytest.mark.slow,
    pytest.mark.timeout(240),
]

START_TIMEOUT_S = 120
KVTIER = str(Path(sys.executable).with_name("kvtier"))
PROMPTS = [
    " ".join(
        f"On day {day} of voyage {voyage} the crew of {40 + voyage} counted {day * voyage} gulls." for day in range(9)
    )
    for voyage in range(1, 4)
]
KEPT = "Nobody asks about the lighthouse while the leaders change. " * 9


class Up:
    """A running ``kvtier up`` and its first engine."""

    def __init__(self, process: subprocess.Popen[str], output: Path, state_dir: Path, url: str) -> None:
        self.process = process
        self.output = output
        self.state_dir = state_dir
        self.url = url

    def wait_for(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> str:
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.output.read_text())):
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)
        return found[0]

    def status(self, *options: str) -> subprocess.CompletedProcess[str]:
        argv = (KVTIER, "status", "ha", f"--state-dir={self.state_dir}", *options)
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    def good_status(self, *options: str) -> str:
        """What it prints when everything is ready: a busy etcd may be late with an answer now and then."""
        deadline = time.monotonic() + 40
        while (told := self.status(*options)).returncode != 0:
            assert time.monotonic() < deadline, told.stdout + told.stderr
        return told.stdout

    def processes(self) -> dict[str, ProcessReport]:
        state = read_state(self.state_dir / "ha" / STATE_FILE)
        assert state is not None, self.output.read_text()
        return {process.state.name: process for process in report_of(state).processes}

    def eventually(self, condition: Callable[[dict[str, ProcessReport]], bool], timeout_s: float = 100) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition(processes := self.processes()):
            assert time.monotonic() < deadline, processes
            time.sleep(0.2)

    def complete(self, prompt: str) -> Any:
        body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        response = httpx.post(f"{self.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def complete_without_local_tiers(self, prompt: str) -> Any:
        self.drop_local_tiers()
        return self.complete(prompt)

    def drop_local_tiers(self) -> None:
        httpx.post(f"{self.url}/admin/cache/drop", json={"tiers": ["device", "host"]}, timeout=30).raise_for_status()

    def wait_until_stored(self, prompt: str) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            held = httpx.post(f"{self.url}/admin/cache/probe", json={"prompt": prompt}, timeout=30).json()
            if held["store"]["blocks"] >= held["full_blocks"] > 0:
                return
            time.sleep(0.1)
        raise AssertionError(held)


def tokens(answer: Any) -> tuple[int, ...]:
    return tuple(answer["choices"][0]["token_ids"])


def from_store(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["kvtier"]["store"])


class PromptLoop:
    """Asks one prompt after the other and compares every answer with the one from before."""

    def __init__(self, up: Up, right: Sequence[tuple[int, ...]]) -> None:
        self.answers = 0
        self.faults: list[str] = []
        self._up = up
        self._right = right
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)

    def _run(self) -> None:
        for index in itertools.cycle(range(len(PROMPTS))):
            if self._stopping.is_set():
                return
            try:
                answer = tokens(self._up.complete_without_local_tiers(PROMPTS[index]))
            except Exception as error:  # noqa: BLE001 - whatever a client sees is a lost answer
                self.faults.append(repr(error))
                continue
            self.answers += 1
            if answer != self._right[index]:
                self.faults.append(f"{answer} instead of {self._right[index]}")


@contextmanager
def kvtier_up(file: Path, tmp_path: Path) -> Iterator[Up]:
    output, state_dir = tmp_path / "output", tmp_path / "state"
    with output.open("w") as out:
        process = subprocess.Popen(
            (KVTIER, "up", file, f"--state-dir={state_dir}"), stdout=out, stderr=subprocess.STDOUT, text=True
        )
    try:
        yield Up(process, output, state_dir, f"http://127.0.0.1:{load(file).roles[0].port}")
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def leader(processes: dict[str, ProcessReport]) -> str:
    names = [name for name, process in processes.items() if process.serving]
    return names[0] if len(names) == 1 else ""


def test_the_leader_dies_while_prompts_run_and_no_answer_is_wrong_or_lost(
    manifest: Callable[..., Path], tmp_path: Path
) -> None:
    with kvtier_up(manifest("ha.yaml"), tmp_path) as up:
        up.wait_for("is ready\n")
        right = [tokens(up.complete(prompt)) for prompt in PROMPTS]
        up.complete(KEPT)
        for prompt in (*PROMPTS, KEPT):
            up.wait_until_stored(prompt)
        up.eventually(lambda now: bool(leader(now)) and sum(one.role == "standby" for one in now.values()) == 2)
        before = up.processes()
        killed = leader(before)

        with PromptLoop(up, right) as loop:
            os.kill(before[killed].state.pid, signal.SIGKILL)
            up.eventually(lambda now: leader(now) not in {"", killed})
            up.eventually(lambda now: now[killed].ready and now[killed].role == "standby")
            answered = loop.answers
            assert eventually(lambda: loop.answers >= answered + len(PROMPTS), 40)
        assert loop.faults == []
        after = up.processes()
        assert after[killed].state.restarts == 1

        # The log in etcd kept every object: the new leader finds what was stored under the old one and never since. For
        # a moment the engine may still believe that it has no store.
        up.wait_until_stored(KEPT)
        assert eventually(lambda: from_store(up.complete_without_local_tiers(KEPT)) > 0, 40)

        (told,) = json.loads(up.good_status("--json"))
        (leads,) = [one["state"]["name"] for one in told["processes"] if one["serving"]]
        assert leads != killed
        table = up.good_status()
        assert re.search(rf"^{leads} +yes .* leader, serving$", table, re.MULTILINE)
        assert "store: 2 segments" in table
        assert re.search(r"^engine-0 +\d+ ", table, re.MULTILINE)

        # Storage nodes and engines come back, too.
        os.kill(after["store-dram-1"].state.pid, signal.SIGKILL)
        os.kill(after["engine-0"].state.pid, signal.SIGKILL)
        up.eventually(lambda now: now["store-dram-1"].ready and now["engine-0"].ready)
        assert [tokens(up.complete(prompt)) for prompt in PROMPTS] == right
        for name in (killed, "store-dram-1", "engine-0"):
            assert f"{name}: was killed by SIGKILL; starting it again" in up.output.read_text()

        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(60) == 0, up.output.read_text()
        assert "did not stop" not in up.output.read_text()
        gone = up.status()
        assert gone.returncode == 3
        assert "ha does not run" in gone.stderr
