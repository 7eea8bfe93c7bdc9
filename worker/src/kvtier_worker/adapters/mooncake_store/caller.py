"""One call to the client: guard, circuit breaker, accounting of time, vendor errors.

Everything `store` asks for goes through `StoreCaller.call`, so a call that may not be made cannot be made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvtier_worker.adapters.mooncake_store.breaker import (
    Admission,
    BreakerPolicy,
    BreakerState,
    CallResult,
    CircuitBreaker,
)
from kvtier_worker.adapters.mooncake_store.codes import call_result
from kvtier_worker.log import event
from kvtier_worker.mooncake_client.guard import ClientClosed, GuardedClient, RawClient

_LOG = logging.getLogger(__name__)

_VENDOR_ERRORS = (TypeError, ValueError, RuntimeError, MemoryError)
"""What pybind raises for arguments and results that it cannot convert, and for C++ exceptions."""


class Reply(NamedTuple):
    """What came back. A tuple, because one is made per call.

    Attributes:
        asked: False when the store was not asked: closed, or the breaker is open.
        codes: one per object; fewer when the client broke its word.
    """

    asked: bool
    codes: Sequence[int] = ()


_NOT_ASKED = Reply(asked=False)


class StoreCaller:
    """Makes calls and keeps count of what goes wrong. Thread-safe.

    Args:
        client: set up.
        policy: of the breaker.
        reachable: a quick look whether anybody is there; asked before a call that could cost seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: GuardedClient,
        policy: BreakerPolicy,
        reachable: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._breaker = CircuitBreaker(policy)
        self._reachable = reachable
        self.clock = clock
        self._errors: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def state(self) -> BreakerState:
        """Of the breaker."""
        return self._breaker.state

    @property
    def errors(self) -> Mapping[str, int]:
        """Errors so far, by name; a copy."""
        with self._lock:
            return dict(self._errors)

    def count(self, name: str, times: int = 1) -> None:
        """Count an error."""
        with self._lock:
            self._errors[name] += times

    def call(self, function: Callable[[RawClient], Sequence[int]], expected: int) -> Reply:
        """Run ``function`` on the client if that is allowed. Returns when it returned, never earlier.

        Args:
            function: gives one code per object.
            expected: how many objects.
        """
        try:
            raw = self._client.enter()
        except ClientClosed:
            self.count("closed")
            return _NOT_ASKED
        try:
            return self._admitted_call(raw, function, expected)
        finally:
            self._client.leave()

    def _admitted_call(self, raw: RawClient, function: Callable[[RawClient], Sequence[int]], expected: int) -> Reply:
        started = self.clock()
        with self._lock:
            admission = self._breaker.admit(started)
        if admission is Admission.REFUSED:
            self.count("breaker_open")
            return _NOT_ASKED
        if admission is not Admission.NORMAL and not self._reachable():
            self._record(admission, CallResult.UNREACHABLE, started)
            self.count("unreachable")
            return _NOT_ASKED
        codes: Sequence[int] = ()
        try:
            codes = function(raw)
        except _VENDOR_ERRORS as error:
            self.count("client_exception")
            event(_LOG, "store call failed", level=logging.WARNING, error=repr(error))
        finally:
            self._record(admission, call_result(codes, expected), started)
        if len(codes) < expected:
            self.count("short_result", expected - len(codes))
        return Reply(asked=True, codes=codes)

    def _record(self, admission: Admission, result: CallResult, started: float) -> None:
        now = self.clock()
        with self._lock:
            before = self._breaker.state
            self._breaker.record(admission, result, now - started, now)
            after = self._breaker.state
        if after is not before:
            level = logging.INFO if after is BreakerState.CLOSED else logging.WARNING
            event(_LOG, "store breaker", level=level, state=after, was=before, call=result, seconds=now - started)
