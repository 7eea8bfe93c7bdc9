"""`kvtier` finds its commands, and says what to type otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint

import pytest
from kvtier_worker import cli

CALLS: list[Sequence[str]] = []


def record_call(argv: Sequence[str]) -> int:
    """Stands for a command."""
    CALLS.append(tuple(argv))
    return 7


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    entries = [
        EntryPoint("engine", f"{__name__}:record_call", cli.COMMAND_GROUP),
        EntryPoint("extra", f"{__name__}:record_call", cli.COMMAND_GROUP),
        EntryPoint("store", "no_such_module_of_ours:main", cli.COMMAND_GROUP),
    ]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries)


def test_a_command_gets_the_rest_of_the_line_and_gives_the_exit_code() -> None:
    assert cli.main(["engine", "--port=1", "x"]) == 7
    assert CALLS == [("--port=1", "x")]


def test_xllm_is_the_engine() -> None:
    assert cli.xllm(["--port=1"]) == 7
    assert CALLS == [("--port=1",)]


def test_help_has_a_line_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "  engine    Serve a model" in out
    assert "\n  extra\n" in out
    assert "operator" not in out


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: kvtier COMMAND" in capsys.readouterr().out


def test_ctrl_c_before_a_command_minds_signals_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(globals(), "record_call", interrupted)
    assert cli.main(["engine"]) == 130


def test_an_unknown_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engin"]) == 2
    assert "did you mean `kvtier engine`?" in capsys.readouterr().err
    assert cli.main(["zzz"]) == 2
    assert "`kvtier --help` lists the commands" in capsys.readouterr().err


def test_a_command_whose_package_is_missing_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store"]) == 2
    assert "pip install 'kvtier[worker]'" in capsys.readouterr().err


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvtier ")
