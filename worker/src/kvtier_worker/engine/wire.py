"""Bytes of the messages between the engine process and its workers: MessagePack, one frame a message.

Every tag is the name of its type, so a message of the wrong direction fails to decode instead of being misread.
"""

from __future__ import annotations

import msgspec

from kvtier_worker.engine.messages import FromWorker, Message, ToWorker, WorkerProgress
from kvtier_worker.errors import ProtocolError

_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker | WorkerProgress] = msgspec.msgpack.Decoder(
    FromWorker | WorkerProgress
)


def encode(message: Message) -> bytes:
    """One message as bytes."""
    return msgspec.msgpack.encode(message)


def decode_to_worker(frame: bytes) -> ToWorker:
    """What the engine sent.

    Raises:
        ProtocolError: not one of its messages.
    """
    try:
        return _TO_WORKER.decode(frame)
    except msgspec.MsgspecError as error:
        msg = f"message from the engine: {error}"
        raise ProtocolError(msg) from error


def decode_from_worker(frame: bytes) -> FromWorker | WorkerProgress:
    """What a worker sent.

    Raises:
        ProtocolError: not one of its messages.
    """
    try:
        return _FROM_WORKER.decode(frame)
    except msgspec.MsgspecError as error:
        msg = f"message from a worker: {error}"
        raise ProtocolError(msg) from error
