"""A Kubernetes API in memory for unit tests of what stands behind the port `cluster.Cluster`.

It knows versions, uids, preconditions and deletion timestamps. It does not merge fields by manager: an apply replaces
the fields of the first level that it names. What depends on more is tested against a real API server.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvtier_operator.cluster import Listed
from kvtier_operator.errors import ApiConflict, ApiNotFound
from kvtier_operator.kinds import KINDS, Kind
from kvtier_operator.observed import Manifest

Place = tuple[str, str, str]


@dataclass(slots=True)
class MemoryCluster:
    """Implements `Cluster`.

    Attributes:
        objects: by kind, namespace and name.
        writes: verb and name of every write, in order.
        optional: optional kinds that exist.
    """

    objects: dict[Place, Manifest] = field(default_factory=dict)
    writes: list[tuple[str, str]] = field(default_factory=list)
    optional: set[str] = field(default_factory=set)
    _versions: count[int] = field(default_factory=lambda: count(1))

    def put(self, manifest: Manifest) -> Manifest:
        """Store an object as somebody else would, without counting it as a write."""
        meta = manifest["metadata"]
        place = (manifest["kind"], meta.get("namespace", ""), meta["name"])
        stored = copy.deepcopy(manifest)
        known = self.objects.get(place)
        version = next(self._versions)
        stored["metadata"]["uid"] = known["metadata"]["uid"] if known else meta.get("uid") or f"uid-{version}"
        stored["metadata"]["resourceVersion"] = str(version)
        self.objects[place] = stored
        return copy.deepcopy(stored)

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """See `Cluster.get`."""
        return copy.deepcopy(self.objects.get((kind.name, namespace, name)))

    async def list_metadata(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[Listed]:
        """See `Cluster.list_metadata`."""
        label, _, value = selector.partition("=")
        for (name_of_kind, where, name), manifest in list(self.objects.items()):
            meta = manifest["metadata"]
            labels = meta.get("labels", {})
            if name_of_kind == kind.name and namespace in {"", where} and (not label or labels.get(label) == value):
                yield Listed(where, name, meta["uid"], int(meta["resourceVersion"]), labels)

    async def serves(self, kind: Kind) -> bool:
        """See `Cluster.serves`."""
        return "monitoring" not in kind.api or kind.name in self.optional

    async def apply(self, manifest: Manifest, *, force: bool) -> Manifest:
        """See `Cluster.apply`."""
        place = _place(manifest)
        known, uid = self.objects.get(place), manifest["metadata"].get("uid")
        if uid and (known is None or known["metadata"]["uid"] != uid):
            raise ApiConflict("patch", 409, "uid mismatch")
        if known is not None and not force:
            raise ApiConflict("patch", 409, "exists")
        self.writes.append(("apply", place[2]))
        merged = manifest if known is None else {**known, **manifest}
        return self.put({**merged, "metadata": {**(known or {}).get("metadata", {}), **manifest["metadata"]}})

    async def apply_status(self, manifest: Manifest) -> Manifest:
        """See `Cluster.apply_status`."""
        place = _place(manifest)
        known = self._known(place, manifest["metadata"].get("uid"))
        self.writes.append(("status", place[2]))
        return self.put({**known, "status": manifest["status"]})

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        """See `Cluster.merge`."""
        place = (kind.name, namespace, name)
        known = self._known(place, patch.get("metadata", {}).get("uid"))
        self.writes.append(("merge", name))
        return self.put(_merged(known, patch))

    async def create(self, kind: Kind, namespace: str, manifest: Manifest) -> Manifest:
        """See `Cluster.create`."""
        meta = manifest["metadata"]
        named = {**meta, "name": meta.get("name") or f"{meta['generateName']}{next(self._versions)}"}
        place = (kind.name, namespace, named["name"])
        if place in self.objects:
            raise ApiConflict("create", 409, "exists")
        self.writes.append(("create", named["name"]))
        return self.put({**manifest, "metadata": named})

    async def replace(self, kind: Kind, namespace: str, name: str, manifest: Manifest) -> Manifest:
        """See `Cluster.replace`."""
        known = self._known((kind.name, namespace, name), None)
        if known["metadata"]["resourceVersion"] != manifest["metadata"].get("resourceVersion"):
            raise ApiConflict("update", 409, "it has changed")
        self.writes.append(("replace", name))
        return self.put(manifest)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> Manifest | None:
        """See `Cluster.delete`."""
        place = (kind.name, namespace, name)
        self._known(place, uid)
        self.writes.append(("delete", name))
        del self.objects[place]
        return None

    def _known(self, place: Place, uid: str | None) -> Manifest:
        known = self.objects.get(place)
        if known is None:
            raise ApiNotFound("request", 404, f"no {place}")
        if uid and known["metadata"]["uid"] != uid:
            raise ApiConflict("request", 409, "uid mismatch")
        return known


def _place(manifest: Manifest) -> Place:
    meta = manifest["metadata"]
    return KINDS[manifest["kind"]].name, meta["namespace"], meta["name"]


def _merged(known: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(known)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            result[name] = _merged(result.get(name) or {}, value)
        else:
            result[name] = value
    return result
