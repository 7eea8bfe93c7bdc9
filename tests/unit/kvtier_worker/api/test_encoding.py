"""Encoding a long prompt stops nobody else."""

from __future__ import annotations

import threading
import time

from .conftest import byte_tokenizer


def longest_standstill() -> float:
    """How long this thread stood still at most while another one encoded, as a share of the time that took."""
    tokenizer = byte_tokenizer()
    began = time.perf_counter()
    encoding = threading.Thread(target=tokenizer.encode, args=("the quick brown fox " * 50_000,))
    encoding.start()
    longest, last = 0.0, began
    while encoding.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest / (time.perf_counter() - began)


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """Of several times: a busy machine may hold this thread up, the encoder would do so each time."""
    assert any(longest_standstill() < 0.5 for _ in range(5))
