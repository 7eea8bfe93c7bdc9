"""Copy streams that are leased: a failure on one stays with whoever holds it."""

from __future__ import annotations

import logging
import threading

from kvtier_worker.engine.ports import CopyEngine, CopyStream
from kvtier_worker.errors import TransferFailed

log = logging.getLogger(__name__)


class CopyStreamPool:
    """At most ``num_streams`` streams, made when they are first needed. Thread-safe."""

    def __init__(self, engine: CopyEngine, num_streams: int) -> None:
        self._engine = engine
        self._num_streams = num_streams
        self._lock = threading.Lock()
        self._free: list[CopyStream] = []
        self._made = 0

    @property
    def num_leased(self) -> int:
        """Streams somebody holds."""
        with self._lock:
            return self._made - len(self._free)

    def lease(self) -> CopyStream:
        """A stream for one restore or write-back; never waits.

        Raises:
            TransferFailed: all are leased.
        """
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made == self._num_streams:
                msg = f"all {self._num_streams} copy streams are leased"
                raise TransferFailed(msg)
            stream = self._engine.stream()
            self._made += 1
            return stream

    def release(self, stream: CopyStream, *, drain: bool) -> None:
        """Give a stream back; ``drain`` waits for its work first and clears its failure."""
        if drain:
            try:
                stream.synchronize()
            except TransferFailed as error:
                log.warning("copy stream drained after a failure error=%r", str(error))
        with self._lock:
            self._free.append(stream)
