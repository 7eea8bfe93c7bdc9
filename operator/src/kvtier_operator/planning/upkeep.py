"""Which objects have to be applied, and how far the start-up order has come. Pure; called by `plan`.

An object is applied when it is absent, when its intent has changed, or when somebody changed what we wrote. Absent ones
wait until the stages before theirs are ready; existing ones never wait. An object of another owner is never touched,
whatever its name: its stage stays unready, and so do those after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier_operator import labels
from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import Manifest, ObjectRef, Observed, ObservedObject
from kvtier_operator.planning.actions import Apply
from kvtier_operator.planning.drift import first_difference
from kvtier_operator.planning.layout import Stage
from kvtier_operator.planning.workloads import is_ours

Children = Mapping[Stage, tuple[Manifest, ...]]


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What to apply.

    Attributes:
        applies: in start-up order.
        conflicts: objects of other owners that have names of ours, and who owns them.
        stage: the first stage that is not ready; None when all are.
        waiting: what that stage lacks; empty when it is ready.
    """

    applies: tuple[Apply, ...] = ()
    conflicts: Mapping[ObjectRef, str] = field(default_factory=dict)
    stage: Stage | None = None
    waiting: str = ""


def upkeep(
    cluster: KVCacheCluster, observed: Observed, children: Children, missing: Mapping[Stage, str], *, creating: bool
) -> Upkeep:
    """Compare what should exist with what does.

    Args:
        cluster: the owner.
        observed: as it is.
        children: what should exist.
        missing: what stages lack apart from their objects, in words.
        creating: absent objects may be made at all.
    """
    applies: list[Apply] = []
    conflicts: dict[ObjectRef, str] = {}
    first: Stage | None = None
    waiting = ""
    for stage in sorted(children):
        lacks = missing.get(stage, "")
        for manifest in children[stage]:
            found = observed.objects.get(reference(manifest))
            if found is None:
                if creating and first is None:
                    applies.append(Apply(manifest, "it is absent"))
            elif not is_ours(cluster, found):
                conflicts[found.ref] = _owner(found)
                lacks = f"{found.ref} belongs to {_owner(found)}"
            elif found.deleting:
                lacks = f"{found.ref} is being deleted"
            elif why := reason_to_apply(manifest, found):
                applies.append(Apply(manifest, why))
        if lacks and first is None:
            first, waiting = stage, lacks
    return Upkeep(tuple(applies), conflicts, first, waiting)


def reference(manifest: Manifest) -> ObjectRef:
    """What a manifest is about."""
    return ObjectRef(manifest["kind"], manifest["metadata"]["name"])


def reason_to_apply(manifest: Manifest, found: ObservedObject) -> str:
    """Why an existing object has to be applied again; empty = it is as it should be."""
    wanted = manifest["metadata"].get("annotations", {}).get(labels.APPLIED_HASH, "")
    if found.applied_hash != wanted:
        return "its intent has changed"
    replicas = manifest.get("spec", {}).get("replicas")
    if replicas is not None and "template" in manifest["spec"] and replicas != found.replicas:
        return f"it has {found.replicas} replicas instead of {replicas}"
    difference = first_difference(manifest, found.live)
    return f"somebody changed it: {difference}" if difference else ""


def _owner(found: ObservedObject) -> str:
    return f"the owner with uid {found.owner_uid}" if found.owner_uid else "nobody that we know"
