"""The real builders and the real status under the plan, over a world in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kvtier_operator.api import Images
from kvtier_operator.errors import SpecError, Violation
from kvtier_operator.manifest import load
from kvtier_operator.observed import Observed
from kvtier_operator.planning.actions import Emit
from kvtier_operator.planning.revision import revision_of
from kvtier_operator.reconcile import BUILDERS, reconcile, refuse
from kvtier_operator.testing.completeness import unfinished
from kvtier_operator.testing.folding import Fold
from kvtier_operator.testing.sample_clusters import UID, approved, changed
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
