"""What one machine without Kubernetes refuses, and what it does without."""

import dataclasses
from typing import Any

from kvtier_operator.api import (
    Coordination,
    DeletionPolicy,
    Dialect,
    Drain,
    DrainMode,
    Images,
    KVCacheCluster,
    ManagedEtcd,
    Observability,
    PodOptions,
    Rollout,
    parse,
)
from kvtier_operator.local.limits import refusals, without_effect


def cluster(**changes: Any) -> KVCacheCluster:
    plain = parse(
        {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheCluster",
            "metadata": {"name": "demo"},
            "spec": {
                "store": {"pools": [{"name": "dram", "segmentSize": "64Mi"}]},
                "model": {"source": {"uri": "/m"}, "identity": {"id": "tiny"}},
                "roles": [
                    {
                        "name": "engine",
                        "type": "Fused",
                        "tiers": {
                            "device": {"size": "64Mi"},
                            "host": {"blocksFactor": "2"},
                            "store": {"enabled": True},
                        },
                    }
                ],
            },
        }
    )
    return dataclasses.replace(plain, **changes)


POD = PodOptions(priority_class="high")


def test_a_plain_manifest_loses_nothing() -> None:
    assert without_effect(cluster()) == ()
    assert refusals(cluster()) == ()


def test_each_field_that_only_kubernetes_honours_is_named_once_by_its_path() -> None:
    plain = cluster()
    managed = ManagedEtcd(replicas=1, storage_bytes=1 << 30, pod=POD)
    described = cluster(
        paused=True,
        images=Images(engine="elsewhere"),
        coordination=Coordination(managed=managed),
        master=dataclasses.replace(plain.master, pod=POD),
        pools=(dataclasses.replace(plain.pools[0], pod=POD, drain=Drain(mode=DrainMode.DISCARD)),),
        transport=dataclasses.replace(plain.transport, host_network=True),
        roles=(dataclasses.replace(plain.roles[0], pod=POD, shm_bytes=1, grace_ms=1),),
        rollout=Rollout(max_surge=1),
        observability=Observability(labels={"a": "b"}),
        deletion=DeletionPolicy.DRAIN,
    )
    assert without_effect(described) == (
        "spec.paused",
        "spec.images",
        "spec.coordination.etcd.managed.storage",
        "spec.coordination.etcd.managed.pod",
        "spec.master.pod",
        "spec.transport.hostNetwork",
        "spec.rollout",
        "spec.observability",
        "spec.deletion",
        "spec.store.pools[0].drain",
        "spec.store.pools[0].pod",
        "spec.roles[0].shm",
        "spec.roles[0].termination",
        "spec.roles[0].pod",
    )


def test_engines_of_others_are_refused_with_a_way_out() -> None:
    (problem,) = refusals(cluster(dialect=Dialect.XLLM))
    assert problem.startswith("spec.engine.dialect = 'Xllm': ")
    assert "write Kvtier and roles of type Fused" in problem
