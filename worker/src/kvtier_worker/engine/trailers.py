"""The integrity trailer of an object: its content's digest, and whose it is. Checked after a G2H.

    digest   of the payload; written after a D2H
    owner    after a D2H the payload's length; before a put the digest of the key, seeded with that length

Without the owner, the whole object of another block would pass for this one, and a store that hands out memory again
while somebody reads from it can deliver exactly that.

Raw addresses, because the bytes belong to the arena; nothing is copied. The digest runs outside the interpreter lock
for objects of the sizes that matter.
"""

from __future__ import annotations

import ctypes
import struct

import xxhash

from kvtier_worker.core.layout import TRAILER_BYTES

_TRAILER = struct.Struct("<QQ")
_OWNER = struct.Struct("<Q")
_OWNER_OFFSET = TRAILER_BYTES - _OWNER.size


def _digest(address: int, payload_bytes: int) -> int:
    payload = (ctypes.c_uint8 * payload_bytes).from_address(address)
    digest: int = xxhash.xxh3_64_intdigest(payload)
    return digest


def _owner(payload_bytes: int, key: str) -> int:
    owner: int = xxhash.xxh3_64_intdigest(key.encode(), payload_bytes)
    return owner


def write_trailer(address: int, payload_bytes: int) -> None:
    """Append digest and length to the payload at ``address``."""
    trailer = _TRAILER.pack(_digest(address, payload_bytes), payload_bytes)
    ctypes.memmove(address + payload_bytes, trailer, TRAILER_BYTES)


def sign_trailer(address: int, payload_bytes: int, key: str) -> None:
    """Say whose object it is, before it leaves under ``key``. Idempotent."""
    ctypes.memmove(address + payload_bytes + _OWNER_OFFSET, _OWNER.pack(_owner(payload_bytes, key)), _OWNER.size)


def trailer_is_valid(address: int, payload_bytes: int, key: str | None = None) -> bool:
    """Whether the object at ``address`` is exactly what was written, for ``key``; None = it has not left yet."""
    digest: int
    owner: int
    digest, owner = _TRAILER.unpack(ctypes.string_at(address + payload_bytes, TRAILER_BYTES))
    expected = payload_bytes if key is None else _owner(payload_bytes, key)
    return owner == expected and digest == _digest(address, payload_bytes)
