"""The circuit breaker of one store: when to ask it, and when to answer "miss" without asking.

A dead master costs more than four seconds a call, so after a few faults nobody waits for it any more; after a pause
one call tries again. Pure: time is an argument. Not thread-safe; its owner holds a lock.

    state      event                                              next
    CLOSED     max_faults faults in a row, one costly call, or    OPEN (first_pause_s)
               nobody answers a look
    OPEN       a call asks after the pause                        HALF_OPEN, that call tries
    HALF_OPEN  another call asks                                  stays, refused
    HALF_OPEN  the trying call worked                             CLOSED
    HALF_OPEN  it did not                                         OPEN (twice the last pause, up to max_pause_s)
A call that was let in while CLOSED and ends later changes nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """Names as `KVCacheStore.state` reports them."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Admission(StrEnum):
    """What a call may do."""

    NORMAL = "normal"
    DOUBTFUL = "doubtful"  # the last call got no answer: look whether somebody is there before waiting for him
    TRIAL = "trial"  # the one call that finds out whether the store is back; look first, too
    REFUSED = "refused"


class CallResult(StrEnum):
    """How the store took a call."""

    ANSWERED = "answered"  # hits, misses and partial results alike
    DATA_FAULT = "data_fault"  # no object moved: a storage node, maybe one of many
    CONTROL_FAULT = "control_fault"  # the master did not answer: nothing works
    UNREACHABLE = "unreachable"  # a look showed that nobody is there; the call was not made


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When it opens and how long it stays open.

    Attributes:
        max_faults: faults in a row that open it.
        costly_fault_s: a control fault that took this long opens it at once; the next one would cost the same.
        costly_call_s: any call that took this long opens it at once.
        first_pause_s: how long it stays open the first time.
        max_pause_s: how long at most, after doublings.
    """

    max_faults: int = 3
    costly_fault_s: float = 0.5
    costly_call_s: float = 5.0
    first_pause_s: float = 0.5
    max_pause_s: float = 8.0


class CircuitBreaker:
    """The state of one store."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._state = BreakerState.CLOSED
        self._faults = 0
        self._in_doubt = False
        self._in_doubt = False
        self._pause_s = policy.first_pause_s
        self._retry_at = 0.0

    @property
    def state(self) -> BreakerState:
        """OPEN lasts until a call tries, also when the pause is over."""
        return self._state

    def admit(self, now: float) -> Admission:
        """Whether a call may go to the store at ``now`` (seconds). Everything but REFUSED must end in `record`."""
        if self._state is BreakerState.CLOSED:
            return Admission.DOUBTFUL if self._in_doubt else Admission.NORMAL
        if self._state is BreakerState.OPEN and now >= self._retry_at:
            self._state = BreakerState.HALF_OPEN
            return Admission.TRIAL
        return Admission.REFUSED

    def record(self, admission: Admission, result: CallResult, elapsed_s: float, now: float) -> None:
        """What became of an admitted call that took ``elapsed_s`` and ended at ``now``."""
        if admission is Admission.TRIAL:
            if result is CallResult.ANSWERED and elapsed_s < self._policy.costly_call_s:
                self._close()
            else:
                self._pause_s = min(2 * self._pause_s, self._policy.max_pause_s)
                self._open(now)
        elif self._state is BreakerState.CLOSED:
            self._faults = 0 if result is CallResult.ANSWERED else self._faults + 1
            self._in_doubt = result is CallResult.CONTROL_FAULT
            if self._faults >= self._policy.max_faults or self._is_costly(result, elapsed_s):
                self._open(now)

    def _is_costly(self, result: CallResult, elapsed_s: float) -> bool:
        if result is CallResult.UNREACHABLE:
            return True
        if result is CallResult.CONTROL_FAULT and elapsed_s >= self._policy.costly_fault_s:
            return True
        return elapsed_s >= self._policy.costly_call_s

    def _close(self) -> None:
        self._state = BreakerState.CLOSED
        self._faults = 0
        self._in_doubt = False
        self._pause_s = self._policy.first_pause_s

    def _open(self, now: float) -> None:
        self._state = BreakerState.OPEN
        self._retry_at = now + self._pause_s
