"""What ends by itself is started again, as a container is, until nothing helps."""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvtier_operator.errors import Interrupted, ProcessFailed
from kvtier_operator.local.console import StopRequest
from kvtier_operator.local.supervisor import LocalCluster
from kvtier_operator.resources.processes import ProcessSpec
from kvtier_operator.testing.serving import SERVE, eventually, pids, program

said: list[str] = []


@pytest.fixture(autouse=True)
def _fresh_words() -> None:
    said.clear()


class Watched:
    """A cluster that is started and watched by a thread of its own, which makes its processes, until `stop`."""

    def __init__(self, cluster: LocalCluster, stop_request: StopRequest) -> None:
        self.cluster = cluster
        self._stop_request = stop_request
        self._ended: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self.cluster:
                self.cluster.watch()
        except (ProcessFailed, Interrupted) as error:
            self._ended.append(error)

    def end(self, timeout_s: float = 20) -> BaseException | None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), said
        return self._ended[0] if self._ended else None

    def stop(self) -> BaseException | None:
        self._stop_request.ask()
        return self.end()


@contextmanager
def watched(tmp_path: Path, *programs: ProcessSpec, restart_delays_s: Sequence[float] = (0, 1)) -> Iterator[Watched]:
    stop_request = StopRequest()
    cluster = LocalCluster(programs, tmp_path / "logs", said.append, stop_request, restart_delays_s=restart_delays_s)
    running = Watched(cluster, stop_request)
    try:
        yield running
    finally:
        running.stop()


def said_ready(name: str, times: int) -> Callable[[], bool]:
    return lambda: len([line for line in said if line.startswith(f"{name}: ready")]) >= times


def test_one_that_dies_later_is_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    with watched(tmp_path, program("first", SERVE), program("second", SERVE)) as running:
        assert eventually(said_ready("second", 1))
        first, second = running.cluster.pid("first"), running.cluster.pid("second")
        assert first
        os.kill(first, signal.SIGKILL)
        assert eventually(said_ready("first", 2)), said
        assert running.cluster.pid("first") not in {first, None}
        assert running.cluster.pid("second") == second
        assert (running.cluster.restarts("first"), running.cluster.restarts("second")) == (1, 0)
        assert running.stop() is None
    (line,) = (line for line in said if "was killed" in line)
    assert line == f"first: was killed by SIGKILL; starting it again (log: {tmp_path}/logs/first.log)"


def test_one_that_dies_again_and_again_ends_everything_with_its_last_words(tmp_path: Path) -> None:
    """Its first start works; what it needs is gone afterwards."""
    file = tmp_path / "needed"
    file.touch()
    source = f"import pathlib; print('looking'); assert pathlib.Path({str(file)!r}).exists(), 'not there'\n" + SERVE
    with watched(tmp_path, program("first", SERVE), program("second", source)) as running:
        assert eventually(said_ready("second", 1))
        file.unlink()
        second = running.cluster.pid("second")
        assert second
        os.kill(second, signal.SIGKILL)
        failure = running.end()
    assert isinstance(failure, ProcessFailed)
    assert str(failure) == "second ended with exit status 1, failure 3 in a row"
    assert failure.log_tail[-1] == "AssertionError: not there"
    waits = [line.split("again")[1].split(" (")[0] for line in said if "starting it again" in line]
    assert waits == ["", " in 1 s"]
    assert pids(running.cluster) == []


def test_one_that_is_to_stay_away_for_a_while_does(tmp_path: Path) -> None:
    spec = dataclasses.replace(program("first", SERVE), restart_pause_s=2)
    with watched(tmp_path, spec) as running:
        assert eventually(said_ready("first", 1))
        first = running.cluster.pid("first")
        assert first
        killed_at = time.monotonic()
        os.kill(first, signal.SIGKILL)
        assert eventually(said_ready("first", 2)), said
        assert time.monotonic() - killed_at >= 2
    assert any("again in 2 s" in line for line in said)


def test_a_stop_while_one_waits_for_its_restart_stops_the_others(tmp_path: Path) -> None:
    file = tmp_path / "needed"
    file.touch()
    source = f"import pathlib; assert pathlib.Path({str(file)!r}).exists()\n" + SERVE
    with watched(tmp_path, program("first", SERVE), program("second", source)) as running:
        assert eventually(said_ready("second", 1))
        file.unlink()
        second = running.cluster.pid("second")
        assert second
        os.kill(second, signal.SIGKILL)
        assert eventually(lambda: any("again in 1 s" in line for line in said))
        assert running.stop() is None
    assert "first: stopping" in said
    assert pids(running.cluster) == []
