from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from kvtier_worker.errors import ConfigError
from kvtier_worker.model import prepare


def make_complete(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in prepare.COMPLETE:
        (folder / name).write_text("x")


def test_the_folder_is_in_the_cache_of_the_environment_or_of_the_user() -> None:
    assert prepare.default_folder({"KVTIER_CACHE": "/c"}) == Path("/c/SmolLM2-135M-Instruct")
    assert prepare.default_folder({}) == Path.home() / ".cache/kvtier/SmolLM2-135M-Instruct"


def test_a_whole_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    make_complete(tmp_path / "model")
    assert prepare.prepare(tmp_path / "model") == tmp_path / "model"


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert prepare.main([str(tmp_path / "model")], {}) == 2
    assert prepare.INSTALL in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not a whole"):
        prepare.prepare(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_neighbouring_pairs_become_halves_of_their_head() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert prepare.halves_order(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
