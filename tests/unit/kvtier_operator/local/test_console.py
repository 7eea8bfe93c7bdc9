"""Words for a user who may have gone."""

import errno
import io
import os
import signal

import pytest
from kvtier_operator.local.console import StopRequest, heed_signals, say


class Failing(io.StringIO):
    """A stream that cannot be written."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def flush(self) -> None:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_reader_that_has_gone_and_a_full_disk_stop_nobody(number: int) -> None:
    say("stopping", Failing(number))


def test_what_nobody_reads_does_not_fail_at_the_end_either() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        say("one", stream)
        say("two", stream)


def test_lines_go_to_stdout_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    say("ready")
    assert capsys.readouterr().out == "ready\n"


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_the_terminal_asks_to_stop_unless_somebody_wants_it_ignored(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    request = StopRequest()
    try:
        heeded = heed_signals(request)
        signal.raise_signal(signal.SIGHUP)
        assert request.asked is not ignored
        signal.raise_signal(signal.SIGTERM)
        assert request.asked
        for number, handler in heeded.items():
            signal.signal(number, handler)
    finally:
        signal.signal(signal.SIGHUP, before)
