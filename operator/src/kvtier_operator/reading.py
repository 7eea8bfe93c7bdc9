"""Reads untyped manifest data into typed values and collects every violation on the way. Pure; called by `api` only.

A reader never raises: a bad value becomes a `Violation` and the default stands in for it, so that one pass finds
everything. The caller raises once, at the end, when the list is not empty.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from fractions import Fraction
from typing import Any, TypeVar

from kvtier_operator.errors import Violation

_Choice = TypeVar("_Choice", bound=StrEnum)

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS = _BINARY | _DECIMAL
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T|)")
_DURATION_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_DURATION_PART = re.compile(r"(\d+)(ms|s|m|h)")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def nearest(name: str, known: tuple[str, ...]) -> str:
    """Advice for an unknown name: the most similar known one, else all of them."""
    similar = difflib.get_close_matches(name, known, n=1)
    return f"unknown; did you mean {similar[0]}?" if similar else f"unknown; known are {', '.join(sorted(known))}"


class Reader:
    """One mapping of a manifest. Every accessor names a field; what no accessor named is unknown.

    Args:
        data: the mapping as parsed from YAML or JSON; None counts as empty.
        path: where it stands in the manifest.
        violations: shared by all readers of one manifest.
    """

    def __init__(self, data: Any, path: str, violations: list[Violation]) -> None:
        self.violations = violations
        self._path = path
        self._known: list[str] = []
        if data is None:
            data = {}
        if not isinstance(data, Mapping):
            self.violations.append(Violation(path, data, "write a mapping here"))
            data = {}
        self._data: Mapping[str, Any] = data

    def path(self, name: str) -> str:
        """Full path of one of this mapping's fields."""
        return f"{self._path}.{name}" if self._path else name

    def reject(self, name: str, fix: str) -> None:
        """Record a violation of one of this mapping's fields."""
        self.violations.append(Violation(self.path(name), self._data.get(name), fix))

    def has(self, name: str) -> bool:
        """True when the manifest states the field."""
        self._known.append(name)
        return self._data.get(name) is not None

    def child(self, name: str) -> Reader:
        """The mapping under ``name``; empty when absent."""
        self._known.append(name)
        return Reader(self._data.get(name), self.path(name), self.violations)

    def children(self, name: str) -> Iterator[Reader]:
        """The mappings of the list under ``name``."""
        self._known.append(name)
        items = self._data.get(name)
        if items is None:
            return
        if not isinstance(items, list):
            self.reject(name, "write a list here")
            return
        for index, item in enumerate(items):
            yield Reader(item, f"{self.path(name)}[{index}]", self.violations)

    def values(self, name: str) -> Mapping[str, Any]:
        """A mapping with free names, as it stands; the caller judges names and values."""
        self._known.append(name)
        data = self._data.get(name)
        if data is None:
            return {}
        if not isinstance(data, Mapping):
            self.reject(name, "write a mapping here")
            return {}
        return data

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self._stated(name, default)
        if isinstance(value, str):
            return value
        self.reject(name, "write a string, in quotes if it looks like a number")
        return default

    def label(self, name: str) -> str:
        """A required DNS label: lower-case letters, digits and dashes, 63 characters at most."""
        value = self.text(name)
        if not _DNS_LABEL.fullmatch(value):
            self.reject(name, "write a name of lower-case letters, digits and dashes, 63 characters at most")
        return value

    def choice(self, name: str, default: _Choice, reasons: Mapping[str, str] | None = None) -> _Choice:
        """One member of the enum of ``default``.

        Args:
            name: of the field.
            default: stands in when the field is absent or wrong.
            reasons: why a value that users may expect is not a member (yet).
        """
        kind = type(default)
        value = self._stated(name, default)
        if value in list(kind):
            return kind(value)
        reason = (reasons or {}).get(str(value), "")
        self.reject(name, f"{reason}{'; ' if reason else ''}write {' or '.join(kind)}")
        return default

    def boolean(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._stated(name, default)
        if isinstance(value, bool):
            return value
        self.reject(name, "write true or false")
        return default

    def integer(self, name: str, default: int, minimum: int, maximum: int) -> int:
        """A whole number of [minimum, maximum]."""
        value = self._stated(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum:
            return value
        self.reject(name, f"write a whole number from {minimum} to {maximum}")
        return default

    def decimal(self, name: str, default: float) -> float:
        """A number as Kubernetes APIs hold it: an integer, or a quoted decimal."""
        value = self._stated(name, str(default))
        if isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value):
            return float(value)
        self.reject(name, 'write a number in quotes, as in "2.5" (the API has no floats)')
        return default

    def quantity(self, name: str, default: int, minimum: int = 1) -> int:
        """Bytes, as in ``512Mi``, ``4Gi`` or a plain number."""
        value = self._stated(name, default)
        size = _parse_quantity(value)
        if size is None:
            self.reject(name, 'write bytes with a unit, as in "512Mi" or "4Gi"')
            return default
        if size < minimum:
            self.reject(name, f"write at least {minimum} bytes")
            return default
        return size

    def duration_ms(self, name: str, default: int, minimum: int = 0) -> int:
        """Milliseconds, from a duration as in ``500ms``, ``30s`` or ``1m30s``."""
        value = self._stated(name, f"{default}ms")
        total = _parse_duration(value)
        if total is None:
            self.reject(name, 'write a duration with a unit, as in "500ms", "30s" or "1m30s"')
            return default
        if total < minimum:
            self.reject(name, f"write at least {minimum} ms")
            return default
        return total

    def finish(self) -> None:
        """Record every field that nothing asked for."""
        known = tuple(self._known)
        for name in self._data:
            if name not in known:
                fix = nearest(str(name), known)
                self.violations.append(Violation(self.path(str(name)), self._data[name], fix))

    def _stated(self, name: str, default: Any) -> Any:
        return self._data[name] if self.has(name) else default


def _parse_quantity(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    match = _QUANTITY.fullmatch(str(value)) if isinstance(value, (int, str)) else None
    if match is None:
        return None
    size = Fraction(match[1]) * _UNITS[match[2]]
    return int(size) if size.denominator == 1 else None


def _parse_duration(value: Any) -> int | None:
    if not isinstance(value, str):
        return None
    parts = _DURATION_PART.findall(value)
    if not parts or "".join(number + unit for number, unit in parts) != value:
        return None
    return sum(int(number) * _DURATION_MS[unit] for number, unit in parts)
