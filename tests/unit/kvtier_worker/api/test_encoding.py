"""Encoding a long prompt stops nobody else."""

from __future__ import annotations

import threading
import time

from .conftest import byte_tokenizer


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = byte_tokenizer()
    began = time.perf_counter()
    encoding = threading.Thread(target=tokenizer.encode, args=("the quick brown fox " * 50_000,))
    encoding.start()
    longest, last = 0.0, began
    while encoding.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    took = time.perf_counter() - began
    assert longest < took / 2, f"this thread stood still for {longest:.3f} s of {took:.3f} s"
