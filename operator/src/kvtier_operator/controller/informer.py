"""Watches the API server with kopf and hands records to the event loop. IO.

kopf is an informer here and nothing else: event handlers only, so that it writes nothing to any object, neither
annotations nor finalizers. It runs in a thread of its own with its own event loop, because it ends every task of its
loop when it stops, and because parsing a thousand objects must not hold up a lease.

kopf's own indexes are not used: until the first lists are complete they hold every raw object in memory at once, and
they never learn of objects that vanished while a watch was away. `relist` finds those.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import kopf

from kvtier_operator.controller.credentials import login
from kvtier_operator.controller.index import Record, record_of
from kvtier_operator.kinds import CLUSTER_KIND, Kind
from kvtier_operator.labels import MANAGED_BY, MANAGER

INACTIVITY_S = 70.0
"""A watch that is silent for longer, bookmarks included, is dead and gets replaced."""
_BEAT_S = 0.2
_RESTART_S = (0.5, 1, 2, 5, 10)

_LOG = logging.getLogger(__name__)


class Seen(Enum):
    """How a record came to be."""

    LISTED = auto()
    """It stood in a list. After the first one, that is a sign that a watch had a gap: lists follow those only."""
    CHANGED = auto()
    GONE = auto()


Deliver = Callable[[Record, Seen], None]
"""Takes a record. Called in the informer's thread."""

_TYPES = {None: Seen.LISTED, "DELETED": Seen.GONE}


class _RemembersNothing(kopf.DiffBaseStorage):
    """kopf would compute a digest of each object for change handlers, of which there are none."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> Any:  # noqa: ARG002
        return {}

    def fetch(self, *, body: kopf.Body) -> None:  # noqa: ARG002
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: Any) -> None:
        """There is no essence to store."""


@dataclass(slots=True)
class Informer:
    """The watches.

    Args:
        kinds: to watch; all but KVCacheClusters by our label.
        namespaces: to watch; empty = all.
        deliver: takes the records.
        restarted: told when the watches ended unasked.
    """

    kinds: Sequence[Kind]
    namespaces: Collection[str]
    deliver: Deliver
    restarted: Callable[[], None] = lambda: None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _beat: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Watch from now on, until `stop`."""
        self._thread = threading.Thread(target=self._run, name="informer", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the watches."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def silence_s(self) -> float:
        """Seconds since the watches' event loop last turned."""
        return time.monotonic() - self._beat

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                asyncio.run(self._watch())
            except Exception:  # noqa: BLE001 - kopf ends with any error that a server may answer
                _LOG.warning("the watches ended; setting them up again", exc_info=True)
            if self._stop.is_set():
                return
            failures = 0 if time.monotonic() - started > 60 else failures + 1  # noqa: PLR2004
            self.restarted()
            self._stop.wait(_RESTART_S[min(failures, len(_RESTART_S) - 1)])

    async def _watch(self) -> None:
        # Not the own event: kopf would wait for it in a thread that cannot be cancelled, so that a kopf that has
        # failed would never end.
        ended = asyncio.Event()
        heart = asyncio.create_task(self._keep_beating(ended))
        try:
            await kopf.operator(
                registry=self._registry(),
                settings=informer_settings(self.kinds),
                standalone=True,
                clusterwide=not self.namespaces,
                namespaces=tuple(self.namespaces),
                stop_flag=ended,
            )
        finally:
            heart.cancel()

    async def _keep_beating(self, ended: asyncio.Event) -> None:
        while not self._stop.is_set():
            self._beat = time.monotonic()
            await asyncio.sleep(_BEAT_S)
        ended.set()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry, id="login")(login)
        for kind in self.kinds:
            group, _, version = kind.api.rpartition("/")
            kopf.on.event(group, version, kind.plural, registry=registry, id=kind.plural)(self._handler(kind))
        return registry

    def _handler(self, kind: Kind) -> Any:
        async def handle(event: Mapping[str, Any], **_: Any) -> None:
            try:
                self.deliver(record_of(kind.name, event["object"]), _TYPES.get(event["type"], Seen.CHANGED))
            except Exception:  # noqa: BLE001 - one unreadable object must not end the watch of all others
                _LOG.exception("cannot read %s %s", kind.name, event["object"].get("metadata", {}).get("name"))

        return handle


def informer_settings(kinds: Sequence[Kind]) -> kopf.OperatorSettings:
    """Kopf's settings, each for a reason."""
    settings = kopf.OperatorSettings()
    # Foreign pods stay off the wire and out of memory.
    for kind in kinds:
        if kind != CLUSTER_KIND:
            group, _, version = kind.api.rpartition("/")
            settings.watching.label_selectors[group, version, kind.plural] = f"{MANAGED_BY}={MANAGER}"
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = INACTIVITY_S
    settings.watching.chunk_size = 100  # a page of raw objects is held at once for each kind
    settings.networking.request_timeout = 15
    settings.networking.error_backoffs = [1, 1, 2, 2, 3, 3]
    # A handler takes no time, so a worker has no reason to wait for more of the same object.
    settings.queueing.idle_timeout = 0.05
    # kinds and namespaces are known: no rights on definitions and namespaces are asked for.
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.execution.max_workers = 1
    settings.persistence.finalizer = "kvtier.dev/kopf"  # never set; in case somebody adds a change handler
    settings.persistence.diffbase_storage = _RemembersNothing()
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix="kvtier.dev", v1=False)
    # The main thread decides when the process ends.
    settings.process.ultimate_exiting_timeout = None
    return settings
