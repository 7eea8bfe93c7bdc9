"""Finds where a live object has left our intent. Pure; called by `upkeep`.

Only what we wrote counts: the API server adds defaults, other managers own fields of their own, and neither is drift.
Comparing whole objects would make every default look like an edit, and the operator would write for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from kvtier_operator.api.units import parse_amount

_MERGED_LISTS: Mapping[str, str] = {
    "containers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "topologySpreadConstraints": "topologyKey",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Lists that the API server merges item by item, and the field that tells items apart. The others are one value."""

_HOLDERS_OF_QUANTITIES = frozenset({"requests", "limits"})
_QUANTITIES = frozenset({"sizeLimit", "storage"})
_SHOWN = 60
"""Characters of a value in a message."""


def first_difference(intent: Any, live: Any) -> str:
    """The first value of ours that is not so any more, as ``PATH is LIVE instead of WANTED``; empty = none."""
    return _compare(intent, live, ())


def _compare(intent: Any, live: Any, path: tuple[str, ...]) -> str:
    if intent == live:
        return ""  # nearly always, and much faster than field by field
    if _is_empty(intent):
        # The server drops some empty values and keeps others.
        return "" if live is None or isinstance(live, type(intent)) else _say(intent, live, path)
    if isinstance(intent, dict):
        return _compare_fields(intent, live, path)
    if isinstance(intent, list | tuple):
        return _compare_items(intent, live, path)
    return "" if _equal(intent, live, path) else _say(intent, live, path)


def _compare_fields(intent: Mapping[str, Any], live: Any, path: tuple[str, ...]) -> str:
    if not isinstance(live, dict):
        return _say(intent, live, path)
    found = (_compare(value, live.get(name), (*path, name)) for name, value in intent.items())
    return next(filter(None, found), "")


def _compare_items(intent: Sequence[Any], live: Any, path: tuple[str, ...]) -> str:
    if not isinstance(live, list | tuple):
        return _say(intent, live, path)
    key = _merge_key(intent, path)
    if not key:
        if len(intent) != len(live):
            return _say(intent, live, path)
        pairs = [(str(index), wanted, live[index]) for index, wanted in enumerate(intent)]
    else:
        by_key = {item.get(key): item for item in live if isinstance(item, dict)}
        pairs = [(str(wanted[key]), wanted, by_key.get(wanted[key])) for wanted in intent]
    found = (_compare(wanted, present, (*path[:-1], f"{path[-1]}[{name}]")) for name, wanted, present in pairs)
    return next(filter(None, found), "")


def _merge_key(intent: Sequence[Any], path: tuple[str, ...]) -> str:
    """The field by which the server tells items apart; empty when it replaces the list as a whole."""
    if not all(isinstance(item, dict) for item in intent):
        return ""
    key = _MERGED_LISTS.get(path[-1], "") if path else ""
    if path[-1:] == ("ports",):
        # Ports of containers and Services are merged, those of NetworkPolicies are not.
        container = all("containerPort" in item for item in intent)
        key = "containerPort" if container else "port" if path == ("spec", "ports") else ""
    keys = [item.get(key) for item in intent] if key else []
    return key if keys and None not in keys and len(set(keys)) == len(keys) else ""


def _equal(intent: Any, live: Any, path: tuple[str, ...]) -> bool:
    if type(intent) is type(live) and intent == live:
        return True
    if live is None or isinstance(intent, bool) or isinstance(live, bool | dict | list):
        return False
    if path[-1] in _QUANTITIES or _HOLDERS_OF_QUANTITIES.intersection(path[-2:-1]):
        return _quantity(intent) == _quantity(live)
    # Ports and budgets may be a number or its text.
    return str(intent) == str(live)


def _quantity(value: Any) -> Fraction | str:
    amount = parse_amount(value)
    return str(value) if amount is None else amount


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | str) and not value


def _say(intent: Any, live: Any, path: tuple[str, ...]) -> str:
    return f"{'.'.join(path)} is {_short(live)} instead of {_short(intent)}"


def _short(value: Any) -> str:
    if value is None:
        return "absent"
    text = str(value) if isinstance(value, dict | list | tuple) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
