"""A small object that a storage node writes to itself and reads back: the only health that can be trusted.

Mooncake's own health call says "fine" while storage or master are dead. The object is pinned, so it is there until
the node leaves or the master forgets everything; in that case it is written again.
"""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass
from typing import Any

from kvtier_worker.mooncake_client.guard import RawClient

CANARY_BYTES = 4096
_NO_SPACE = -200


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """Outcome of one look.

    Attributes:
        problem: a word for the metric and a sentence for the log; empty = the bytes came back right.
    """

    problem: str
    detail: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the node works."""
        return not self.problem


class Canary:
    """Writes and reads through one client. Called by one thread.

    Args:
        segment: name of this node's segment, where the object goes.
        address: `CANARY_BYTES` * 2 bytes that the client may touch, registered: source, then target.
        replicate_config: Mooncake's record for puts; changed here to pin the object to the segment.
    """

    def __init__(self, segment: str, address: int, replicate_config: Any) -> None:
        self._key = f"kvtier-canary/{segment}/{uuid.uuid4().hex}"
        self._source, self._target = address, address + CANARY_BYTES
        self._content = (uuid.uuid4().bytes * (CANARY_BYTES // 16))[:CANARY_BYTES]
        self._config = replicate_config
        self._config.replica_num = 1
        self._config.with_hard_pin = True
        self._config.preferred_segment = segment

    @property
    def key(self) -> str:
        """Of the object."""
        return self._key

    def look(self, raw: RawClient) -> CanaryResult:
        """Read the object; write it first if it is not there."""
        if self._reads_right(raw):
            return CanaryResult("")
        ctypes.memmove(self._source, self._content, CANARY_BYTES)
        code = raw.batch_put_from([self._key], [self._source], [CANARY_BYTES], self._config)[0]
        if code == _NO_SPACE:
            return CanaryResult("no_space", "the segment has no room for a test object")
        if code != 0:
            return CanaryResult("put", f"the test object could not be written ({code})")
        if self._reads_right(raw):
            return CanaryResult("")
        return CanaryResult("get", "the test object did not come back as it was written")

    def _reads_right(self, raw: RawClient) -> bool:
        ctypes.memset(self._target, 0, CANARY_BYTES)
        code = raw.batch_get_into([self._key], [self._target], [CANARY_BYTES])[0]
        return code == CANARY_BYTES and ctypes.string_at(self._target, CANARY_BYTES) == self._content
