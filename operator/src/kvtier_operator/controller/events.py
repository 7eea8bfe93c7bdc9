"""Events on KVCacheClusters, as `kubectl describe` shows them. IO.

Equal ones are written at most every five minutes. A state that lasts is planned again by every pass, also by those of
the next process: it is written once for as long as the API server keeps events. Failing to write one never fails a
pass: they are for people.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier_operator.api import API_VERSION, KIND
from kvtier_operator.api.units import timestamp
from kvtier_operator.cluster import Cluster
from kvtier_operator.controller.index import ClusterKey
from kvtier_operator.errors import ApiError
from kvtier_operator.kinds import EVENT_KIND
from kvtier_operator.labels import MANAGER
from kvtier_operator.log import event
from kvtier_operator.observed import Manifest
from kvtier_operator.planning.actions import Emit

REPEAT_AFTER_S = 300.0
KEPT_S = 3600.0
"""For how long API servers keep events."""
LASTING = frozenset({"ApplyRefused", "PortRangeExhausted", "PortTaken", "WaitingForCapacity"})
"""Reasons that tell of a state and not of something that happened."""
_LONGEST_MESSAGE = 1024

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Events:
    """Writes events.

    Args:
        cluster: the Kubernetes API.
        identity: of this operator.
        clock: monotonic seconds.
        wall: seconds since the epoch.
    """

    cluster: Cluster
    identity: str
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    _written: dict[tuple[str, str, str], float] = field(default_factory=dict)

    async def emit(self, key: ClusterKey, uid: str, emit: Emit) -> bool:
        """Write an event unless an equal one was written lately.

        Args:
            key: of the KVCacheCluster.
            uid: of the KVCacheCluster.
            emit: what to say.

        Returns:
            True if it was written.
        """
        now, lasts = self.clock(), emit.reason in LASTING
        self._written = {what: until for what, until in self._written.items() if now < until}
        what = (uid, emit.reason, emit.message)
        if what in self._written:
            return False
        self._written[what] = now + (KEPT_S if lasts else REPEAT_AFTER_S)
        name = _lasting_name(key, what) if lasts else ""
        try:
            if lasts and await self.cluster.get(EVENT_KIND, key.namespace, name) is not None:
                return False  # an earlier process wrote it
            await self.cluster.create(EVENT_KIND, key.namespace, self._manifest(key, uid, emit, name))
        except ApiError as error:
            _LOG.warning("cannot write event %s on %s: %s", emit.reason, key, error)
            return False
        event(_LOG, "event", cluster=key, reason=emit.reason, message=emit.message)
        return True

    def _manifest(self, key: ClusterKey, uid: str, emit: Emit, name: str) -> Manifest:
        time_of_day = timestamp(self.wall())
        return {
            "apiVersion": EVENT_KIND.api,
            "kind": EVENT_KIND.name,
            "metadata": {"namespace": key.namespace, **({"name": name} if name else {"generateName": f"{key.name}."})},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": key.namespace,
                "name": key.name,
                "uid": uid,
            },
            "type": "Warning" if emit.warning else "Normal",
            "reason": emit.reason,
            "message": emit.message[:_LONGEST_MESSAGE],
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": self.identity,
            "firstTimestamp": time_of_day,
            "lastTimestamp": time_of_day,
            "count": 1,
        }


def _lasting_name(key: ClusterKey, what: tuple[str, str, str]) -> str:
    return f"{key.name}.{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}"
