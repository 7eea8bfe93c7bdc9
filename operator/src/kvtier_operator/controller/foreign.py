"""Objects of somebody else that have the name of one of ours: found by accident, since no watch shows them. IO.

They are looked at again from time to time, so that the cluster goes on by itself when they are renamed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier_operator.cluster import Cluster
from kvtier_operator.controller.index import ClusterKey
from kvtier_operator.kinds import KINDS
from kvtier_operator.observed import Manifest, ObjectRef, ObservedObject, observed_object

LOOK_AGAIN_S = 10.0


@dataclass(slots=True)
class ForeignObjects:
    """What was found.

    Args:
        api: the Kubernetes API.
        clock: monotonic seconds.
    """

    api: Cluster
    clock: Callable[[], float] = time.monotonic
    _found: dict[ClusterKey, dict[ObjectRef, tuple[ObservedObject, float]]] = field(default_factory=dict)

    def seen(self, key: ClusterKey, ref: ObjectRef, live: Manifest) -> None:
        """Remember an object that stands in a cluster's way."""
        self._found.setdefault(key, {})[ref] = (observed_object(ref, live), self.clock())

    def of(self, key: ClusterKey) -> tuple[ObservedObject, ...]:
        """What stands in a cluster's way."""
        return tuple(found for found, _ in self._found.get(key, {}).values())

    def forget(self, key: ClusterKey) -> None:
        """The cluster is gone."""
        self._found.pop(key, None)

    async def check(self, key: ClusterKey) -> None:
        """Look again at what was seen some time ago.

        Raises:
            ApiError: the server did not answer.
        """
        for ref, (known, when) in list(self._found.get(key, {}).items()):
            if self.clock() - when < LOOK_AGAIN_S:
                continue
            live = await self.api.get(KINDS[ref.kind], key.namespace, ref.name)
            if live is None or observed_object(ref, live).uid != known.uid:
                self._found[key].pop(ref, None)
            else:
                self.seen(key, ref, live)
