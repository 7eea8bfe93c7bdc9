"""Bytes, durations, decimals and times as Kubernetes APIs write them. Pure.

The patterns stand in the custom resource definition too: they hold for Python's ``re`` and for RE2.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

BYTES_PATTERN = r"[0-9]{1,18}(\.[0-9]{1,9})?(Ki|Mi|Gi|Ti|k|M|G|T)?"
DURATION_PATTERN = "([0-9]{1,9}(ms|s)|[0-9]{1,7}m|[0-9]{1,5}h){1,4}"
DECIMAL_PATTERN = r"[0-9]{1,9}(\.[0-9]{1,9})?"
AMOUNT_PATTERN = r"[0-9]{1,18}(\.[0-9]{1,9})?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?"
"""An amount of a resource of a container: CPU, memory, devices."""

BYTES_ADVICE = 'write bytes with a unit, as in "512Mi" or "4Gi"'
DURATION_ADVICE = 'write a duration with a unit, as in "500ms", "30s" or "1m30s"'
DECIMAL_ADVICE = 'write a number in quotes, as in "2.5" (the API has no floats)'

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_UNITS = {"m": Fraction(1, 1000)} | {unit: Fraction(size) for unit, size in (_BINARY | _DECIMAL).items()}
_AMOUNT_PARTS = re.compile(r"([0-9.]+)([a-zA-Z]*)")
_DURATION_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_DURATION_PART = re.compile("([0-9]+)(ms|s|m|h)")


def parse_bytes(value: Any) -> int | None:
    """Bytes of ``512Mi``, ``1.5Gi`` or a plain number, rounded up as Kubernetes does; None when it is no size."""
    size = _amount(value, BYTES_PATTERN)
    return None if size is None else math.ceil(size)


def parse_amount(value: Any) -> Fraction | None:
    """Amount of a container's resource, as in ``500m``, ``2`` or ``4Gi``; None when it is none."""
    return _amount(value, AMOUNT_PATTERN)


def parse_duration_ms(value: Any) -> int | None:
    """Milliseconds of ``500ms``, ``30s`` or ``1m30s``; None when it is no duration."""
    if not isinstance(value, str) or not re.fullmatch(DURATION_PATTERN, value):
        return None
    return sum(int(number) * _DURATION_MS[unit] for number, unit in _DURATION_PART.findall(value))


def parse_decimal(value: Any) -> float | None:
    """A number as Kubernetes APIs hold it: an integer, or a quoted decimal; None when it is none, or negative."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    return float(value) if re.fullmatch(DECIMAL_PATTERN, str(value)) else None


def duration_text(milliseconds: int) -> str:
    """A duration in its largest whole unit: 90000 is ``90s``."""
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds % size == 0 and (milliseconds or unit == "s"):
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"


def timestamp(seconds: float) -> str:
    """RFC 3339, in whole seconds, of a time in seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(time: str) -> float:
    """Seconds since the epoch of an RFC 3339 time; 0 for anything else, since people edit annotations."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return 0.0


def _amount(value: Any, pattern: str) -> Fraction | None:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or not re.fullmatch(pattern, str(value)):
        return None
    parts = _AMOUNT_PARTS.fullmatch(str(value))
    assert parts is not None, "the pattern of amounts has a number and a unit"
    return Fraction(parts[1]) * _UNITS[parts[2]]
