"""What a flag is: a dataclass field with a group, a help text, a range and, for secrets, an environment variable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any


class FlagGroup(StrEnum):
    """Headings of ``kvtier engine --help``, in this order."""

    MODEL = "Model"
    SERVER = "Server"
    CACHE = "KV cache"
    STORE = "Global KV cache (host and store tiers)"
    SCHEDULER = "Scheduler"
    DISTRIBUTED = "Distributed"


def flag(
    default: Any,
    group: FlagGroup,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    later: tuple[str, ...] = (),
    env: str = "",
    minimum: float = -math.inf,
    maximum: float = math.inf,
) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
        default: its type is the flag's type: bool, int, float or str.
        group: heading in the help.
        text: what it does, its unit, and what 0 or empty mean.
        choices: the only texts allowed; empty = any.
        later: texts that mean something, but not yet in this version.
        env: environment variable read when the flag is absent. Such a flag is a secret: it is never rendered to argv.
        minimum: smallest number allowed.
        maximum: largest number allowed.
    """
    metadata = {
        "group": group,
        "help": text,
        "choices": choices,
        "later": later,
        "env": env,
        "minimum": minimum,
        "maximum": maximum,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as parser, help and checks see it; fields as in `flag`."""

    name: str
    default: bool | int | float | str
    group: FlagGroup
    help: str
    choices: tuple[str, ...]
    later: tuple[str, ...]
    env: str
    minimum: float
    maximum: float

    @property
    def kind(self) -> type[bool | int | float | str]:
        """Type of its value."""
        return type(self.default)

    @property
    def range_text(self) -> str:
        """The allowed numbers, e.g. ``1..65535``; empty = any."""
        low, high = (_number(bound) for bound in (self.minimum, self.maximum))
        if low and high:
            return f"{low}..{high}"
        return (f">= {low}" if low else "") + (f"<= {high}" if high else "")

    @property
    def range_hint(self) -> str:
        """`range_text` for the help: a bound that only says "fits the machine's integers" is left out."""
        if self.maximum < _MACHINE_BOUND:
            return self.range_text
        return f">= {_number(self.minimum)}" if self.minimum > -_MACHINE_BOUND else ""

    def render(self, value: object) -> str:
        """``value`` as it stands on a command line."""
        if isinstance(value, bool):
            return "true" if value else "false"
        return repr(value) if isinstance(value, float) else str(value)


_MACHINE_BOUND = 2**32 - 1


def _number(bound: float) -> str:
    if math.isinf(bound):
        return ""
    return str(int(bound)) if bound == int(bound) else str(bound)


def flags_of(record: type[Any]) -> Mapping[str, Flag]:
    """The flags of a settings record, by name, in field order."""
    hashable: Any = record
    return _flags(hashable)


@cache
def _flags(record: Any) -> Mapping[str, Flag]:
    return {entry.name: _flag(entry) for entry in fields(record)}


def _flag(entry: Field[Any]) -> Flag:
    default: Any = entry.default
    return Flag(name=entry.name, default=default, **entry.metadata)
