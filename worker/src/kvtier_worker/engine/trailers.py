"""The integrity trailer of an object in host memory: written after a D2H, checked after a G2H.

Raw addresses, because the bytes belong to the arena; nothing is copied. The digest runs outside the interpreter lock
for objects of the sizes that matter.
"""

from __future__ import annotations

import ctypes
import struct

import xxhash

from kvtier_worker.core.layout import TRAILER_BYTES

_TRAILER = struct.Struct("<QQ")


def _digest(address: int, payload_bytes: int) -> int:
    payload = (ctypes.c_uint8 * payload_bytes).from_address(address)
    digest: int = xxhash.xxh3_64_intdigest(payload)
    return digest


def write_trailer(address: int, payload_bytes: int) -> None:
    """Append digest and length to the payload at ``address``."""
    trailer = _TRAILER.pack(_digest(address, payload_bytes), payload_bytes)
    ctypes.memmove(address + payload_bytes, trailer, TRAILER_BYTES)


def trailer_is_valid(address: int, payload_bytes: int) -> bool:
    """Whether the object at ``address`` is exactly what was written."""
    digest: int
    length: int
    digest, length = _TRAILER.unpack(ctypes.string_at(address + payload_bytes, TRAILER_BYTES))
    return length == payload_bytes and digest == _digest(address, payload_bytes)
