"""Compares the index with lists of the API server, and puts right what the watches missed. IO.

A watch that is set up again after a gap says nothing of objects that vanished meanwhile, and one that died silently
says nothing at all. Lists of metadata only are cheap: a few requests every five minutes, whatever the number of
clusters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvtier_operator.cluster import Cluster, Listed
from kvtier_operator.controller.index import ClusterKey, Index, record_of
from kvtier_operator.kinds import CLUSTER_KIND, Kind
from kvtier_operator.labels import MANAGED_BY, MANAGER
from kvtier_operator.observed import ObjectRef

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Relist:
    """Compares.

    Args:
        api: the Kubernetes API.
        index: is compared and repaired.
        namespaces: to list; empty = all.
        changed: told of every cluster that has to be looked at.
        repaired: told the kind of each object that was wrong.
    """

    api: Cluster
    index: Index
    namespaces: Collection[str]
    changed: Callable[[ClusterKey], None]
    repaired: Callable[[str], None]

    async def missing(self, kinds: Sequence[Kind]) -> list[tuple[Kind, Listed]]:
        """Objects that the server has and of which the index has no version, or an older one.

        Objects in the index that the server does not have any more are removed from it.

        Raises:
            ApiError: the server refused or did not answer.
        """
        return [(kind, listed) for kind in kinds for listed in await self._compare(kind)]

    def still_missing(self, stale: Sequence[tuple[Kind, Listed]]) -> list[tuple[Kind, Listed]]:
        """Those that the watch has not brought meanwhile."""
        return [(kind, listed) for kind, listed in stale if not self._is_current(kind, listed)]

    async def repair(self, stale: Sequence[tuple[Kind, Listed]]) -> int:
        """Read objects that are missing still.

        Returns:
            How many the watch should have shown and had not.

        Raises:
            ApiError: the server refused or did not answer.
        """
        repaired = 0
        for kind, listed in self.still_missing(stale):
            body = await self.api.get(kind, listed.namespace, listed.name)
            if body is None or self._is_current(kind, listed):
                continue
            repaired += 1
            _LOG.info("the watch had not shown %s %s/%s", kind.name, listed.namespace, listed.name)
            self.repaired(kind.name)
            for key in self.index.put(record_of(kind.name, body)):
                self.changed(key)
        return repaired

    async def _compare(self, kind: Kind) -> list[Listed]:
        before = {(record.home.namespace, record.ref.name): record for record in self.index.everything(kind.name)}
        selector = "" if kind == CLUSTER_KIND else f"{MANAGED_BY}={MANAGER}"
        stale: list[Listed] = []
        for namespace in self.namespaces or ("",):
            async for listed in self.api.list_metadata(kind, namespace, selector):
                before.pop((listed.namespace, listed.name), None)
                if not self._is_current(kind, listed):
                    stale.append(listed)
        # What was known before the list was read and is not in it has vanished.
        for (namespace, name), record in before.items():
            if self.namespaces and namespace not in self.namespaces:
                continue
            for key in self.index.remove(namespace, ObjectRef(kind.name, name), record.uid):
                _LOG.info("%s %s/%s vanished unseen", kind.name, namespace, name)
                self.repaired(kind.name)
                self.changed(key)
        return stale

    def _is_current(self, kind: Kind, listed: Listed) -> bool:
        known = self.index.find(listed.namespace, ObjectRef(kind.name, listed.name))
        return known is not None and known.version >= listed.version
