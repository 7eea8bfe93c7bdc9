"""What holds of the status of any cluster: what Ready means, which times stay, that a ready pod worsens nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.observed import Component, ObservedPod
from kvtier_operator.planning.layout import Stage
from kvtier_operator.planning.progress import Progress, RolloutProgress
from kvtier_operator.status import Phase, status_of
from kvtier_operator.testing.sample_status import CLUSTER, NEW, NOON, NOW, OLD, Seen, Status, pod, status

_GROUPS = {Component.STORE: "dram", Component.ENGINE: "engine"}
_PODS = st.lists(
    st.builds(
        lambda component, slot, revision, facts: pod(component, slot, _GROUPS.get(component, ""), revision, **facts),
        st.sampled_from(list(Component)),
        st.integers(0, 3),
        st.sampled_from([OLD, NEW]),
        st.fixed_dictionaries(
            {
                "ready": st.booleans(),
                "up_to_date": st.booleans(),
                "deleting": st.just(False),
                "failure": st.sampled_from(["", "CrashLoopBackOff"]),
                "waiting_s": st.sampled_from([0.0, 70.0]),
            }
        ),
    ),
    max_size=16,
    unique_by=lambda one: one.name,
)
_PROGRESS = st.builds(
    Progress,
    stage=st.none() | st.sampled_from(list(Stage)),
    waiting_for=st.lists(st.just("pod"), max_size=1).map(tuple),
    rollout=st.builds(
        RolloutProgress,
        target=st.sampled_from(["", OLD, NEW]),
        current=st.sampled_from(["", OLD, NEW]),
        approval_wanted=st.booleans(),
        halted=st.sampled_from(["", "x failed"]),
    ),
    exhausted=st.lists(st.just("engine/A/0"), max_size=1).map(tuple),
)


def seen_of(pods: Iterable[ObservedPod], leader: int | None, before: Status) -> Seen:
    def of(component: Component) -> list[ObservedPod]:
        return [one for one in pods if one.component is component]

    return Seen(
        of(Component.ETCD),
        of(Component.MASTER),
        of(Component.STORE),
        of(Component.ENGINE),
        leader=leader,
        status=before,
    )


@given(_PODS, st.none() | st.integers(0, 3), _PROGRESS, st.booleans())
def test_ready_means_available_complete_and_at_rest_and_phases_follow(
    pods: list[ObservedPod], leader: int | None, progress: Progress, served: bool
) -> None:
    before: Status = {"revisions": {"current": NEW}} if served else {}
    found = status(seen_of(pods, leader, before), progress)
    holds = {one["type"]: one["status"] == "True" for one in found["conditions"]}
    assert len(holds) == 15
    if holds["Ready"]:
        needed = ("Available", "RolesReady", "StoreReady", "MasterLeaderElected", "CoordinationReady", "PortsAllocated")
        assert all(holds[name] for name in needed)
        assert not holds["Progressing"]
        assert not [one for one in pods if not one.up_to_date]
        assert found["roles"][0]["updated"] >= found["roles"][0]["desired"]
    assert (found["phase"] == Phase.READY) == (
        holds["Ready"] and not any(holds[bad] for bad in ("Degraded", "RolloutHalted", "DrainBlocked"))
    )
    assert all(one["reason"] and one["message"] is not None for one in found["conditions"])
    again = status_of(CLUSTER, replace(seen_of(pods, leader, found).observed(), now=NOW + 5.0), progress)
    same = {
        one["type"]: one["lastTransitionTime"] for one in again["conditions"] if one["status"] == holds_text(found, one)
    }
    assert set(same.values()) <= {NOON}


def holds_text(found: Status, condition: Status) -> str:
    return next(str(one["status"]) for one in found["conditions"] if one["type"] == condition["type"])


@given(_PODS, st.none() | st.integers(0, 3), _PROGRESS, st.data())
def test_a_pod_that_becomes_ready_never_makes_anything_worse(
    pods: list[ObservedPod], leader: int | None, progress: Progress, data: st.DataObject
) -> None:
    unready = [index for index, one in enumerate(pods) if not one.ready]
    if not unready:
        return
    before = status(seen_of(pods, leader, {}), progress)
    index = data.draw(st.sampled_from(unready))
    better = [
        replace(one, ready=True, failure="", waiting_s=0.0) if at == index else one for at, one in enumerate(pods)
    ]
    after = status(seen_of(better, leader, {}), progress)
    for one in before["conditions"]:
        now_holds = holds_text(after, one)
        if one["status"] == "True" and one["type"] not in {"Degraded", "RolloutHalted", "DrainBlocked"}:
            assert now_holds == "True", one
    if holds_text(before, {"type": "Degraded"}) == "False":
        assert holds_text(after, {"type": "Degraded"}) == "False"
