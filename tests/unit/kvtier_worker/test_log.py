"""One line per event: the event first, then its fields, which can be cut apart again."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from kvtier_worker.log import configure_logging, event

LOG = logging.getLogger("kvtier.test")


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_event_stands_first_and_values_with_spaces_are_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("rank 0")
    event(LOG, "serving", port=8010, took_s=1.23456, reason="two words", empty="")
    assert (
        capsys.readouterr().err.split(" ", 1)[1]
        == "rank 0   serving port=8010 took_s=1.235 reason='two words' empty=''\n"
    )


def test_the_level_shows_only_when_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("engine")
    event(LOG, "fine")
    event(LOG, "odd", level=logging.WARNING)
    fine, odd = capsys.readouterr().err.splitlines()
    assert "INFO" not in fine
    assert "engine   WARNING odd" in odd


def test_extra_fields_are_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("engine")
    LOG.warning("step failed", extra={"batch": 7, "error": "no room"})
    assert capsys.readouterr().err.endswith("engine   WARNING step failed batch=7 error='no room'\n")


def test_what_is_below_the_level_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("engine")
    event(LOG, "step", level=logging.DEBUG, batch=1)
    assert capsys.readouterr().err == ""
