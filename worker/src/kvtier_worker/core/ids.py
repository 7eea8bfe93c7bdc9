"""Names for the things every layer talks about: blocks, slots, hashes, tiers, types and roles.

Imported by everyone; decides nothing. Device blocks and host slots are different types on purpose: mixing the two is
the classic way to read somebody else's tokens.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NewType

BlockId = NewType("BlockId", int)
"""Slot of a device pool. 0 is padding and is never handed out."""

HostSlot = NewType("HostSlot", int)
"""Slot of the pinned host arena. 0 is padding and is never handed out."""

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: the chained XXH3-128 of a full token block."""

RequestId = NewType("RequestId", str)
BatchId = NewType("BatchId", int)
"""Identifies one forward step and, with it, the restores registered for that step."""

JobId = NewType("JobId", int)
"""Identifies one prefetch or one write-back."""

Rank = NewType("Rank", int)


class Tier(StrEnum):
    """Where a cached token was found."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"


class BlockType(IntEnum):
    """What one logical block holds. The values are part of the store key and never change."""

    KV = 0
    SWA = 1
    C4 = 2
    C128 = 3
    EMBEDDING = 4
    LINEAR = 5


class TensorRole(IntEnum):
    """What one tensor of a block is. The values are part of the schema hash and never change."""

    KEY = 0
    VALUE = 1
    INDEX = 2
    CONV = 3
    SSM = 4
    INDEX_SCALE = 5
    KEY_SCALE = 6
    VALUE_SCALE = 7
    WINDOW = 8
    CACHE_SCALE = 9
    KV_STATE = 10
    SCORE_STATE = 11
    INDEX_KV_STATE = 12
    INDEX_SCORE_STATE = 13
    SWA = 14
    COMPRESS_STATE = 15
    COMPRESS_INDEX_STATE = 16


class CacheRole(StrEnum):
    """Which model a cache domain belongs to."""

    TARGET = "target"
    DRAFT = "draft"


class DType(IntEnum):
    """Element types; the values are torch's ScalarType numbers, which the schema hash contains."""

    UINT8 = 0
    INT8 = 1
    INT32 = 3
    FLOAT16 = 5
    FLOAT32 = 6
    BFLOAT16 = 15

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {0: 1, 1: 1, 3: 4, 5: 2, 6: 4, 15: 2}[int(self)]
