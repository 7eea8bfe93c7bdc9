"""From a command line to a settings record. Collects every error instead of stopping at the first.

Accepted: ``--flag=value``, ``--flag value``, ``-flag``, dashes for underscores. A boolean flag alone is true,
``--noflag`` is false, and its value may be true|false|1|0|yes|no|on|off. Given twice, the last one counts.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvtier_worker.contract.flags import Flag, flags_of

Record = TypeVar("Record")

_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "t": True, "y": True} | {
    "false": False,
    "0": False,
    "no": False,
    "off": False,
    "f": False,
    "n": False,
}
_INTEGER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True, slots=True)
class Parsed(Generic[Record]):
    """Outcome of a parse.

    Attributes:
        settings: the record; flags that could not be read have their defaults.
        errors: by flag name, one sentence each, in command-line order.
    """

    settings: Record
    errors: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class OtherFlag:
    """A flag that exists elsewhere but not in this version: accepted only with a value that changes nothing.

    Attributes:
        harmless: its default, and other texts that mean the same.
        feature: what it belongs to, for the message.
    """

    harmless: tuple[str, ...]
    feature: str

    def accepts(self, value: str) -> bool:
        """Whether ``value`` asks for nothing."""
        return any(_same(value, text) for text in self.harmless)


def parse_flags(
    record: type[Record],
    argv: Sequence[str],
    env: Mapping[str, str],
    others: Mapping[str, OtherFlag] | None = None,
) -> Parsed[Record]:
    """Parse ``argv`` into ``record``, a dataclass whose fields were made by `flag`."""
    flags = flags_of(record)
    others = others or {}
    values: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, entry in flags.items():
        if entry.env and env.get(entry.env):
            values[name] = env[entry.env]
    for token in _tokens(argv, flags, others):
        errors.pop(token.name, None)  # given again: the last one counts
        try:
            if token.name in flags:
                values[token.name] = _read(flags[token.name], token.text)
            else:
                _refuse(token, flags, others)
        except ValueError as error:
            errors[token.name] = str(error)
    return Parsed(record(**values), tuple(errors.items()))


@dataclass(frozen=True, slots=True)
class _Token:
    """One flag as typed; ``text`` None = it stands alone; ``stray`` = a word that belongs to no flag."""

    name: str
    text: str | None
    stray: bool = False


def _tokens(argv: Sequence[str], flags: Mapping[str, Flag], others: Mapping[str, OtherFlag]) -> Iterator[_Token]:
    rest = list(argv)
    while rest:
        typed = rest.pop(0)
        if not typed.startswith("-") or not typed.strip("-"):
            yield _Token(typed, None, stray=True)
            continue
        name, equals, text = typed.lstrip("-").partition("=")
        name = name.replace("-", "_")
        known = name in flags or name in others
        if equals:
            yield _Token(name, text)
        elif not known and name.startswith("no") and _is_boolean(name[2:], flags, others):
            yield _Token(name[2:], "false")
        elif rest and _takes_next(name, rest[0], flags, others):
            yield _Token(name, rest.pop(0))
        else:
            yield _Token(name, None)


def _is_boolean(name: str, flags: Mapping[str, Flag], others: Mapping[str, OtherFlag]) -> bool:
    if name in flags:
        return flags[name].kind is bool
    return name in others and others[name].harmless[0] in {"true", "false"}


def _takes_next(name: str, following: str, flags: Mapping[str, Flag], others: Mapping[str, OtherFlag]) -> bool:
    if _is_boolean(name, flags, others):
        return following.lower() in _BOOLEANS
    if name in flags or name in others:
        return not following.startswith("--")
    return not following.startswith("-")  # an unknown flag's value, most likely: one error instead of two


def _read(flag: Flag, text: str | None) -> bool | int | float | str:
    if flag.kind is bool:
        return _read_boolean(flag, text)
    if text is None:
        raise ValueError(f"--{flag.name}: needs a value, e.g. --{flag.name}={flag.render(flag.default) or 'VALUE'}")
    if flag.kind is str:
        return _read_choice(flag, text)
    return _read_number(flag, text)


def _read_boolean(flag: Flag, text: str | None) -> bool:
    if text is None:
        return True
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"--{flag.name}={text}: is a switch; use --{flag.name}=true or --{flag.name}=false")
    return _BOOLEANS[text.lower()]


def _read_choice(flag: Flag, text: str) -> str:
    if problem := bad_choice(flag, text):
        raise ValueError(problem)
    return text


def _read_number(flag: Flag, text: str) -> int | float:
    noun = "a whole number" if flag.kind is int else "a number"
    problem = f"--{flag.name}={text}: not {noun}; use e.g. --{flag.name}={flag.default}"
    if flag.kind is int and not _INTEGER.fullmatch(text):
        raise ValueError(problem)
    try:
        return int(text) if flag.kind is int else float(text)
    except ValueError as error:
        raise ValueError(problem) from error


def bad_choice(flag: Flag, text: str) -> str:
    """The violation of ``flag``'s choices by ``text``; empty = none."""
    if not flag.choices or text in flag.choices:
        return ""
    problem = "not supported yet by this version" if text in flag.later else "not one of the values known here"
    return f"--{flag.name}={text}: {problem}; use {_alternatives(flag.choices)}"


def out_of_range(flag: Flag, value: float) -> str:
    """The violation of ``flag``'s range by ``value``; empty = none."""
    finite = isinstance(value, int) or math.isfinite(value)
    if finite and flag.minimum <= value <= flag.maximum:
        return ""
    wanted = flag.range_text or "a finite number"
    return f"--{flag.name}={value}: out of range; use {wanted}"


def _alternatives(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _refuse(token: _Token, flags: Mapping[str, Flag], others: Mapping[str, OtherFlag]) -> None:
    """Raise ValueError unless the flag is one of ``others`` and asks for nothing."""
    if token.stray:
        raise ValueError(f"{token.name}: belongs to no flag; every setting is written --flag=value")
    if token.name not in others:
        near = difflib.get_close_matches(token.name, [*flags, *others], n=1, cutoff=0.6)
        hint = f"did you mean --{near[0]}?" if near else "see --help for all flags"
        shown = token.name if token.text is None else f"{token.name}={token.text}"
        raise ValueError(f"--{shown}: unknown flag; {hint}")
    other = others[token.name]
    value = "true" if token.text is None else token.text
    if not other.accepts(value):
        raise ValueError(
            f"--{token.name}={value}: {other.feature} is not supported yet by this version; "
            f"leave the flag out (its default is {other.harmless[0] or 'empty'})"
        )


def _same(value: str, harmless: str) -> bool:
    if value == harmless:
        return True
    if harmless in {"true", "false"}:
        return _BOOLEANS.get(value.lower()) is (harmless == "true")
    try:
        return float(value) == float(harmless)
    except ValueError:
        return False
