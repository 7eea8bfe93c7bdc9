from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from kvtier_operator.observed import Manifest, ObjectRef, ObservedObject
from kvtier_operator.planning.layout import Stage
from kvtier_operator.planning.upkeep import Upkeep, upkeep
from kvtier_operator.resources.objects.manifests import manifest, stamp
from kvtier_operator.testing.sample_clusters import UID, sample_cluster
from kvtier_operator.testing.sample_pods import seen

CLUSTER = sample_cluster()


def child(name: str, replicas: int = 1, kind: str = "StatefulSet") -> Manifest:
    return stamp(manifest(CLUSTER, kind, name, {"spec": {"replicas": replicas, "template": {"spec": {"a": "b"}}}}))


def live(of: Manifest, **changes: Any) -> ObservedObject:
    meta = of["metadata"]
    found = ObservedObject(
        ObjectRef(of["kind"], meta["name"]),
        uid=f"uid-{meta['name']}",
        owner_uid=UID,
        applied_hash=meta["annotations"]["kvtier.dev/applied-hash"],
        live=copy.deepcopy(of),
        replicas=of["spec"]["replicas"],
    )
    return replace(found, **changes)


CHILDREN = {
    Stage.FOUNDATION: (child("base"),),
    Stage.COORDINATION: (child("etcd"),),
    Stage.MASTERS: (child("master"),),
    Stage.ENGINES: (child("engine"),),
}


def keep(*objects: ObservedObject, missing: dict[Stage, str] | None = None, creating: bool = True) -> Upkeep:
    return upkeep(CLUSTER, seen(objects), CHILDREN, missing or {}, creating=creating)


def applied(made: Upkeep) -> list[str]:
    return [action.ref.name for action in made.applies]


def test_absent_objects_are_made_up_to_the_first_stage_that_is_not_ready() -> None:
    made = keep(missing={Stage.COORDINATION: "etcd: 0 of 3", Stage.MASTERS: "no leader"})
    assert applied(made) == ["base", "etcd"]
    assert (made.stage, made.waiting) == (Stage.COORDINATION, "etcd: 0 of 3")
    assert applied(keep()) == ["base", "etcd", "master", "engine"]


def test_what_exists_is_kept_right_whatever_earlier_stages_lack() -> None:
    engine = live(CHILDREN[Stage.ENGINES][0], applied_hash="other")
    made = keep(engine, missing={Stage.COORDINATION: "etcd: 0 of 3"})
    assert applied(made) == ["base", "etcd", "engine"]


def test_nothing_is_applied_twice() -> None:
    made = keep(*(live(item) for items in CHILDREN.values() for item in items))
    assert made == Upkeep()


def test_a_hash_a_size_and_an_edit_are_each_a_reason() -> None:
    rest = [live(item) for stage, items in CHILDREN.items() for item in items if stage is not Stage.ENGINES]
    engine = live(CHILDREN[Stage.ENGINES][0])
    edited = copy.deepcopy(dict(engine.live))
    edited["spec"]["template"]["spec"]["a"] = "c"
    reasons = [
        keep(*rest, changed).applies[0].why
        for changed in (replace(engine, applied_hash="x"), replace(engine, replicas=5), replace(engine, live=edited))
    ]
    assert reasons == [
        "its intent has changed",
        "it has 5 replicas instead of 1",
        "somebody changed it: spec.template.spec.a is 'c' instead of 'b'",
    ]


def test_an_object_of_somebody_else_is_never_touched_and_stops_what_comes_after() -> None:
    for owner, words in (("else", "the owner with uid else"), ("", "nobody that we know")):
        made = keep(live(CHILDREN[Stage.COORDINATION][0], owner_uid=owner, applied_hash="x"))
        assert applied(made) == ["base"]
        assert made.conflicts == {ObjectRef("StatefulSet", "etcd"): words}
        assert (made.stage, made.waiting) == (Stage.COORDINATION, f"StatefulSet/etcd belongs to {words}")


def test_an_object_that_is_being_deleted_is_waited_for() -> None:
    made = keep(live(CHILDREN[Stage.COORDINATION][0], deleting=True))
    assert applied(made) == ["base"]
    assert made.waiting == "StatefulSet/etcd is being deleted"


def test_nothing_new_is_made_where_ports_are_missing() -> None:
    engine = live(CHILDREN[Stage.ENGINES][0], applied_hash="other")
    assert applied(keep(engine, creating=False)) == ["engine"]
