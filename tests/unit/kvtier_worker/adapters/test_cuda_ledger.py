"""Which copies of a CUDA stream are counted when; on events that need no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtier_worker.adapters.cuda_copy import _Copy, _Ledger


@dataclass
class FakeEvent:
    happened: bool = True

    def query(self) -> bool:
        return self.happened


def copy(nbytes: int, *, happened: bool = True, trailers: tuple[tuple[int, int], ...] = ()) -> _Copy:
    event: Any = FakeEvent(happened)
    return _Copy(event, event, nbytes, is_restore=not trailers, trailers=trailers)


def test_restores_that_nobody_waits_for_are_counted_once_and_do_not_pile_up() -> None:
    counted: list[int] = []
    ledger = _Ledger(lambda one: counted.append(one.nbytes))
    for nbytes in (1, 2):
        ledger.append(copy(nbytes))
    ledger.append(copy(3, happened=False))
    ledger.append(copy(4))
    ledger.settle_ended()
    ledger.settle_ended()
    assert counted == [1, 2], "in order, and none that is under way"
    assert (len(ledger.copies), ledger.count) == (2, 4)
    ledger.settle(4)
    assert counted == [1, 2, 3, 4]


def test_trailers_are_left_to_whoever_waits_for_their_copy() -> None:
    counted: list[int] = []
    ledger = _Ledger(lambda one: counted.append(one.nbytes))
    ledger.append(copy(1, trailers=((0, 0),)))
    ledger.append(copy(2))
    ledger.settle_ended()
    assert counted == []
