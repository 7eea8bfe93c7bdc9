"""A `WorkerGroup` whose ranks are threads: the worker's real runtime and wire format, without processes.

For tests that need hundreds of engines: a rank starts in a millisecond; store, copy engine and model are at hand.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from kvtier_worker.engine.messages import FromWorker, Shutdown, ToWorker, WorkerFailed, WorkerProgress, WorkerReady
from kvtier_worker.engine.wire import decode_from_worker, decode_to_worker, encode
from kvtier_worker.engine.worker_runtime import WorkerLink, WorkerRuntime
from kvtier_worker.errors import WorkerDied

_WAKE = b""
"""An empty frame: no message encodes to it."""


class QueueLink:
    """The worker's end: two queues of encoded messages. See `WorkerLink`."""

    def __init__(self, outbox: queue.SimpleQueue[bytes]) -> None:
        self._outbox = outbox
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def deliver(self, frame: bytes) -> None:
        """Called by the group."""
        self._requests.put(frame)

    def receive(self) -> ToWorker | None:
        """See `WorkerLink`."""
        frame = self._requests.get()
        return None if frame is None else decode_to_worker(frame)

    def send(self, message: FromWorker) -> None:
        """See `WorkerLink`."""
        self._outbox.put(encode(message))

    def close(self) -> None:
        """See `WorkerLink`."""
        self._requests.put(None)


class ThreadWorkerGroup:
    """See `WorkerGroup`.

    Args:
        ready: what each rank says of itself, in rank order.
        build: makes the runtime of a rank; called in the thread that will run it.
    """

    def __init__(self, ready: Sequence[WorkerReady], build: Callable[[int, WorkerLink], WorkerRuntime]) -> None:
        self._ready = tuple(ready)
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._links = [QueueLink(self._inbox) for _ in ready]
        self._threads = [
            threading.Thread(target=lambda rank=rank, link=link: build(rank, link).run(), name=f"rank-{rank}")
            for rank, link in enumerate(self._links)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def ready(self) -> Sequence[WorkerReady]:
        """See `WorkerGroup`."""
        return self._ready

    def send(self, message: ToWorker) -> None:
        """See `WorkerGroup`."""
        frame = encode(message)
        for link in self._links:
            link.deliver(frame)

    def poll(self, timeout_s: float) -> Sequence[FromWorker]:
        """See `WorkerGroup`."""
        frames: list[bytes] = []
        try:
            frames.append(self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait())
            while True:
                frames.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        messages: list[FromWorker] = []
        for message in (decode_from_worker(frame) for frame in frames if frame != _WAKE):
            if isinstance(message, WorkerFailed):
                raise WorkerDied(f"rank {message.rank}: {message.error}")
            if not isinstance(message, WorkerProgress):
                messages.append(message)
        return messages

    def wake(self) -> None:
        """See `WorkerGroup`."""
        self._inbox.put(_WAKE)

    def close(self, timeout_s: float) -> None:
        """See `WorkerGroup`.

        Raises:
            WorkerDied: a rank did not end in time; its thread stays behind.
        """
        self.send(Shutdown())
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            raise WorkerDied(f"did not end within {timeout_s} s: {stuck}")
