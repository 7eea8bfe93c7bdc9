"""The ConfigMap that holds a port ledger: how it is written, and which one is ours. Pure; used by `apply`."""

from __future__ import annotations

from typing import Any

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.errors import LedgerError
from kvtier_operator.kinds import CONFIG_MAP_KIND
from kvtier_operator.labels import MANAGED_BY, NAME, PART_OF
from kvtier_operator.observed import Manifest, ObjectRef, observed_object
from kvtier_operator.planning.ledger import Ledger
from kvtier_operator.planning.ledger_data import ledger_data, read_ledger
from kvtier_operator.resources.objects.manifests import child_labels, owner_reference


def ledger_manifest(cluster: KVCacheCluster, ledger: Ledger, place: tuple[str, str]) -> Manifest:
    """The object to write; with the version that the ledger was read with, if there was one.

    Args:
        cluster: that has blocks in it.
        ledger: all of it.
        place: namespace and name.
    """
    shared, labels = cluster.transport.host_network, child_labels(cluster)
    if shared:
        labels = {name: labels[name] for name in (NAME, PART_OF, MANAGED_BY)}
    meta: dict[str, Any] = {"namespace": place[0], "name": place[1], "labels": labels}
    if not shared:
        meta["ownerReferences"] = [owner_reference(cluster)]
    if ledger.resource_version:
        meta["resourceVersion"] = ledger.resource_version
    return {
        "apiVersion": CONFIG_MAP_KIND.api,
        "kind": CONFIG_MAP_KIND.name,
        "metadata": meta,
        "data": ledger_data(ledger),
    }


def is_ledger(cluster: KVCacheCluster, live: Manifest) -> bool:
    """True for a ledger of ours; the shared one has no owner, and is known by what it holds."""
    if not cluster.transport.host_network:
        ref = ObjectRef(CONFIG_MAP_KIND.name, live["metadata"]["name"])
        return observed_object(ref, live).owner_uid == cluster.metadata.uid
    try:
        read_ledger(live.get("data") or {}, "")
    except LedgerError:
        return False
    return True
