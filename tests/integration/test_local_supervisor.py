"""The supervisor against small real programs: what they do wrong, it must survive and leave nothing behind."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from kvtier_operator.errors import Interrupted, MachineError, ProcessFailed
from kvtier_operator.local.console import StopRequest
from kvtier_operator.local.supervisor import LocalCluster
from kvtier_operator.resources.processes import HttpProbe, ProcessSpec, TcpProbe
from kvtier_operator.testing.serving import SERVE, eventually, pids, program
from kvtier_worker.testing.processes import free_port

SERVE_STUBBORNLY = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE

SERVE_WITH_WORKER = (
    """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]).pid, flush=True)
"""
    + SERVE
)

SERVE_NOT_READY = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"reason": "weights to load", "service_ready": False}).encode()
        self.send_response(200 if "--status-200" in sys.argv else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

DIE_AFTER_WORDS = "import sys; print('line one'); print('no such device'); sys.exit(3)"


def local(tmp_path: Path, *programs: ProcessSpec, stop_request: StopRequest | None = None) -> LocalCluster:
    return LocalCluster(programs, tmp_path / "logs", said.append, stop_request)


def local_until(tmp_path: Path, words: str, *programs: ProcessSpec) -> LocalCluster:
    """A cluster whose user asks to stop when it says these words."""
    stop_request = StopRequest()

    def say(line: str) -> None:
        if words in line:
            stop_request.ask()

    return LocalCluster(programs, tmp_path / "logs", say, stop_request)


SIGNALLED_AT_ALL_TIMES = """
import random, signal, time
from kvtier_operator.local.console import StopRequest
signal.signal(signal.SIGALRM, lambda number, frame: request.ask())
for _ in range(4000):
    request = StopRequest()
    signal.setitimer(signal.ITIMER_REAL, random.random() * 3e-4 + 1e-6)
    while not request.wait(5e-5):
        pass
"""


said: list[str] = []


@pytest.fixture(autouse=True)
def _fresh_words() -> None:
    said.clear()


def alive(pid: int) -> bool:
    """A process that runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_processes_start_in_order_and_stop_in_reverse(tmp_path: Path) -> None:
    with local(tmp_path, program("first", SERVE), program("second", SERVE)) as cluster:
        running = pids(cluster)
        assert len(running) == 2
        cluster.check()
        assert cluster.log_tail("first") == ("serving",)
    events = [line.split(" after")[0] for line in said if "waiting" not in line]
    assert events == ["first: ready", "second: ready", "second: stopping", "first: stopping"]
    assert not any(map(alive, running))


def test_a_process_gets_its_own_environment_beside_the_inherited_one(tmp_path: Path) -> None:
    source = "import os; print(os.environ['KVTIER_TEST_PROGRAM'], 'PATH' in os.environ, flush=True)\n" + SERVE
    with local(tmp_path, program("first", source)) as cluster:
        assert cluster.log_tail("first")[0] == "first True"


def test_one_that_dies_at_start_is_named_with_its_status_and_last_words_and_the_others_stop(tmp_path: Path) -> None:
    cluster = local(tmp_path, program("first", SERVE), program("second", DIE_AFTER_WORDS))
    with pytest.raises(ProcessFailed, match="second ended with exit status 3") as caught:
        cluster.start()
    assert caught.value.log_tail == ("line one", "no such device")
    assert pids(cluster) == []
    assert "first: stopping" in said


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    missing = ProcessSpec("first", ("no-such-program",), {}, (TcpProbe(free_port()),), {}, 5, 5)
    with pytest.raises(ProcessFailed, match="exit status 1") as caught:
        local(tmp_path, missing).start()
    assert caught.value.log_tail == ("cannot run no-such-program: No such file or directory",)


def test_one_that_is_never_ready_says_what_it_waits_for(tmp_path: Path) -> None:
    never = program("first", "import signal; signal.pause()", start_timeout_s=0.3)
    cluster = local(tmp_path, never)
    with pytest.raises(ProcessFailed, match=r"was not ready after 0 s: waiting for port \d+ to open"):
        cluster.start()
    assert pids(cluster) == []


@pytest.mark.parametrize("options", [(), ("--status-200",)])
def test_ready_is_what_the_answer_says_and_not_that_it_answers(tmp_path: Path, options: tuple[str, ...]) -> None:
    base = program("first", SERVE_NOT_READY)
    port = next(iter(base.ports))
    probe = HttpProbe(f"http://127.0.0.1:{port}/ready", {"service_ready": True})
    spec = ProcessSpec("first", (*base.argv, *options), {}, (probe,), base.ports, 20, 5)
    with pytest.raises(Interrupted):
        local_until(tmp_path, "first: weights to load", spec).start()


