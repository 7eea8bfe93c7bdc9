"""What a worker process is told at its start: one line of JSON on its standard input.

The pipe stays open afterwards: its end of file tells the worker that the engine process is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """One rank's start.

    Attributes:
        settings: of the engine, secrets blanked.
        rank: of ``settings.tp_size``.
        requests: endpoint that the worker listens on.
        answers: endpoint that the worker sends answers to.
        rendezvous: ``host:port`` where the ranks meet; empty for one rank.
    """

    settings: WorkerSettings
    rank: int
    requests: str
    answers: str
    rendezvous: str


def encode_start(start: WorkerStart) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(start) + b"\n"


def decode_start(line: bytes) -> WorkerStart:
    """What `encode_start` made.

    Raises:
        ProtocolError: it did not.
    """
    try:
        return msgspec.json.decode(line, type=WorkerStart)
    except msgspec.MsgspecError as error:
        msg = f"start of a worker: {error}"
        raise ProtocolError(msg) from error
