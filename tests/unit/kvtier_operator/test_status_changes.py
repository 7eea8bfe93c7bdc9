"""What the status says while a cluster changes: rollouts and revisions, and what it keeps of the status before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvtier_operator.api import Model
from kvtier_operator.observed import Component, ObjectRef, ObservedObject
from kvtier_operator.planning.progress import Progress, RolloutProgress
from kvtier_operator.status import status_of
from kvtier_operator.testing.sample_status import (
    CLUSTER,
    NEW,
    NOON,
    NOW,
    OLD,
    SETTLED,
    Seen,
    conditions,
    engine,
    message,
    pod,
    status,
)


def test_a_rollout_tells_its_units_and_is_not_degraded_by_weights_that_load_slowly() -> None:
    loading = engine(0, ready=False, waiting="ContainersNotReady", waiting_s=300.0)
    seen = Seen(engines=[engine(0, revision=OLD), loading], status={"revisions": {"current": OLD}})
    found = status(seen, Progress(rollout=RolloutProgress(NEW, OLD, units_done=0, units=2), waiting_for=("one",)))
    assert found["phase"] == "RollingOut"
    assert message(found, "Progressing") == f"revision {NEW}: 0 of 2 units serve; one"
    assert found["revisions"] == {"current": OLD, "updating": NEW}
    assert (found["roles"][0]["ready"], found["roles"][0]["updated"]) == (1, 0)
    assert message(found, "Available").startswith(f"revision {OLD}: ")


def test_no_cluster_is_ready_while_a_pod_of_the_old_revision_is_there() -> None:
    seen = Seen(engines=[engine(0), engine(1), engine(0, revision=OLD, deleting=True, ready=False)])
    assert conditions(status(seen))["Ready"] == "False/Outdated"
    outdated = Seen(masters=[pod(Component.MASTER, slot, up_to_date=slot != 1) for slot in range(3)])
    assert conditions(status(outdated))["Ready"] == "False/Outdated"
    assert "demo-master-h-1" in message(status(outdated), "Ready")


def test_no_cluster_is_ready_while_nobody_knows_which_pods_are_of_the_newest_form() -> None:
    pool = ObjectRef("StatefulSet", "demo-store-dram")
    applied = status(progress=replace(SETTLED, changes=(pool,)))
    observed = Seen().observed()
    unseen = ObservedObject(pool, "s2", "u1", "", unseen=True)
    behind = status_of(CLUSTER, replace(observed, objects={**observed.objects, pool: unseen}), SETTLED)
    for found in (applied, behind):
        told = conditions(found)
        assert (told["Ready"], told["Progressing"]) == ("False/Outdated", "True/Changing")
        assert message(found, "Ready") == "StatefulSet/demo-store-dram not in the newest form yet"
        assert (told["Available"], told["Degraded"], found["phase"]) == (
            "True/Serving",
            "False/AsWanted",
            "Provisioning",
        )


def test_a_halted_rollout_says_why_and_how_to_go_on() -> None:
    rollout = RolloutProgress(NEW, OLD, units=2, halted="demo-engine-bbbbbbbb-0 is not ready (CrashLoopBackOff)")
    seen = Seen(engines=[engine(0, revision=OLD), engine(1, revision=OLD)], status={"revisions": {"current": OLD}})
    found = status(seen, Progress(rollout=rollout))
    assert found["phase"] == "Degraded"
    assert conditions(found)["RolloutHalted"] == "True/PodFailed"
    assert f"write the spec of revision {OLD} again" in message(found, "RolloutHalted")
    assert conditions(found)["Progressing"] == "False/RolloutHalted"
    assert conditions(found)["Available"] == "True/Serving"


def test_a_supervised_rollout_waits_and_says_what_to_type() -> None:
    seen = Seen(engines=[engine(0, revision=OLD), engine(1, revision=OLD)], status={"revisions": {"current": OLD}})
    found = status(seen, Progress(rollout=RolloutProgress(NEW, OLD, units=2, approval_wanted=True)))
    assert found["phase"] == "WaitingForApproval"
    assert f"kubectl annotate kvc demo kvtier.dev/approve={NEW}" in message(found, "Progressing")


def test_a_revision_that_serves_no_more_stays_current_until_another_one_serves() -> None:
    found = status(Seen(engines=[], status={"revisions": {"current": OLD}}))
    assert found["revisions"] == {"current": OLD, "updating": NEW}
    assert found["phase"] == "Degraded"
    assert conditions(found)["Degraded"] == "True/Available"


def test_times_stay_until_a_status_flips() -> None:
    first = status()
    later = replace(Seen(status=first).observed(), now=NOW + 100.0)
    again = status_of(CLUSTER, later, SETTLED)
    assert again == first
    lost = replace(Seen(status=first, masters=[], leader=None).observed(), now=NOW + 100.0)
    times = {one["type"]: one["lastTransitionTime"] for one in status_of(CLUSTER, lost, SETTLED)["conditions"]}
    flipped = {name for name, time in times.items() if time == "2026-01-01T00:01:40Z"}
    assert flipped == {"Ready", "Degraded", "MasterLeaderElected", "StoreReady"}
    assert {time for name, time in times.items() if name not in flipped} == {NOON}


def test_a_new_leader_leads_since_now_and_the_same_one_since_it_was_elected() -> None:
    first = status()
    same = status_of(CLUSTER, replace(Seen(status=first).observed(), now=NOW + 9.0), SETTLED)
    assert same["leader"]["since"] == NOON
    other = status_of(CLUSTER, replace(Seen(status=first, leader=2).observed(), now=NOW + 9.0), SETTLED)
    assert (other["leader"]["pod"], other["leader"]["since"]) == ("demo-master-h-2", "2026-01-01T00:00:09Z")


def test_a_change_of_the_model_keeps_the_former_namespaces_newest_first() -> None:
    seen = Seen()
    for number in range(13):
        model = Model("/m", "tiny", revision=str(number))
        found = status(seen, cluster=replace(CLUSTER, model=model))
        seen = Seen(status=found)
    ids = [found["model"]["effectiveID"], *found["model"]["previousIDs"]]
    assert len(ids) == len(set(ids)) == 11
    back = status(seen, cluster=replace(CLUSTER, model=Model("/m", "tiny", revision="11")))
    assert back["model"]["effectiveID"] == ids[1]
    assert back["model"]["previousIDs"][:2] == [ids[0], ids[2]]


@pytest.mark.parametrize("field_name", ["leader", "model", "revisions", "conditions"])
def test_a_status_that_lost_a_part_is_made_whole(field_name: str) -> None:
    before = status()
    del before[field_name]
    assert set(status(Seen(status=before))) == {*before, field_name}
