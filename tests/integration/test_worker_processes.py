"""Real worker processes over real sockets; the model is arithmetic, so that no torch slows the tests down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from kvtier_worker.adapters.zmq_workers import Launch, ZmqWorkerGroup
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import BlockId, HostSlot
from kvtier_worker.core.plans import RestoreItem, WritebackItem
from kvtier_worker.engine.messages import (
    Forward,
    ForwardDone,
    FromWorker,
    RegisterRestore,
    RestoreRegistered,
    SequenceStep,
    StatsRequest,
    WorkerStats,
    Writeback,
    WritebackStored,
)
from kvtier_worker.errors import ConfigError, ProtocolError, WorkerDied
from kvtier_worker.testing.blocks import block_hash
from kvtier_worker.testing.tiny_worker import next_token

COMMAND = (sys.executable, "-m", "kvtier_worker.testing.tiny_worker")
PROMPT = [5, 6, 7, 8, 9]


def settings(tricks: str = "", tp_size: int = 1) -> WorkerSettings:
    return WorkerSettings(model=tricks, tp_size=tp_size, block_size=4, api_key="secret")


@contextmanager
def running(
    tricks: str = "", tp_size: int = 1, progress: Callable[[str], None] = lambda _: None
) -> Iterator[ZmqWorkerGroup]:
    group = ZmqWorkerGroup.start(settings(tricks, tp_size), Launch(os.environ, COMMAND, progress))
    try:
        yield group
    finally:
        group.close(5)


def collect(
    group: ZmqWorkerGroup, kind: type[FromWorker], count: int, others: list[FromWorker] | None = None
) -> list[FromWorker]:
    """Answers of a kind; what else comes is kept in ``others``, and looked for there."""
    others = others if others is not None else []
    deadline = time.monotonic() + 20
    while len(found := [message for message in others if isinstance(message, kind)]) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} {kind.__name__}"
        others += group.poll(1.0)
    return found


def forward(batch: int, tokens: list[int], start: int, table: list[int], *, has_restore: bool = False) -> Forward:
    return Forward(batch, has_restore, [SequenceStep("r", tokens, start, table, sample=True)])


def test_ranks_start_serve_and_leave_nothing_behind() -> None:
    lines: list[str] = []
    kept: list[FromWorker] = []
    with running(tp_size=2, progress=lines.append) as group:
        assert [ready.rank for ready in group.ready] == [0, 1]
        pids = group.pids
        group.send(forward(1, PROMPT, 0, [1, 2]))
        group.send(Writeback(1, [WritebackItem(BlockId(1), HostSlot(3), block_hash(1))]))
        answers = collect(group, ForwardDone, 2, kept)
        assert {answer.rank for answer in answers} == {0, 1}
        assert [
            output.token_id for answer in answers if isinstance(answer, ForwardDone) for output in answer.outputs
        ] == [next_token(PROMPT)], "only rank 0 answers with tokens"
        collect(group, WritebackStored, 2, kept)
        group.send(RegisterRestore(2, [RestoreItem(HostSlot(3), BlockId(7))]))
        assert len(collect(group, RestoreRegistered, 2)) == 2
        group.send(forward(2, PROMPT[4:], 4, [7, 8], has_restore=True))
        restored = [answer for answer in collect(group, ForwardDone, 2) if isinstance(answer, ForwardDone)]
        assert [output.token_id for answer in restored for output in answer.outputs] == [next_token(PROMPT)]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert "rank 0: loading arithmetic" in lines
    assert lines.count("rank 1: ready") == 1


def test_a_killed_worker_is_named_with_its_signal() -> None:
    with running(tp_size=2) as group:
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"rank 1 \(pid \d+\) died: signal SIGKILL"):
            collect(group, ForwardDone, 1)
        with pytest.raises(WorkerDied, match="rank 1"):
            group.send(StatsRequest(1))


def test_what_a_worker_said_before_it_died_is_delivered_first() -> None:
    with running() as group:
        group.send(forward(1, PROMPT, 0, [1, 2]))
        answered = psutil.Process(group.pids[0])
        deadline = time.monotonic() + 20
        while not group._answers.poll(10):
            assert time.monotonic() < deadline
        answered.kill()
        answered.wait(10)
        assert isinstance(group.poll(1.0)[0], ForwardDone)
        with pytest.raises(WorkerDied):
            group.poll(1.0)


def test_a_death_ends_a_long_poll_at_once() -> None:
    with running() as group:
        started = time.monotonic()
        threading.Timer(0.2, os.kill, (group.pids[0], signal.SIGKILL)).start()
        with pytest.raises(WorkerDied):
            group.poll(60.0)
        assert time.monotonic() - started < 30


def test_wake_ends_a_long_poll() -> None:
    with running() as group:
        threading.Timer(0.1, group.wake).start()
        started = time.monotonic()
        assert group.poll(60.0) == []
        assert time.monotonic() - started < 30


def test_a_wake_before_the_poll_is_not_lost() -> None:
    with running() as group:
        group.wake()
        started = time.monotonic()
        group.poll(60.0)
        assert time.monotonic() - started < 30


def test_refused_settings_come_back_once_for_all_ranks() -> None:
    with pytest.raises(ConfigError) as caught, running("refuse", tp_size=2):
        pass
    assert caught.value.violations == ("--model=refuse: not this one; use another",)


def test_a_worker_that_dies_before_it_is_ready_is_named() -> None:
    with pytest.raises(WorkerDied, match=r"rank 0 .* exit status 7"), running("crash"):
        pass


def test_a_worker_of_another_version_is_refused() -> None:
    with pytest.raises(ProtocolError, match="version 0"), running("old-protocol"):
        pass


def test_giving_up_during_the_start_leaves_no_process(tmp_path: Path) -> None:
    def give_up(_: str) -> None:
        raise KeyboardInterrupt

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(KeyboardInterrupt), running(progress=give_up):
        pass
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_worker_that_does_not_obey_is_ended_all_the_same() -> None:
    group = ZmqWorkerGroup.start(settings("deaf"), Launch(os.environ, COMMAND))
    pid = group.pids[0]
    group.close(0.3)
    assert not psutil.pid_exists(pid)
    group.close(0.3)


def test_a_worker_ends_when_its_engine_is_killed() -> None:
    engine = textwrap.dedent(
        f"""
        import os, time
        from kvtier_worker.adapters.zmq_workers import Launch, ZmqWorkerGroup
        from kvtier_worker.contract import WorkerSettings
        group = ZmqWorkerGroup.start(WorkerSettings(block_size=4), Launch(os.environ, {COMMAND!r}))
        print(group.pids[0], flush=True)
        time.sleep(600)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", engine], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()
    worker.wait(10)


def test_secrets_stay_in_the_engine() -> None:
    with running() as group:
        worker = psutil.Process(group.pids[0])
        assert "secret" not in " ".join(worker.cmdline())
        assert "KVTIER_API_KEY" not in worker.environ()
        assert worker.environ()["GOMP_SPINCOUNT"] == "10000"
        group.send(StatsRequest(1))
        assert len(collect(group, WorkerStats, 1)) == 1


def test_the_engine_process_does_not_import_torch() -> None:
    code = (
        "import sys, kvtier_worker.adapters.zmq_workers, kvtier_worker.engine.worker_runtime;"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
