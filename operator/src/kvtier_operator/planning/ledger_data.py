"""A ledger as the data of a ConfigMap, and a set's blocks as an annotation. Pure; called by `observe` and `apply`.

One key a cluster, so that one operator's write shows in a diff what it changed:

    llm.qwen3.1b9d…: {"blocks":{"engine/A/0":[20000,20006]},"retired":[["engine/A/1",20006,20012,1767225600.0]]}

Blocks are ``[start, stop)``, with the time of release behind. The reader is strict: what it cannot trust is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from kvtier_operator.api.schema.limits import LAST_PORT
from kvtier_operator.errors import LedgerError
from kvtier_operator.planning.ledger import BlockKey, Entry, Ledger, Retired
from kvtier_operator.planning.ports import PortBlock

FIX = "put the value right, or delete the ConfigMap: it is made again from the workloads that exist"
_END_OF_TIME = 1e12
_KEY = re.compile(r"((?:api/)?[a-z0-9][-a-z0-9]*)/([AB]?)/(-1|[0-9]{1,5})")
_SLOT = re.compile(r"(-1|[0-9]{1,5}):([0-9]{1,5})-([0-9]{1,5})")


def ledger_data(ledger: Ledger) -> dict[str, str]:
    """The ``data`` of the ConfigMap; equal ledgers give equal text."""
    data: dict[str, str] = {}
    for cluster in sorted(ledger.clusters):
        blocks = {
            str(key): _span(entry.block, entry.released_at)
            for key, entry in sorted(ledger.entries.items(), key=lambda item: item[0])
            if key.cluster == cluster
        }
        retired = [
            [str(former.key), *_span(former.block, former.released_at)]
            for former in ledger.retired
            if former.key.cluster == cluster
        ]
        document = {"blocks": blocks} | ({"retired": retired} if retired else {})
        data[cluster] = json.dumps(document, separators=(",", ":"))
    return data


def read_ledger(data: Mapping[str, str], resource_version: str) -> Ledger:
    """Read what `ledger_data` wrote.

    Raises:
        LedgerError: some entry cannot be trusted; names all of them and the fix.
    """
    problems: list[str] = []
    entries: dict[BlockKey, Entry] = {}
    retired: list[Retired] = []
    for cluster, text in data.items():
        document = _document(cluster, text, problems)
        blocks, former = document.get("blocks", {}), document.get("retired", [])
        for name, span in blocks.items():
            found = _entry(cluster, name, span, problems)
            if found is not None:
                entries[found[0]] = found[1]
        for item in former:
            name, span = (item[0], item[1:]) if isinstance(item, list) and item else (item, None)
            found = _entry(cluster, name, span, problems)
            if found is not None:
                retired.append(Retired(found[0], found[1].block, found[1].released_at))
    ledger = Ledger(entries, tuple(retired), resource_version)
    problems += _overlaps(ledger)
    if problems:
        raise LedgerError(problems, FIX)
    return ledger


def slots_text(blocks: Mapping[int, PortBlock]) -> str:
    """The blocks of one set by slot, as the value of its annotation ``kvtier.dev/port-block``."""
    return ",".join(f"{slot}:{block}" for slot, block in sorted(blocks.items()))


def read_slots(text: str) -> Mapping[int, PortBlock]:
    """Read what `slots_text` wrote; what somebody edited into nonsense is left out."""
    found = (_SLOT.fullmatch(part) for part in text.split(","))
    blocks = {int(match[1]): PortBlock(int(match[2]), int(match[3]) + 1) for match in found if match}
    return {slot: block for slot, block in blocks.items() if _valid(block)}


def _span(block: PortBlock, released_at: float | None) -> list[float]:
    return [block.start, block.stop] if released_at is None else [block.start, block.stop, released_at]


def _document(cluster: str, text: str, problems: list[str]) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"ledger data[{cluster!r}] = {text[:80]!r}: is no JSON ({error})")
        return {}
    shapes = {"blocks": dict, "retired": list}
    if not isinstance(document, dict) or not all(
        isinstance(value, shapes.get(name, type(None))) for name, value in document.items()
    ):
        problems.append(f"ledger data[{cluster!r}] = {text[:80]!r}: is no record of blocks and retired ones")
        return {}
    return document


def _entry(cluster: str, name: object, span: object, problems: list[str]) -> tuple[BlockKey, Entry] | None:
    match = _KEY.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        problems.append(f"ledger data[{cluster!r}]: {name!r} is no owner, which would be GROUP/LANE/SLOT")
        return None
    entry = _read_span(span)
    if entry is None:
        problems.append(f"ledger data[{cluster!r}].{name} = {span!r}: is no [start, stop] or [start, stop, released]")
        return None
    return BlockKey(cluster, match[1], match[2], int(match[3])), entry


def _read_span(span: object) -> Entry | None:
    match span:
        case [int(start), int(stop)]:
            entry = Entry(PortBlock(start, stop))
        case [int(start), int(stop), (int() | float()) as released] if 0 <= released <= _END_OF_TIME:
            entry = Entry(PortBlock(start, stop), float(released))
        case _:
            return None
    return entry if _valid(entry.block) else None


def _valid(block: PortBlock) -> bool:
    return 0 < block.start < block.stop <= LAST_PORT + 1


def _overlaps(ledger: Ledger) -> Iterator[str]:
    claims = sorted(ledger.claims(), key=lambda claim: (claim[0].start, claim[0].stop))
    for (block, key), (other, holder) in pairwise(claims):
        if block.meets(other):
            yield f"ledger data[{holder.cluster!r}].{holder} = {other}: meets {key} of {key.cluster}, which has {block}"
