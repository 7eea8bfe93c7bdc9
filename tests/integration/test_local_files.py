"""Logs, data and state that the local runtime keeps in files."""

import dataclasses
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from kvtier_operator.errors import MachineError
from kvtier_operator.local.state import STATE_FILE, StateFile, read_state
from kvtier_operator.local.supervisor import LocalCluster
from kvtier_operator.observed import Component
from kvtier_operator.testing.serving import SERVE, program


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
