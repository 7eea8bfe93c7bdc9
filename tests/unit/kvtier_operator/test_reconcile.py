"""The real builders and the real status under the plan, over a world in memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvtier_operator.api import Images, PodOptions
from kvtier_operator.errors import SpecError, Violation
from kvtier_operator.manifest import load
from kvtier_operator.observed import Component, Observed
from kvtier_operator.planning.actions import Apply, Emit
from kvtier_operator.planning.ports import engine_ports
from kvtier_operator.planning.revision import revision_of
from kvtier_operator.planning.wants import ports_needed
from kvtier_operator.reconcile import BUILDERS, reconcile, refuse
from kvtier_operator.testing.completeness import unfinished
from kvtier_operator.testing.folding import Fold
from kvtier_operator.testing.sample_clusters import UID, approved, changed, sample_cluster
from kvtier_operator.testing.world import World

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def started(name: str) -> Fold:
    """A world in which the manifest of an example has settled."""
    cluster = load(EXAMPLES / f"{name}.yaml")
    world = World(replace(cluster, metadata=replace(cluster.metadata, uid=UID, generation=1)))
    fold = Fold(world, BUILDERS)
    fold.settle()
    return fold


def phase(fold: Fold) -> object:
    return fold.world.status["phase"]


@pytest.mark.parametrize("name", ["production", "split", "host-network", "local-without-store"])
def test_an_example_settles_complete_and_ready(name: str) -> None:
    fold = started(name)
    assert unfinished(fold.world, revision_of(fold.world.cluster)) == []
    assert phase(fold) == "Ready"
    again = reconcile(fold.world.cluster, fold.world.observe())
    assert (again.actions, again.status, again.requeue_after_s) == ((), fold.world.status, 0)


def test_a_rollout_and_a_roll_of_everything_settle_complete() -> None:
    fold = started("production")
    fold.world.cluster = changed(fold.world.cluster, images=Images(default="next"))
    fold.settle()
    assert phase(fold) == "WaitingForApproval"
    fold.world.cluster = approved(fold.world.cluster, revision_of(fold.world.cluster))
    fold.settle()
    assert unfinished(fold.world, revision_of(fold.world.cluster)) == []
    assert phase(fold) == "Ready"
    assert fold.world.status["model"]
    told = [event.reason for event in fold.world.events]
    assert {"RolloutStarted", "RolloutCompleted", "DrainStarted", "DrainCompleted"} <= set(told)
    assert fold.world.leading is not None
    assert fold.world.status["leader"]["pod"] == fold.world.leading.name


@pytest.mark.parametrize("component", ["coordination", "master", "store", "router"])
def test_a_pass_that_changes_a_template_never_says_ready_nor_does_one_of_a_paused_cluster(component: str) -> None:
    fold = started("split")
    cluster, own = fold.world.cluster, PodOptions(env={"A": "b"})
    coordination, (pool, *others) = cluster.coordination, cluster.pools
    assert coordination.managed is not None
    assert cluster.router is not None
    changes: dict[str, Any] = {
        "coordination": {"coordination": replace(coordination, managed=replace(coordination.managed, pod=own))},
        "master": {"master": replace(cluster.master, pod=own)},
        "store": {"pools": (replace(pool, pod=own), *others)},
        "router": {"router": replace(cluster.router, pod=own)},
    }
    fold.world.cluster = changed(cluster, **changes[component])
    paused = reconcile(replace(fold.world.cluster, paused=True), fold.world.observe())
    made = fold.step()
    assert [action.ref.kind for action in made.actions if isinstance(action, Apply)] in (
        ["StatefulSet"],
        ["Deployment"],
    )
    for told in (paused, made):
        ready = told.status["conditions"][0]
        assert (ready["type"], ready["status"], ready["reason"]) == ("Ready", "False", "Outdated")
    fold.settle()
    assert phase(fold) == "Ready"


def test_a_failed_revision_halts_and_the_former_one_comes_back() -> None:
    fold = started("host-network")
    good = fold.world.cluster
    bad = changed(good, images=replace(good.images, engine="broken"))
    fold.world.bad_revisions.add(revision_of(bad))
    fold.world.cluster = bad
    fold.settle()
    conditions = {item["type"]: item["status"] for item in fold.world.status["conditions"]}
    assert conditions["RolloutHalted"] == "True"
    assert conditions["Available"] == "True"
    fold.world.cluster = changed(bad, images=good.images)
    fold.settle()
    assert unfinished(fold.world, revision_of(good)) == []
    assert phase(fold) == "Ready"


def ports(fold: Fold, **changes: int) -> None:
    transport = fold.world.cluster.transport
    moved = replace(transport, ports=replace(transport.ports, **changes))
    fold.world.cluster = changed(fold.world.cluster, transport=moved)


@pytest.mark.parametrize("name", ["production", "split", "host-network"])
def test_another_range_of_ports_restarts_nothing(name: str) -> None:
    fold = started(name)
    ports(fold, size=fold.world.cluster.transport.ports.size + 1)
    assert fold.look().actions == ()
    ports(fold, start=40000)
    assert fold.look().actions == ()


def test_the_advice_where_ports_run_out_is_enough_for_the_growth_and_the_next_rollout() -> None:
    cluster = sample_cluster()
    wide = ports_needed(cluster)
    one_lane = wide - 2 * engine_ports(cluster.roles[0]).width
    fold = Fold(World(cluster), BUILDERS)
    ports(fold, size=one_lane)
    fold.settle()
    (before,) = {pod.revision for pod in fold.world.of(Component.ENGINE)}
    fold.world.cluster = changed(fold.world.cluster, roles=(replace(cluster.roles[0], replicas=4),))
    fold.run(2)
    (told,) = (one for one in fold.world.status["conditions"] if one["type"] == "PortsAllocated")
    assert told["reason"] == "RangeExhausted"
    advice = re.search(r"size: (\d+)", told["message"])
    assert advice
    ports(fold, size=int(advice[1]))
    fold.settle()
    assert phase(fold) == "Ready"
    assert [pod.revision for pod in fold.world.of(Component.ENGINE)] == [before] * 4
    fold.world.cluster = changed(fold.world.cluster, images=Images(engine="next"))
    fold.settle()
    assert phase(fold) == "Ready"


def test_a_cluster_that_rests_costs_no_event() -> None:
    fold = started("production")
    before = len(fold.world.events)
    fold.run(20)
    assert len(fold.world.events) == before
    assert not [action for action in fold.look().actions if isinstance(action, Emit)]


def test_an_invalid_spec_is_refused_in_words_and_changes_nothing_else() -> None:
    error = SpecError([Violation("spec.roles", [], "write at least one role")])
    status = refuse({"metadata": {"generation": 3}, "status": {"leader": {"pod": "kv-master-1"}}}, error, 0.0)
    assert status["leader"] == {"pod": "kv-master-1"}
    assert "write at least one role" in str(status["conditions"])


def test_the_status_of_a_fresh_cluster_is_whole() -> None:
    cluster = load(EXAMPLES / "production.yaml")
    made = reconcile(replace(cluster, metadata=replace(cluster.metadata, uid=UID)), Observed(now=1.0))
    assert made.status["phase"]
    assert made.status["conditions"]