def test_one_that_ignores_sigterm_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    with local(tmp_path, program("first", SERVE_STUBBORNLY, stop_timeout_s=0.3)) as cluster:
        (running,) = pids(cluster)
    assert not alive(running)
    assert "first: did not stop in 0 s, killed" in said


def test_insisting_kills_at_once(tmp_path: Path) -> None:
    stop_request = StopRequest()
    with local(tmp_path, program("first", SERVE_STUBBORNLY, stop_timeout_s=60), stop_request=stop_request) as cluster:
        (running,) = pids(cluster)
        stop_request.ask()
        stop_request.ask()
        started = time.monotonic()
    assert not alive(running)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_process_leaves_behind_is_killed_with_it(tmp_path: Path, end: signal.Signals) -> None:
    with local(tmp_path, program("first", SERVE_WITH_WORKER)) as cluster:
        (leader,) = pids(cluster)
        worker = int(cluster.log_tail("first")[0])
        assert alive(worker)
        os.kill(leader, end)
        assert eventually(lambda: not alive(leader))
    assert eventually(lambda: not alive(worker))


def test_one_that_dies_while_another_starts_is_noticed(tmp_path: Path) -> None:
    brief = "import threading, os; threading.Timer(0.5, os._exit, (7,)).start()\n" + SERVE
    never = program("second", "import signal; signal.pause()")
    with pytest.raises(ProcessFailed, match="first ended with exit status 7"):
        local(tmp_path, program("first", brief), never).start()


def test_asking_to_stop_while_it_starts_stops_what_runs(tmp_path: Path) -> None:
    never = program("second", "import signal; signal.pause()")
    cluster = local_until(tmp_path, "first: ready", program("first", SERVE), never)
    with pytest.raises(Interrupted, match="second was starting"):
        cluster.start()
    assert pids(cluster) == []


def test_watching_ends_when_asked_to_stop(tmp_path: Path) -> None:
    stop_request = StopRequest()
    with local(tmp_path, program("first", SERVE), stop_request=stop_request) as cluster:
        stop_request.ask()
        cluster.watch()


def test_busy_ports_are_all_named_before_anything_starts(tmp_path: Path) -> None:
    first, second = program("first", SERVE), program("second", SERVE)
    held = [next(iter(first.ports)), next(iter(second.ports))]
    with (
        socket.create_server(("127.0.0.1", held[0])),
        socket.create_server(("0.0.0.0", held[1])),
        pytest.raises(MachineError) as caught,
    ):
        local(tmp_path, first, second).start()
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        f"port {held[0]} (first, service) is in use",
        f"port {held[1]} (second, service) is in use",
    ]
    assert not said


def test_a_restart_gives_a_new_process_and_keeps_the_log(tmp_path: Path) -> None:
    with local(tmp_path, program("first", SERVE)) as cluster:
        before = cluster.pid("first")
        cluster.restart("first")
        assert cluster.pid("first") not in {before, None}
        assert cluster.log_tail("first") == ("serving", "serving")
        cluster.stop_process("first")
        assert cluster.pid("first") is None
        cluster.check()
        cluster.start_process("first")


def test_when_the_supervisor_is_killed_the_kernel_ends_its_processes(tmp_path: Path) -> None:
    spec = program("first", SERVE)
    driver = textwrap.dedent(
        f"""
        from pathlib import Path
        from kvtier_operator.resources.processes import ProcessSpec, TcpProbe
        from kvtier_operator.local.supervisor import LocalCluster
        spec = {spec!r}
        cluster = LocalCluster((spec,), Path({str(tmp_path)!r}), lambda line: None)
        cluster.start()
        print(cluster.pid("first"), flush=True)
        cluster.watch()
        """
    )
    with subprocess.Popen((sys.executable, "-c", driver), stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout
        running = int(supervisor.stdout.readline())
        assert alive(running)
        supervisor.kill()
    assert eventually(lambda: not alive(running))


def test_a_signal_may_come_at_any_moment_of_the_wait_for_it() -> None:
    subprocess.run((sys.executable, "-c", SIGNALLED_AT_ALL_TIMES), timeout=60, check=True)


def test_those_of_a_batch_start_together_because_each_needs_the_others(tmp_path: Path) -> None:
    one, other = program("one", SERVE), program("other", SERVE)
    both = (*one.probes, *other.probes)
    batch = [dataclasses.replace(spec, probes=both, batch="quorum") for spec in (one, other)]
    with local(tmp_path, *batch, program("last", SERVE)) as cluster:
        assert len(pids(cluster)) == 3
    assert [line.split(":")[0] for line in said if "ready after" in line] == ["one", "other", "last"]
