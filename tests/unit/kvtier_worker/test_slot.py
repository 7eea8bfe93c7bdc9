"""A pod becomes the program of its slot, or says everything that keeps it from doing so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvtier_worker.errors import ConfigError
from kvtier_worker.machine.ports import port_is_free
from kvtier_worker.slot import SlotCommand, check_ports, main, read_command
from kvtier_worker.testing.processes import free_port

ENVIRONMENT = {"KVTIER_SLOT": "2"}


def slot(folder: Path, *, env: str = "", flags: str = "", ports: str = "", number: int = 2) -> None:
    for kind, text in (("env", env), ("flags", flags), ("ports", ports)):
        (folder / f"slot-{number}.{kind}").write_text(text)


def wrongs(*words: str, env: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_command(words, ENVIRONMENT if env is None else env)
    return caught.value.violations


def test_the_slots_flags_follow_the_arguments_and_its_variables_and_ports_are_read(tmp_path: Path) -> None:
    slot(tmp_path, env="A=1\n\n# a comment\nB=x=y \n", flags="--port=1\n--name=a b\n", ports="100-102\n7-7\n")
    slot(tmp_path, flags="--port=9", number=1)
    command = read_command([f"--dir={tmp_path}", "--", "program", "--shared=1"], ENVIRONMENT)
    assert command == SlotCommand(
        ("program", "--shared=1", "--port=1", "--name=a b"), {"A": "1", "B": "x=y"}, (100, 101, 102, 7)
    )


def test_a_slot_may_lack_some_files_but_not_all(tmp_path: Path) -> None:
    (tmp_path / "slot-2.flags").write_text("--only")
    command = read_command([f"--dir={tmp_path}", "--", "program"], ENVIRONMENT)
    assert command == SlotCommand(("program", "--only"), {}, ())
    (message,) = wrongs(f"--dir={tmp_path}", "--", "program", env={"KVTIER_SLOT": "3"})
    assert "no file of slot 3" in message


def test_everything_wrong_with_the_arguments_is_said_at_once() -> None:
    messages = wrongs("--dri=x", env={})
    assert [message.split(":")[0] for message in messages] == [
        "--dri=x",
        "--dir is missing",
        "no program",
        "KVTIER_SLOT=",
    ]


def test_everything_wrong_with_the_files_is_said_at_once(tmp_path: Path) -> None:
    slot(tmp_path, env="1A=2\nB\n", ports="5\n9-8\n0-3\n70000-70001\n")
    messages = wrongs(f"--dir={tmp_path}", "--", "program")
    assert [message.split(": ")[1] for message in messages] == ["5", "9-8", "0-3", "70000-70001", "1A=2", "B"]
    assert all(str(tmp_path) in message for message in messages)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "slot-2.flags").write_bytes(b"\xff")
    (message,) = wrongs(f"--dir={tmp_path}", "--", "program")
    assert "slot-2.flags cannot be read" in message


def test_every_busy_port_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("0.0.0.0", 0)) as other:
        ports = [held.getsockname()[1] for held in (one, other)]
        with pytest.raises(ConfigError) as caught:
            check_ports([ports[0], free_port(), ports[1]])
    assert [message.rpartition(" (")[0] for message in caught.value.violations] == [
        f"PortBusy: {port} held by pid {os.getpid()}" for port in ports
    ]


def test_connections_that_a_former_process_left_behind_do_not_take_a_port() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        with pytest.raises(ConfigError, match=f"PortBusy: {port} "):
            check_ports([port])
        listener.accept()[0].close()  # who closes first keeps the port in TIME_WAIT
        client.close()
    deadline = time.monotonic() + 20.0
    while not port_is_free(port):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    check_ports([port])


def test_it_becomes_the_program_with_its_pid_and_signals(tmp_path: Path) -> None:
    slot(tmp_path, env="GREETING=hello\n", flags="--last", ports=f"{(port := free_port())}-{port}")
    source = "import os, sys; print(os.getpid(), os.environ['GREETING'], os.environ['KVTIER_SLOT'], *sys.argv[1:])"
    argv = (
        sys.executable,
        "-m",
        "kvtier_worker.slot",
        f"--dir={tmp_path}",
        "--",
        sys.executable,
        "-c",
        source,
        "--first",
    )
    with subprocess.Popen(argv, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=30)
    assert out.split() == [str(process.pid), "hello", "2", "--first", "--last"]


def test_a_program_that_does_not_exist_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_SLOT", "2")
    slot(tmp_path)
    assert main([f"--dir={tmp_path}", "--", "no-such-program"]) == 2
    assert capsys.readouterr().err == "kvtier slot: cannot run no-such-program: No such file or directory\n"


def test_it_exits_2_with_a_line_for_each_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.count("kvtier slot: ") >= 2
    assert main(["--help"]) == 0
    assert "slot-N.ports" in capsys.readouterr().out
