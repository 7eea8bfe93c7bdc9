"""What the API server has, as far as the operator cares: slim records by cluster, fed by the informer. Pure.

Objects are kept as compressed JSON without ``managedFields`` and, children, nearly without status: a thousand clusters
are twenty thousand objects. Records are made where events arrive (`record_of`) and put in by the event loop that owns
the index. What the operator itself writes is put in too, from the server's answer: then the index never lags behind its
own writes, and a watch event older than the record is known as such by its version.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from kvtier_operator.api import KIND
from kvtier_operator.controller.pod_facts import PodFacts, pod_facts
from kvtier_operator.labels import CLUSTER
from kvtier_operator.observed import WORKLOAD_KINDS, Manifest, ObjectRef

_LEVEL = 6


class ClusterKey(NamedTuple):
    """Namespace and name of a KVCacheCluster. The name is empty for what clusters share."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Record:
    """One object at one version.

    Attributes:
        home: cluster that it belongs to.
        version: resourceVersion, comparable.
        packed: compressed JSON; empty for pods, of which only ``pod`` is kept.
        newest: of a workload, hash of its newest template.
        settled: of a Deployment, all pods are of the newest template.
    """

    ref: ObjectRef
    home: ClusterKey
    uid: str
    version: int
    packed: bytes = b""
    newest: str = ""
    settled: bool = True
    pod: PodFacts | None = None

    def live(self) -> Manifest:
        """The object."""
        decoded: Manifest = msgspec.json.decode(zlib.decompress(self.packed))
        return decoded

    def same_news(self, other: Record) -> bool:
        """True when the versions differ in nothing that is kept."""
        return (self.uid, self.home, self.packed, self.newest, self.settled, self.pod) == (
            other.uid,
            other.home,
            other.packed,
            other.newest,
            other.settled,
            other.pod,
        )


def record_of(kind: str, body: Mapping[str, Any]) -> Record:
    """The record of an object as the API server shows it."""
    meta = body["metadata"]
    ref = ObjectRef(kind, meta["name"])
    home = ClusterKey(meta["namespace"], _cluster_name(kind, meta))
    uid, version = meta["uid"], int(meta["resourceVersion"])
    if kind == "Pod":
        return Record(ref, home, uid, version, pod=pod_facts(body))
    kept = {name: value for name, value in body.items() if name != "status" or kind == KIND}
    kept["metadata"] = {name: value for name, value in meta.items() if name not in {"managedFields", "resourceVersion"}}
    status = body.get("status") or {}
    if kind in WORKLOAD_KINDS and "observedGeneration" in status:
        # Until the controller has seen a change, ``updateRevision`` is that of the spec before.
        kept["status"] = {"observedGeneration": status["observedGeneration"]}
    packed = zlib.compress(msgspec.json.encode(kept), _LEVEL)
    return Record(ref, home, uid, version, packed, status.get("updateRevision", ""), _is_settled(kind, body))


def _cluster_name(kind: str, meta: Mapping[str, Any]) -> str:
    if kind == KIND:
        return str(meta["name"])
    for owner in meta.get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == KIND:
            return str(owner["name"])  # rather than the label, which people can edit
    return str((meta.get("labels") or {}).get(CLUSTER, ""))


def _is_settled(kind: str, body: Mapping[str, Any]) -> bool:
    if kind != "Deployment":
        return True
    status, wanted = body.get("status") or {}, (body.get("spec") or {}).get("replicas", 1)
    seen = status.get("observedGeneration", 0) >= body["metadata"].get("generation", 0)
    return bool(seen and status.get("updatedReplicas", 0) >= wanted and status.get("replicas", 0) <= wanted)


@dataclass(slots=True)
class Index:
    """All records. Owned by one event loop."""

    _records: dict[ClusterKey, dict[ObjectRef, Record]] = field(default_factory=dict)
    _homes: dict[tuple[str, ObjectRef], ClusterKey] = field(default_factory=dict)

    def put(self, record: Record) -> tuple[ClusterKey, ...]:
        """Remember a record unless a newer version of the object is known.

        Returns:
            Clusters that have to be looked at again.
        """
        place = (record.home.namespace, record.ref)
        former_home = self._homes.get(place)
        former = self._records[former_home].get(record.ref) if former_home is not None else None
        # Versions come from one counter, so that they also order two objects that had the same name.
        if former is not None and former.version >= record.version:
            return ()
        if former_home is not None and former_home != record.home:
            self._remove(place)
        self._homes[place] = record.home
        self._records.setdefault(record.home, {})[record.ref] = record
        if former is not None and record.same_news(former):
            return ()
        return (record.home,) if former_home in {None, record.home} else (record.home, former_home)

    def remove(self, namespace: str, ref: ObjectRef, uid: str) -> tuple[ClusterKey, ...]:
        """Forget an object, unless another one has its name by now; returns as `put` does."""
        known = self.find(namespace, ref)
        if known is None or known.uid != uid:
            return ()
        self._remove((namespace, ref))
        return (known.home,)

    def find(self, namespace: str, ref: ObjectRef) -> Record | None:
        """The record of an object."""
        home = self._homes.get((namespace, ref))
        return None if home is None else self._records[home].get(ref)

    def cluster(self, key: ClusterKey) -> Record | None:
        """The record of a KVCacheCluster itself."""
        return self._records.get(key, {}).get(ObjectRef(KIND, key.name))

    def of(self, key: ClusterKey) -> Iterator[Record]:
        """Records of everything that belongs to a cluster, itself included."""
        yield from self._records.get(key, {}).values()

    def clusters(self) -> list[ClusterKey]:
        """Keys of all KVCacheClusters."""
        return [key for key in self._records if key.name and self.cluster(key) is not None]

    def everything(self, kind: str) -> list[Record]:
        """Records of one kind."""
        return [record for group in self._records.values() for record in group.values() if record.ref.kind == kind]

    def _remove(self, place: tuple[str, ObjectRef]) -> None:
        home = self._homes.pop(place)
        group = self._records[home]
        del group[place[1]]
        if not group:
            del self._records[home]
