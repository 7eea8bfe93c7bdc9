"""Reads the audit log of a throw-away control plane: who asked for which change. Called by `control_plane`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True, slots=True)
class Write:
    """One request that asked the API server to change something.

    Attributes:
        user: who asked.
        verb: create, update, patch, delete, deletecollection.
        resource: plural, as in ``statefulsets`` or ``pods/status``.
        namespace: empty for what has none.
        name: empty for collections and generated names.
        manager: field manager that the request named; empty when it named none.
        code: HTTP status of the answer.
    """

    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    manager: str
    code: int


def read_writes(path: Path) -> Iterator[Write]:
    """Every finished write of an audit log, oldest first; none when there is no log yet."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as log:
        for line in log:
            # A line without its end is still being written.
            if line.endswith("\n"):
                yield _parsed(line)


def _parsed(line: str) -> Write:
    event = json.loads(line)
    target = event.get("objectRef", {})
    return Write(
        user=event["user"]["username"],
        verb=event["verb"],
        resource="/".join(filter(None, (target.get("resource", ""), target.get("subresource", "")))),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        manager=parse_qs(urlsplit(event["requestURI"]).query).get("fieldManager", [""])[0],
        code=event.get("responseStatus", {}).get("code", 0),
    )
