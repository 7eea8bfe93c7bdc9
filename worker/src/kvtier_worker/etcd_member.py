"""``kvtier etcd-member --config=FILE --endpoints=A;B -- FLAGS…``: decides how a member of a managed etcd starts.

Run before etcd itself, with the flags that etcd would get; writes them to FILE, which etcd then reads
(`--config-file`). A member whose data is gone cannot simply start again: the others know it as one that has been there,
and etcd refuses for good. So it is removed and added anew, which only the others can do:

    has data                                    as the flags say; the data knows everything
    nobody answers                              as the flags say: all start for the first time
    others know it, it was never there          as the flags say; if it was added later, as one who joins
    others know it, it was there, its data gone it is removed, added and joins
    others do not know it                       it is added and joins

Exit status: 2 for wrong arguments, 1 when the others refuse until the patience is over.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

_PATIENCE_S = 60.0
_PAUSE_S = 1.0
_REQUEST_S = 5.0
_OWN = ("config", "endpoints")
_NUMBERS = frozenset({"quota-backend-bytes"})
"""Flags that a configuration file must not write as text."""


class EtcdRefused(Exception):
    """No member did what was asked."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member as the others know it; without client URLs it was never there."""

    id: str
    name: str
    peer_urls: tuple[str, ...]
    client_urls: tuple[str, ...]


class Start(StrEnum):
    """How a member without data starts."""

    AS_GIVEN = "as given"
    JOIN = "join"
    ADD = "add"
    REPLACE = "replace"


def choose(members: Sequence[Member], peer_url: str) -> Start:
    """How the member with this peer URL starts when it has no data.

    Args:
        members: as the others know them; empty = nobody answers.
        peer_url: the member's own.
    """
    if not members:
        return Start.AS_GIVEN
    known = next((member for member in members if peer_url in member.peer_urls), None)
    if known is None:
        return Start.ADD
    if known.client_urls:
        return Start.REPLACE
    return Start.AS_GIVEN if known.name else Start.JOIN


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    own, flags = _flags(words[:at]), _flags(words[at + 1 :])
    needed = ("data-dir", "initial-advertise-peer-urls", "initial-cluster", "name")
    if missing := [f"--{name}" for name in _OWN if name not in own] + [f"-- --{n}" for n in needed if n not in flags]:
        sys.stderr.write(f"kvtier etcd-member: missing {', '.join(missing)}\n\n{__doc__}\n")
        return 2
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            settings = _settings(flags, [one for one in own["endpoints"].split(";") if one])
            break
        except EtcdRefused as error:
            if time.monotonic() > deadline:
                sys.stderr.write(f"kvtier etcd-member: {error}\n")
                return 1
            time.sleep(_PAUSE_S)
    typed = {name: int(text) if name in _NUMBERS else text for name, text in settings.items()}
    Path(own["config"]).write_text(json.dumps(typed, indent=1), encoding="utf-8")
    return 0


def _settings(flags: Mapping[str, str], endpoints: Sequence[str]) -> Mapping[str, str]:
    """The flags that etcd should have now.

    Raises:
        EtcdRefused: the others answer but do not let it in yet.
    """
    if (Path(flags["data-dir"]) / "member").is_dir():
        return flags
    peer_url = flags["initial-advertise-peer-urls"]
    members = _members(endpoints)
    start = choose(members, peer_url)
    _say(f"no data, {len(members)} members answer: {start}")
    if start is Start.AS_GIVEN:
        return flags
    if start is Start.REPLACE:
        lost = next(member for member in members if peer_url in member.peer_urls)
        _ask(endpoints, "remove", {"ID": lost.id})
    if start is not Start.JOIN:
        members = _read(_ask(endpoints, "add", {"peerURLs": [peer_url]}))
    names = {url: name for name, _, url in (one.partition("=") for one in flags["initial-cluster"].split(","))}
    known = ((member.name or names.get(url, member.id), url) for member in members for url in member.peer_urls)
    cluster = ",".join(f"{flags['name'] if url == peer_url else name}={url}" for name, url in known)
    return {**flags, "initial-cluster-state": "existing", "initial-cluster": cluster}


def _members(endpoints: Sequence[str]) -> tuple[Member, ...]:
    """As a majority knows them; empty when there is none."""
    try:
        return _read(_ask(endpoints, "list", {"linearizable": True}))
    except EtcdRefused:
        return ()


def _ask(endpoints: Sequence[str], action: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Ask one member after the other until one does it."""
    problems = []
    for endpoint in endpoints:
        connection = http.client.HTTPConnection(endpoint, timeout=_REQUEST_S)
        try:
            connection.request("POST", f"/v3/cluster/member/{action}", json.dumps(body))
            response = connection.getresponse()
            answer: Mapping[str, Any] = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            problems.append(f"{endpoint}: {error}")
            continue
        finally:
            connection.close()
        if response.status == http.client.OK:
            return answer
        problems.append(f"{endpoint}: {answer.get('message', response.status)}")
    raise EtcdRefused(f"member {action}: {'; '.join(problems)}")


def _read(answer: Mapping[str, Any]) -> tuple[Member, ...]:
    return tuple(
        Member(str(one["ID"]), one.get("name", ""), tuple(one.get("peerURLs", ())), tuple(one.get("clientURLs", ())))
        for one in answer.get("members", ())
    )


def _flags(words: Sequence[str]) -> dict[str, str]:
    pairs = (word.removeprefix("--").partition("=") for word in words)
    return {name: text for name, _, text in pairs}


def _say(text: str) -> None:
    sys.stderr.write(f"kvtier etcd-member: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
