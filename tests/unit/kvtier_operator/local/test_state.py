"""The file that tells `kvtier status` what runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvtier_operator.errors import MachineError
from kvtier_operator.local.report import ProcessState
from kvtier_operator.local.state import STATE_FILE, StateFile, read_state

MASTER = ProcessState("master-0", "master", 17, 2, "http://127.0.1.1:1", "http://127.0.1.1:1/health", {1: "admin"})


def test_what_was_written_is_read_again_and_its_writer_is_known_to_run(tmp_path: Path) -> None:
    StateFile(tmp_path, "demo").write([MASTER])
    state = read_state(tmp_path / STATE_FILE)
    assert state is not None
    assert (state.cluster, state.pid, state.processes) == ("demo", os.getpid(), (MASTER,))
    assert state.runs


def test_no_file_is_no_cluster(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "demo")
    assert read_state(tmp_path / STATE_FILE) is None
    assert file.holder() == 0
    file.remove()


def test_the_pid_of_a_later_process_is_not_taken_for_the_writer(tmp_path: Path) -> None:
    StateFile(tmp_path, "demo").write([])
    path = tmp_path / STATE_FILE
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "born": fields["born"] - 1}))
    state = read_state(path)
    assert state is not None
    assert not state.runs


def test_a_folder_is_held_by_another_process_only_while_that_one_lives(tmp_path: Path) -> None:
    source = f"""
from pathlib import Path
from kvtier_operator.local.state import StateFile
StateFile(Path({str(tmp_path)!r}), "demo").write([])
print("written", flush=True)
input()
"""
    file = StateFile(tmp_path, "demo")
    with subprocess.Popen(
        (sys.executable, "-c", source), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "written\n"
        assert file.holder() == other.pid
        other.kill()
    assert file.holder() == 0


def test_our_own_file_holds_nothing_up(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "demo")
    file.write([])
    assert file.holder() == 0
    file.remove()
    assert read_state(tmp_path / STATE_FILE) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cluster": "a", "pid": 1, "born": 1, "processes": [1]}', "\udcff"])
def test_a_damaged_file_is_named_and_holds_nobody_up(tmp_path: Path, text: str) -> None:
    path = tmp_path / STATE_FILE
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(MachineError, match=STATE_FILE):
        read_state(path)
    assert StateFile(tmp_path, "demo").holder() == 0
