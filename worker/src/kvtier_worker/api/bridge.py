"""From the engine thread to the event loop: outputs are queued and the loop is woken once for many of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from kvtier_worker.engine.frontend import OutputSink, RequestOutput


class Channel:
    """Outputs of the sequences of one HTTP request, read by one task of the event loop."""

    __slots__ = ("_arrived", "_items")

    def __init__(self) -> None:
        self._items: list[RequestOutput] = []
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output. Event loop only."""
        self._items.append(output)
        self._arrived.set()

    async def take(self) -> list[RequestOutput]:
        """Everything that came since the last call; waits for at least one output."""
        await self._arrived.wait()
        self._arrived.clear()
        items, self._items = self._items, []
        return items


class OutputBridge:
    """Carries outputs to their channels.

    The engine thread emits a step's outputs in a burst; the first schedules one callback on the loop, which then
    takes them all, so that the loop is woken once a step and not once a token.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[Channel, RequestOutput]] = deque()
        self._scheduled = False

    def sink(self, channel: Channel) -> OutputSink:
        """The function to hand to the engine for sequences of ``channel``. Called on the event loop."""
        loop = asyncio.get_running_loop()

        def deliver(output: RequestOutput) -> None:
            self._queue.append((channel, output))
            if not self._scheduled:
                self._scheduled = True
                self._wake(loop)

        return deliver

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is gone and nobody reads
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False  # before the queue is read: what comes later schedules again
        while self._queue:
            channel, output = self._queue.popleft()
            channel.put(output)
