"""Logs, data and state that the local runtime keeps in files."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from kvtier_operator.errors import MachineError
from kvtier_operator.local.state import STATE_FILE, StateFile, read_state
from kvtier_operator.local.supervisor import LocalCluster
from kvtier_operator.observed import Component
from kvtier_operator.testing.serving import SERVE, eventually, program


def test_a_folder_for_logs_that_cannot_be_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    cluster = LocalCluster([program("one", SERVE)], tmp_path / "logs", print)
    with pytest.raises(MachineError, match="logs"):
        cluster.start()
    assert cluster.pid("one") is None


def test_a_folder_for_data_is_empty_at_the_first_start_and_kept_at_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "data"
    source = f"import os; print(os.listdir({str(folder)!r})); open({str(folder / 'kept')!r}, 'w').close()\n" + SERVE
    spec = dataclasses.replace(program("first", source), data_dir=str(folder))
    for _ in range(2):
        with LocalCluster([spec], tmp_path / "logs", print) as cluster:
            cluster.restart("first")
            assert cluster.log_tail("first") == ("[]", "serving", "['kept']", "serving")


def test_the_state_file_follows_what_runs_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / STATE_FILE
    spec = dataclasses.replace(program("first", SERVE), component=Component.STORE, url="http://there")
    with LocalCluster([spec], tmp_path / "logs", print, state_file=StateFile(tmp_path, "demo")) as cluster:
        state = read_state(path)
        assert state is not None
        (first,) = state.processes
        assert (first.name, first.component, first.url, first.pid) == (
            "first",
            "store",
            "http://there",
            cluster.pid("first"),
        )
        cluster.stop_process("first")
        state = read_state(path)
        assert state is not None
        assert state.processes[0].pid == 0
    assert read_state(path) is None


def test_a_cluster_that_runs_already_is_not_started_again_over_its_own_files(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        from pathlib import Path
        from kvtier_operator.local.state import StateFile
        StateFile(Path({str(tmp_path)!r}), "demo").write([])
        print("written", flush=True)
        input()
        """
    )
    with subprocess.Popen(
        (sys.executable, "-c", script), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        other.stdout.readline()
        cluster = LocalCluster(
            [program("first", SERVE)], tmp_path / "logs", print, state_file=StateFile(tmp_path, "demo")
        )
        with pytest.raises(MachineError, match=f"runs already, by pid {other.pid}"):
            cluster.start()
        other.kill()
    assert (tmp_path / STATE_FILE).exists()


def test_of_two_that_start_at_one_moment_one_has_the_folder(tmp_path: Path) -> None:
    first, second = StateFile(tmp_path / "demo", "demo"), StateFile(tmp_path / "demo", "demo")
    first.claim()
    first.claim()
    cluster = LocalCluster([program("first", SERVE)], tmp_path / "demo" / "logs", print, state_file=second)
    with pytest.raises(MachineError, match="another `kvtier up` has"):
        cluster.start()
    first.remove()
    with cluster:
        assert cluster.pid("first")


def test_a_cluster_goes_on_without_the_folder_that_somebody_removed(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    state_file = StateFile(folder, "demo")
    said: list[str] = []
    with LocalCluster([program("first", SERVE)], folder / "logs", said.append, state_file=state_file) as cluster:
        shutil.rmtree(folder)
        assert cluster.log_tail("first") == ()
        first = cluster.pid("first")
        assert first
        os.kill(first, signal.SIGKILL)

        def comes_back() -> bool:
            for name, life in cluster._lives.items():
                cluster._keep_alive(name, life)
            return sum(line.startswith("first: ready") for line in said) > 1

        assert eventually(comes_back), said
        assert cluster.log_tail("first") == ("serving",)
        state = read_state(folder / STATE_FILE)
        assert state is not None
        assert (state.processes[0].pid, state.processes[0].restarts) == (cluster.pid("first"), 1)


def test_a_state_that_cannot_be_written_is_told_once_and_costs_nothing_else(tmp_path: Path) -> None:
    draft = (tmp_path / STATE_FILE).with_suffix(".new")
    draft.mkdir()
    (tmp_path / "logs" / "second.log").mkdir(parents=True)
    said: list[str] = []
    specs = [program("first", SERVE), program("second", SERVE)]
    cluster = LocalCluster(specs, tmp_path / "logs", said.append, state_file=StateFile(tmp_path, "demo"))
    with pytest.raises(MachineError, match=r"second\.log"):
        cluster.start()
    (tmp_path / "logs" / "second.log").rmdir()
    with cluster:
        cluster.restart("first")
    assert [line for line in said if "cannot be written" in line] == [
        f"{draft} cannot be written (Is a directory): `kvtier status` shows what was"
    ]
    assert [line for line in said if line.endswith("stopping")] == [
        "first: stopping",
        "second: stopping",
        "first: stopping",
    ]


def test_ports_of_a_cluster_that_runs_are_taken_even_where_nobody_listens_yet(tmp_path: Path) -> None:
    """A master that stands by listens on its RPC port only when it leads."""
    spec = program("first", SERVE)
    (port,) = spec.ports
    script = textwrap.dedent(
        f"""
        from pathlib import Path
        from kvtier_operator.local.report import ProcessState
        from kvtier_operator.local.state import StateFile
        standby = ProcessState("master-1", "master", 7, 0, "", "", {{{port}: "RPC"}})
        StateFile(Path({str(tmp_path / "other")!r}), "other").write([standby])
        print("written", flush=True)
        input()
        """
    )
    with subprocess.Popen(
        (sys.executable, "-c", script), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        other.stdout.readline()
        state_file = StateFile(tmp_path / "demo", "demo")
        cluster = LocalCluster([spec], tmp_path / "demo" / "logs", print, state_file=state_file)
        with pytest.raises(MachineError, match=rf"port {port} .* in use by cluster other \(pid {other.pid}\): stop"):
            cluster.start()
        other.kill()
    with cluster:
        assert cluster.pid("first")
