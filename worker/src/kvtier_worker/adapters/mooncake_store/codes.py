"""What Mooncake's numbers mean to us. Observed with wheel 0.3.13.post1; unknown numbers are faults."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from kvtier_worker.adapters.mooncake_store.breaker import CallResult
from kvtier_worker.engine.ports import GetOutcome


class Code(IntEnum):
    """Error codes of Mooncake Store."""

    INTERNAL = -1
    SEGMENT_NOT_FOUND = -101
    NO_SPACE = -200
    INVALID_PARAMS = -600
    REPLICA_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    LEASE_EXPIRED = -707
    REPLICA_GONE = -712
    TRANSFER_FAIL = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    ETCD_ERROR = -1000
    UNAVAILABLE_IN_STATUS = -1010
    UNAVAILABLE_IN_MODE = -1011


_NOT_THERE = frozenset({Code.OBJECT_NOT_FOUND, Code.REPLICA_NOT_READY, Code.REPLICA_GONE, Code.LEASE_EXPIRED})
_WRONG_SIZE = frozenset({Code.INVALID_PARAMS})  # a buffer smaller than the object
_CONTROL = frozenset(
    {
        Code.INTERNAL,
        Code.RPC_FAIL,
        Code.RPC_TIMEOUT,
        Code.ETCD_ERROR,
        Code.UNAVAILABLE_IN_STATUS,
        Code.UNAVAILABLE_IN_MODE,
    }
)


def name_of(code: int) -> str:
    """The code's name in ``error_counts``."""
    try:
        return Code(code).name.lower()
    except ValueError:
        return f"code_{-code}"


def get_outcome(code: int, nbytes: int) -> GetOutcome:
    """Outcome of one read of an object that should have ``nbytes`` bytes; a length is as good as any error code."""
    if code == nbytes:
        return GetOutcome.HIT
    if code >= 0 or code in _NOT_THERE or code in _WRONG_SIZE:
        return GetOutcome.MISS
    return GetOutcome.FAULT


def get_error(code: int, nbytes: int) -> str:
    """Name to count a read under; empty for a hit and for a plain miss."""
    if code in (nbytes, Code.OBJECT_NOT_FOUND):
        return ""
    if code >= 0 or code in _WRONG_SIZE:
        return "size_mismatch"
    return name_of(code)


def call_result(codes: Sequence[int], expected: int) -> CallResult:
    """How the store took a call of ``expected`` objects: one usable answer makes it ANSWERED."""
    if expected == 0:
        return CallResult.ANSWERED
    if not codes:
        return CallResult.CONTROL_FAULT
    if any(code >= 0 or not _is_fault(code) for code in codes):
        return CallResult.ANSWERED
    return CallResult.CONTROL_FAULT if all(code in _CONTROL for code in codes) else CallResult.DATA_FAULT


def _is_fault(code: int) -> bool:
    return (
        code not in _NOT_THERE and code not in _WRONG_SIZE and code not in (Code.NO_SPACE, Code.OBJECT_ALREADY_EXISTS)
    )
