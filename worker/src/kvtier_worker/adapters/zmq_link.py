"""The worker's end of the connection: one socket for requests, one for answers."""

from __future__ import annotations

import os
import threading

import zmq

from kvtier_worker.engine.messages import FromWorker, ToWorker, WorkerProgress
from kvtier_worker.engine.wire import decode_to_worker, encode

_LINGER_MS = 1000
"""How long answers may wait for an engine that does not read, at the end."""


class ZmqWorkerLink:
    """See `WorkerLink`. Answers are sent by the thread that has them, under a lock, so none waits for another thread.

    Args:
        requests: endpoint to listen on.
        answers: endpoint to send to, where the engine listens.
    """

    def __init__(self, requests: str, answers: str) -> None:
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PULL)
        self._requests.set_hwm(0)
        self._requests.bind(requests)
        self._answers = self._context.socket(zmq.PUSH)
        self._answers.set_hwm(0)
        self._answers.setsockopt(zmq.LINGER, _LINGER_MS)
        self._answers.connect(answers)
        self._sending = threading.Lock()
        self._closed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._requests, zmq.POLLIN)
        self._poller.register(self._closed, zmq.POLLIN)

    def receive(self) -> ToWorker | None:
        """See `WorkerLink`."""
        ready = dict(self._poller.poll())
        if self._closed in ready:
            return None
        return decode_to_worker(self._requests.recv())

    def send(self, message: FromWorker | WorkerProgress) -> None:
        """See `WorkerLink`."""
        frame = encode(message)
        with self._sending:
            self._answers.send(frame)

    def close(self) -> None:
        """See `WorkerLink`."""
        os.eventfd_write(self._closed, 1)

    def destroy(self) -> None:
        """Send what is left, then free everything. Only when no other thread uses the link."""
        self._requests.close(linger=0)
        self._answers.close()
        self._context.term()
        os.close(self._closed)
