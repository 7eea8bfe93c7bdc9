from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from kvtier_worker.store_node.stop_flag import StopFlag


def test_it_stays_set_and_may_be_set_again() -> None:
    flag = StopFlag()
    assert not flag.is_set()
    assert not flag.wait(0.0)
    flag.set()
    flag.set()
    assert flag.is_set()
    assert flag.wait(60.0)


@pytest.mark.timeout(20)
def test_handlers_that_set_it_over_and_over_while_their_thread_waits_never_block() -> None:
    flag = StopFlag()
    before = signal.signal(signal.SIGUSR1, lambda _number, _frame: flag.set())
    stop = time.monotonic() + 0.5

    def storm() -> None:
        while time.monotonic() < stop:
            os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=storm)
    try:
        sender.start()
        while time.monotonic() < stop:
            assert flag.wait(0.001) in (True, False)
        sender.join()
        assert flag.is_set()
    finally:
        signal.signal(signal.SIGUSR1, before)
