"""`kvtier status` asks processes that answer as the real ones do."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from kvtier_operator.local.report import EngineReport, ProcessState, SegmentReport, StoreReport
from kvtier_operator.local.state import STATE_FILE, ClusterState, StateFile, read_state
from kvtier_operator.local.status import main, report_of
from kvtier_worker.testing.processes import free_port

LEADER = {
    "/health": '{"status":"ok","role":"leader","ha_state":"serving","service_ready":true}',
    "/metrics": """# HELP master_key_count Keys
# TYPE master_key_count gauge
master_key_count 5
segment_allocated_bytes{segment="127.0.1.5:28008"} 4096
segment_total_capacity_bytes{segment="127.0.1.5:28008"} 536870912
segment_total_capacity_bytes{segment="127.0.1.6:28019"} 536870912
""",
}
STANDBY = {"/health": '{"status":"ok","role":"standby","ha_state":"standby","service_ready":false}', "/metrics": ""}
ENGINE = {
    "/ready": "{}",
    "/metrics": """# TYPE requests_total counter
requests_total{outcome="finished"} 3.0
requests_total{outcome="failed"} 1.0
# TYPE prompt_tokens_total counter
prompt_tokens_total 1000.0
# TYPE prompt_tokens_cached_total counter
prompt_tokens_cached_total{tier="device"} 300.0
prompt_tokens_cached_total{tier="store"} 200.0
""",
}


@contextmanager
def serving(name: str, component: str, answers: Mapping[str, str], probe: str) -> Iterator[ProcessState]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(answers.get(self.path, "").encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as in the library
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield ProcessState(name, component, 7, 0, url, f"{url}{probe}", {})
        server.shutdown()
        thread.join()


def absent(name: str, component: str, *, pid: int = 7) -> ProcessState:
    url = f"http://127.0.0.1:{free_port()}"
    return ProcessState(name, component, pid, 0, url, f"{url}/health", {})


def cluster(*processes: ProcessState) -> ClusterState:
    return ClusterState("ha", pid=1, born=1, processes=processes)


def test_the_serving_master_tells_of_the_store_and_engines_of_their_hits() -> None:
    with (
        serving("master-0", "master", STANDBY, "/health") as standby,
        serving("master-1", "master", LEADER, "/health") as leader,
        serving("engine-0", "engine", ENGINE, "/ready") as engine,
    ):
        report = report_of(cluster(standby, leader, engine))
    assert [(one.ready, one.role, one.serving) for one in report.processes] == [
        (True, "standby", False),
        (True, "leader", True),
        (True, "", False),
    ]
    segments = (
        SegmentReport("127.0.1.5:28008", 536870912, 4096),
        SegmentReport("127.0.1.6:28019", 536870912, 0),
    )
    assert report.store == StoreReport(segments, 5)
    assert report.engines == (EngineReport("engine-0", 4, 1000, {"device": 300, "store": 200}),)
    assert report.complaints == ()


def test_who_does_not_answer_or_waits_for_its_restart_is_not_ready() -> None:
    report = report_of(cluster(absent("master-0", "master"), absent("engine-0", "engine", pid=0)))
    assert report.complaints == (
        "master-0 is not ready",
        "engine-0 is not ready",
        "no master serves: engines go on without the store",
    )
    assert (report.store, report.engines) == (None, ())


def test_metrics_that_make_no_sense_are_nothing_to_tell() -> None:
    answers = {"/ready": "", "/metrics": "{{{ no metrics"}
    with serving("engine-0", "engine", answers, "/ready") as engine:
        assert report_of(cluster(engine)).engines == ()


def test_it_finds_clusters_by_name_by_manifest_and_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving("engine-0", "engine", ENGINE, "/ready") as engine:
        for name in ("ha", "other"):
            (tmp_path / name).mkdir()
            StateFile(tmp_path / name, name).write([engine])
        # A file that its own process wrote counts as running.
        manifest = Path(__file__).parents[4] / "examples" / "ha.yaml"
        for target, found in (("ha", ["ha"]), (str(manifest), ["ha"]), ("", ["ha", "other"])):
            assert main([*([target] if target else []), f"--state-dir={tmp_path}", "--json"]) == 0
            assert [report["name"] for report in json.loads(capsys.readouterr().out)] == found


def test_something_that_is_not_ready_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    StateFile(tmp_path, "ha").write([absent("engine-0", "engine")])
    assert main(["ha", f"--state-dir={tmp_path.parent}"]) == 3
    (tmp_path / "ha").mkdir()
    StateFile(tmp_path / "ha", "ha").write([absent("engine-0", "engine")])
    assert main(["ha", f"--state-dir={tmp_path}"]) == 1
    assert capsys.readouterr().out.endswith("\nengine-0 is not ready\n")


def test_nothing_that_runs_is_exit_code_3_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--state-dir={tmp_path}"]) == 3
    assert "nothing runs" in (told := capsys.readouterr().err)
    assert "start one with `kvtier up FILE`" in told


def test_a_cluster_whose_supervisor_was_killed_is_told_from_one_that_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ha").mkdir()
    StateFile(tmp_path / "ha", "ha").write([])
    path = tmp_path / "ha" / STATE_FILE
    state = read_state(path)
    assert state is not None
    path.write_text(path.read_text().replace(f'"born": {state.born}', '"born": 1'))
    assert main([f"--state-dir={tmp_path}"]) == 3
    assert f"`kvtier up` of ha (pid {state.pid}) was killed" in capsys.readouterr().err


def test_a_damaged_file_and_a_bad_manifest_are_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ha").mkdir()
    (tmp_path / "ha" / STATE_FILE).write_text("{")
    assert main([f"--state-dir={tmp_path}"]) == 2
    assert STATE_FILE in capsys.readouterr().err
    assert main([str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_one_damaged_file_hides_no_other_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("broken", "ha"):
        (tmp_path / name).mkdir()
    StateFile(tmp_path / "ha", "ha").write([])
    (tmp_path / "broken" / STATE_FILE).write_text('{"cluster": "a", "pid": Infinity}')
    assert main([f"--state-dir={tmp_path}"]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("ha: kvtier up runs it")
    assert "broken" in told.err


def test_a_name_too_long_for_any_file_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x" * 5000, f"--state-dir={tmp_path}"]) == 2
    assert "kvtier status: " in capsys.readouterr().err
