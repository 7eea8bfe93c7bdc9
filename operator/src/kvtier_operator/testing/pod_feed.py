"""Follows every pod that is bound to a node, over broken connections and restarts of the API server. IO; one thread.

Called by `hollow_nodes`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from http.client import HTTPException
from typing import Protocol

from kvtier_operator.testing.api_client import ApiClient, Json, RequestFailed, Watch

RETRY_S = 0.2
BOUND_PODS = "/api/v1/pods?fieldSelector=spec.nodeName%21%3D"


class Listener(Protocol):
    """Is told about pods, by the thread of the feed."""

    def known(self) -> Iterable[str]:
        """Uids of the pods that it holds."""
        ...

    def seen(self, pod: Json) -> None:
        """A pod is there, or has changed."""
        ...

    def gone(self, uid: str) -> None:
        """A pod is gone; perhaps said of one that it never saw."""
        ...


class PodFeed:
    """The thread and its connection.

    Args:
        api: of the control plane.
        listener: is told.
    """

    def __init__(self, api: ApiClient, listener: Listener) -> None:
        self._api = api
        self._listener = listener
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pod-feed", daemon=True)

    def start(self) -> None:
        """Begin with all pods that are there."""
        self._thread.start()

    def stop(self) -> None:
        """Tell nothing any more; returns when the thread has ended."""
        self._stopping.set()
        with self._lock:
            if self._watch is not None:
                self._watch.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except (OSError, HTTPException, RequestFailed, ValueError):
                # ValueError: a line that the end of the connection cut.
                self._stopping.wait(RETRY_S)

    def _follow(self) -> None:
        """Tell about all pods, then about every change, until the connection ends."""
        listed = self._api.get(BOUND_PODS)
        there = {pod["metadata"]["uid"]: pod for pod in listed["items"]}
        for uid in set(self._listener.known()) - there.keys():
            self._listener.gone(uid)
        for pod in there.values():
            self._listener.seen(pod)
        version = listed["metadata"]["resourceVersion"]
        watch = self._api.watch(f"{BOUND_PODS}&watch=1&resourceVersion={version}")
        try:
            with self._lock:
                self._watch = watch
            # Whoever stopped us before that line did not see the watch.
            if not self._stopping.is_set():
                self._pass_on(watch)
        finally:
            with self._lock:
                self._watch = None
            watch.release()

    def _pass_on(self, watch: Watch) -> None:
        for event in watch:
            if event["type"] == "ERROR":
                return
            if event["type"] == "DELETED":
                self._listener.gone(event["object"]["metadata"]["uid"])
            else:
                self._listener.seen(event["object"])
