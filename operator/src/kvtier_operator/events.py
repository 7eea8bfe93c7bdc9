"""Events on KVCacheClusters, as `kubectl describe` shows them. IO.

Equal ones are written at most every five minutes, and failing to write one never fails a pass: they are for people.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from kvtier_operator.api import API_VERSION, KIND
from kvtier_operator.cluster import Cluster
from kvtier_operator.errors import ApiError
from kvtier_operator.index import ClusterKey
from kvtier_operator.kinds import EVENT_KIND
from kvtier_operator.labels import MANAGER
from kvtier_operator.log import event
from kvtier_operator.observed import Manifest
from kvtier_operator.planning.actions import Emit

REPEAT_AFTER_S = 300.0
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
        now = self.clock()
        self._written = {what: when for what, when in self._written.items() if now - when < REPEAT_AFTER_S}
        what = (uid, emit.reason, emit.message)
        if what in self._written:
            return False
        self._written[what] = now
        event(_LOG, "event", cluster=key, reason=emit.reason, message=emit.message)
        try:
            await self.cluster.create(EVENT_KIND, key.namespace, self._manifest(key, uid, emit))
        except ApiError as error:
            _LOG.warning("cannot write event %s on %s: %s", emit.reason, key, error)
            return False
        return True

    def _manifest(self, key: ClusterKey, uid: str, emit: Emit) -> Manifest:
        time_of_day = datetime.fromtimestamp(self.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "apiVersion": EVENT_KIND.api,
            "kind": EVENT_KIND.name,
            "metadata": {"generateName": f"{key.name}.", "namespace": key.namespace},
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
