"""Reads untyped manifest data into typed values and collects every violation on the way. Pure; called by `api` only.

Names, defaults and limits come from the description of the API (`fields`). A reader never raises: a bad value becomes
a `Violation` and the default stands in for it, so that one pass finds everything. The caller raises once, at the end,
when the list is not empty.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from typing import Any, TypeVar

from kvtier_operator.api.fields import (
    Amounts,
    Boolean,
    Bytes,
    Choice,
    Decimal,
    Duration,
    Field,
    FreeList,
    Integer,
    Object,
    ObjectList,
    Text,
    TextList,
    TextMap,
)
from kvtier_operator.api.units import (
    BYTES_ADVICE,
    DECIMAL_ADVICE,
    DURATION_ADVICE,
    parse_amount,
    parse_bytes,
    parse_decimal,
    parse_duration_ms,
)
from kvtier_operator.errors import Violation

_Choice = TypeVar("_Choice", bound=StrEnum)
_Kind = TypeVar("_Kind", bound=Field)


def nearest(name: str, known: tuple[str, ...]) -> str:
    """Advice for an unknown name: the most similar known one, else all of them."""
    similar = difflib.get_close_matches(name, known, n=1)
    return f"unknown; did you mean {similar[0]}?" if similar else f"unknown; known are {', '.join(sorted(known))}"


class Reader:
    """One mapping of a manifest, beside its description.

    Args:
        data: the mapping as parsed from YAML or JSON; None counts as empty.
        path: where it stands in the manifest.
        described: its fields; any other is a violation.
        violations: shared by all readers of one manifest.
        extra: others may add fields of their own (the API server's metadata).
    """

    def __init__(
        self, data: Any, path: str, described: Object, violations: list[Violation], *, extra: bool = False
    ) -> None:
        self._violations = violations
        self._path = path
        self._described = described
        if data is None:
            data = {}
        if not isinstance(data, Mapping):
            self._violations.append(Violation(path, data, "write a mapping here"))
            data = {}
        self._data: Mapping[str, Any] = data
        if not extra:
            self._find_unknown()

    def path(self, name: str) -> str:
        """Full path of one of this mapping's fields."""
        return f"{self._path}.{name}" if self._path else name

    def reject(self, name: str, fix: str) -> None:
        """Record a violation of one of this mapping's fields."""
        self._violations.append(Violation(self.path(name), self._data.get(name), fix))

    def reject_key(self, name: str, key: object, fix: str) -> None:
        """Record a violation of one entry of a mapping with free names."""
        self._violations.append(Violation(f"{self.path(name)}.{key}", self._data[name].get(key), fix))

    def has(self, name: str) -> bool:
        """True when the manifest states the field."""
        return self._data.get(name) is not None

    def stated(self, name: str) -> Any:
        """The value as it stands; None when absent."""
        return self._data.get(name)

    def items(self, name: str) -> list[Any]:
        """A list as it stands; empty when it is none."""
        data = self._data.get(name)
        return data if isinstance(data, list) else []

    def child(self, name: str) -> Reader:
        """The mapping under ``name``; empty when absent."""
        return Reader(self._data.get(name), self.path(name), self._field(name, Object), self._violations)

    def children(self, name: str) -> tuple[Reader, ...]:
        """The mappings of the list under ``name``."""
        described = self._field(name, ObjectList)
        items = self._list(name, described.min_items, described.max_items)
        return tuple(
            Reader(item, f"{self.path(name)}[{index}]", described.item, self._violations)
            for index, item in enumerate(items)
        )

    def values(self, name: str) -> Mapping[str, Any]:
        """A mapping with free names, as it stands; the caller judges names and values."""
        data = self._data.get(name)
        if data is None:
            return {}
        if not isinstance(data, Mapping):
            self.reject(name, "write a mapping here")
            return {}
        return data

    def text(self, name: str) -> str:
        """A string."""
        described = self._field(name, Text)
        if not self.has(name) and name not in self._described.required:
            return described.default or ""
        value = self._stated(name, "")
        if fix := _text_fix(described, value):
            self.reject(name, fix)
            return described.default or ""
        return str(value)

    def choice(self, name: str, kind: type[_Choice]) -> _Choice:
        """One member of an enum."""
        described = self._field(name, Choice)
        value = self._stated(name, described.default)
        if value in list(kind):
            return kind(value)
        reason = described.later.get(str(value), "")
        self.reject(name, f"{reason}{'; ' if reason else ''}write {' or '.join(kind)}")
        return kind(described.default)

    def boolean(self, name: str) -> bool:
        """True or false."""
        default = self._field(name, Boolean).default
        value = self._stated(name, default)
        if isinstance(value, bool):
            return value
        self.reject(name, "write true or false")
        return default

    def integer(self, name: str) -> int:
        """A whole number within the limits of its description."""
        described = self._field(name, Integer)
        value = self._stated(name, described.default)
        if isinstance(value, int) and not isinstance(value, bool):
            allowed = value in described.choices if described.choices else True
            if allowed and described.minimum <= value <= described.maximum:
                return value
        wanted = " or ".join(map(str, described.choices)) or (
            f"a whole number from {described.minimum} to {described.maximum}"
        )
        self.reject(name, f"write {wanted}")
        return described.default

    def decimal(self, name: str) -> float:
        """A number as Kubernetes APIs hold it: an integer, or a quoted decimal."""
        default = self._field(name, Decimal).default
        number = parse_decimal(self._stated(name, default))
        if number is not None:
            return number
        self.reject(name, DECIMAL_ADVICE)
        return float(default)

    def bytes(self, name: str) -> int:
        """Bytes, as in ``512Mi``, ``4Gi`` or a plain number; 0 when the field has no default and is absent."""
        described = self._field(name, Bytes)
        default = parse_bytes(described.default) or 0
        if not self.has(name):
            return default
        size = parse_bytes(self._data[name])
        if size is None:
            self.reject(name, BYTES_ADVICE)
            return default
        if size < described.minimum:
            self.reject(name, f"write at least {described.minimum} bytes")
            return default
        return size

    def duration_ms(self, name: str) -> int:
        """Milliseconds, from a duration as in ``500ms``, ``30s`` or ``1m30s``."""
        described = self._field(name, Duration)
        default = parse_duration_ms(described.default)
        assert default is not None, f"the default of {name} is no duration"
        total = parse_duration_ms(self._stated(name, described.default))
        if total is None:
            self.reject(name, DURATION_ADVICE)
        elif not described.minimum <= total <= described.maximum:
            wanted = f"at least {described.minimum}" if total < described.minimum else f"at most {described.maximum}"
            self.reject(name, f"write {wanted} ms")
        else:
            return total
        return default

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of different strings."""
        described = self._field(name, TextList)
        items = self._list(name, described.min_items, described.max_items)
        for index, item in enumerate(items):
            fix = _text_fix(described.item, item) or ("stands twice; remove one" if item in items[:index] else "")
            if fix:
                self._violations.append(Violation(f"{self.path(name)}[{index}]", item, fix))
        return tuple(item for item in items if isinstance(item, str))

    def text_map(self, name: str) -> Mapping[str, str]:
        """A mapping of free names to strings."""
        described = self._field(name, TextMap)
        data = self.values(name)
        if len(data) > described.max_items:
            self.reject(name, f"write at most {described.max_items} entries")
        for key, value in data.items():
            if not isinstance(key, str) or not isinstance(value, str):
                self.reject_key(name, key, "write a string, in quotes if it looks like a number")
            elif len(value) > described.max_length:
                self.reject_key(name, key, f"write at most {described.max_length} characters")
        return {key: value for key, value in data.items() if isinstance(key, str) and isinstance(value, str)}

    def amounts(self, name: str) -> Mapping[str, Fraction]:
        """Amounts of a container's resources, by resource."""
        described = self._field(name, Amounts)
        data = self.values(name)
        if len(data) > described.max_items:
            self.reject(name, f"write at most {described.max_items} entries")
        amounts: dict[str, Fraction] = {}
        for key, value in data.items():
            amount = parse_amount(value)
            if amount is None or not isinstance(key, str):
                self.reject_key(name, key, 'write an amount of this resource, as in "500m", 2 or "4Gi"')
            else:
                amounts[key] = amount
        return amounts

    def mappings(self, name: str) -> tuple[Mapping[str, Any], ...]:
        """A list of mappings that are handed on, once the texts that are read from them are there."""
        described = self._field(name, FreeList)
        found: list[Mapping[str, Any]] = []
        for index, item in enumerate(self._list(name, 0, described.max_items)):
            reader = Reader(item, f"{self.path(name)}[{index}]", described.item, self._violations, extra=True)
            texts = [reader.text(required) for required in described.item.required]
            if isinstance(item, Mapping) and all(texts):
                found.append(item)
        return tuple(found)

    def _find_unknown(self) -> None:
        known = tuple(self._described.fields)
        for name, value in self._data.items():
            if name not in self._described.fields:
                self._violations.append(Violation(self.path(str(name)), value, nearest(str(name), known)))

    def _field(self, name: str, kind: type[_Kind]) -> _Kind:
        described = self._described.fields[name]
        assert isinstance(described, kind), f"{self.path(name)} is described as {type(described).__name__}"
        return described

    def _list(self, name: str, minimum: int, maximum: int) -> list[Any]:
        items = self._data.get(name)
        if items is None:
            items = []
        elif not isinstance(items, list):
            self.reject(name, "write a list here")
            return []
        if not minimum <= len(items) <= maximum:
            self.reject(name, f"write {minimum} to {maximum} of them")
        return items

    def _stated(self, name: str, default: Any) -> Any:
        return self._data[name] if self.has(name) else default


def _text_fix(described: Text, value: Any) -> str:
    if not isinstance(value, str):
        return "write a string, in quotes if it looks like a number"
    if len(value) > described.max_length:
        return f"write at most {described.max_length} characters"
    return "" if re.fullmatch(described.pattern or ".*", value, re.DOTALL) else described.advice
