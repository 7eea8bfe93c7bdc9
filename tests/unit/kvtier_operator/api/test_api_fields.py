"""What the parser makes of every field that a cluster on Kubernetes can have."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from kvtier_operator.api import (
    Coordination,
    DeletionPolicy,
    Dialect,
    Drain,
    DrainMode,
    DrainTimeout,
    Durability,
    Images,
    ManagedEtcd,
    Metadata,
    Monitoring,
    NamespacePolicy,
    NetworkPolicies,
    Observability,
    PodOptions,
    RoleType,
    Rollout,
    RolloutPolicy,
    Router,
    parse,
)
from kvtier_operator.errors import SpecError
from kvtier_operator.manifest import load

EXAMPLES = Path(__file__).parents[4] / "examples"

MINIMAL: dict[str, Any] = {
    "apiVersion": "kvtier.dev/v1alpha1",
    "kind": "KVCacheCluster",
    "metadata": {"name": "demo"},
    "spec": {
        "model": {"source": {"uri": "/models/tiny"}, "identity": {"id": "tiny"}},
        "roles": [{"name": "engine"}],
    },
}


def with_spec(**fields: Any) -> dict[str, Any]:
    document = deepcopy(MINIMAL)
    document["spec"] |= fields
    return document


def with_pod(**fields: Any) -> dict[str, Any]:
    return with_spec(roles=[{"name": "engine", "pod": fields}])


def refused(document: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse(document)
    return {violation.path: violation.fix for violation in caught.value.violations}


def test_what_is_not_stated_is_as_the_records_say() -> None:
    cluster = parse(MINIMAL)
    assert cluster.metadata == Metadata()
    assert cluster.images == Images()
    assert cluster.coordination == Coordination()
    assert cluster.rollout == Rollout()
    assert cluster.network_policies == NetworkPolicies()
    assert cluster.observability == Observability()
    assert cluster.router is None
    assert cluster.dialect is Dialect.KVTIER
    assert cluster.deletion is DeletionPolicy.IMMEDIATE
    assert (cluster.paused, cluster.cluster_id) == (False, "")
    role = cluster.roles[0]
    assert (role.shm_bytes, role.grace_ms, role.pod) == (2**30, 0, PodOptions())
    assert parse(with_spec(coordination={"etcd": {"managed": {}}})).coordination.managed == ManagedEtcd()


def test_metadata_of_the_api_server_is_read() -> None:
    document = deepcopy(MINIMAL)
    document["metadata"] |= {
        "namespace": "llm",
        "uid": "7c1d",
        "generation": 12,
        "deletionTimestamp": "2026-07-30T10:00:00Z",
        "finalizers": ["kvtier.dev/drain"],
        "annotations": {"kvtier.dev/approve": "7c1d0000"},
        "managedFields": [{}],
    }
    cluster = parse(document)
    assert cluster.metadata == Metadata(
        namespace="llm",
        uid="7c1d",
        generation=12,
        deleting=True,
        finalizers=("kvtier.dev/drain",),
        annotations={"kvtier.dev/approve": "7c1d0000"},
    )
    assert cluster.effective_cluster_id == "llm.demo"


def test_the_production_example_has_every_part() -> None:
    cluster = load(EXAMPLES / "production.yaml")
    assert cluster.effective_cluster_id == "production"
    assert cluster.coordination.managed is not None
    assert cluster.coordination.managed.storage_bytes == 10 * 2**30
    assert (cluster.master.replicas, cluster.master.durability) == (3, Durability.OPLOG)
    dram, spare = cluster.pools
    assert dram.drain == Drain(DrainMode.MIGRATE, 30 * 60_000, DrainTimeout.PAUSE)
    assert spare.drain.mode is DrainMode.DISCARD
    role = cluster.roles[0]
    assert (role.replicas, role.tensor, role.shm_bytes, role.grace_ms) == (4, 2, 8 * 2**30, 120_000)
    assert role.pod.resources["limits"] == {"memory": "192Gi", "nvidia.com/gpu": 2}
    assert role.pod.tolerations == ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},)
    assert role.pod.labels == {"team": "inference"}
    assert cluster.model.revision == "2026-07-30"
    assert cluster.rollout == Rollout(RolloutPolicy.SUPERVISED, 1)
    assert cluster.network_policies.allow_from == {"kubernetes.io/metadata.name": "monitoring"}
    assert cluster.observability.labels == {"release": "prometheus"}
    assert cluster.deletion is DeletionPolicy.DRAIN


def test_the_split_example_has_two_roles_and_a_router() -> None:
    cluster = load(EXAMPLES / "split.yaml")
    assert cluster.dialect is Dialect.XLLM
    assert [role.type for role in cluster.roles] == [RoleType.PREFILL, RoleType.DECODE]
    assert cluster.router == Router(replicas=2, port=8888)
    assert cluster.images.engine == "xllm:latest"


def test_the_index_outlives_a_failover_wherever_there_is_an_etcd() -> None:
    etcd = {"etcd": {"external": {"endpoints": ["etcd-0.etcd:2379", "[::1]:2379"]}}}
    cluster = parse(with_spec(coordination=etcd, master={"replicas": 3}))
    assert cluster.coordination == Coordination(external=("etcd-0.etcd:2379", "[::1]:2379"))
    assert cluster.master.durability is Durability.OPLOG
    forgetful = parse(with_spec(coordination=etcd, master={"durability": "None"}))
    assert forgetful.master.durability is Durability.NONE
    assert parse(MINIMAL).master.durability is Durability.NONE


def test_policies_are_read() -> None:
    cluster = parse(
        with_spec(
            paused=True,
            images={"default": "a:1", "pullPolicy": "Always", "pullSecrets": [{"name": "registry"}]},
            model={
                "source": {"uri": "pvc://models/tiny"},
                "identity": {"id": "tiny", "revision": "1", "weightsDigest": "sha256:1", "quantization": "fp8"},
                "namespacePolicy": "Explicit",
            },
            security={"networkPolicy": {"enabled": False}},
            observability={"serviceMonitor": "Never", "alerts": "Never"},
            transport={"hostNetwork": True},
        )
    )
    assert cluster.paused
    assert cluster.images == Images(default="a:1", pull_policy="Always", pull_secrets=("registry",))
    assert (cluster.model.uri, cluster.model.weights_digest, cluster.model.quantization) == (
        "pvc://models/tiny",
        "sha256:1",
        "fp8",
    )
    assert cluster.model.namespace_policy is NamespacePolicy.EXPLICIT
    assert not cluster.network_policies.enabled
    assert cluster.observability == Observability(Monitoring.NEVER, Monitoring.NEVER)
    assert cluster.transport.host_network


def test_a_cluster_may_rest() -> None:
    store = {"pools": [{"name": "dram", "segmentSize": "1Gi", "replicas": 0}]}
    tiers = {"host": {"blocksFactor": "2"}, "store": {"enabled": True}}
    cluster = parse(with_spec(store=store, roles=[{"name": "engine", "replicas": 0, "tiers": tiers}]))
    assert (cluster.pools[0].replicas, cluster.roles[0].replicas) == (0, 0)


def test_options_of_pods_are_handed_on() -> None:
    options: dict[str, Any] = {
        "resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": 2, "nvidia.com/gpu": "1"}},
        "nodeSelector": {"disk": "fast"},
        "affinity": {"nodeAffinity": {}},
        "annotations": {"example.org/team": "a b"},
        "env": {"KVTIER_API_KEY": "secret", "HTTP_PROXY": ""},
        "priorityClass": "high",
        "runtimeClass": "nvidia",
        "serviceAccount": "reader",
        "volumes": [{"name": "certificates", "secret": {"secretName": "tls"}}],
        "volumeMounts": [{"name": "certificates", "mountPath": "/certificates", "readOnly": True}],
    }
    pod = parse(with_pod(**options)).roles[0].pod
    assert pod == PodOptions(
        resources=options["resources"],
        node_selector={"disk": "fast"},
        affinity={"nodeAffinity": {}},
        annotations={"example.org/team": "a b"},
        env={"KVTIER_API_KEY": "secret", "HTTP_PROXY": ""},
        priority_class="high",
        runtime_class="nvidia",
        service_account="reader",
        volumes=({"name": "certificates", "secret": {"secretName": "tls"}},),
        volume_mounts=({"name": "certificates", "mountPath": "/certificates", "readOnly": True},),
    )


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"env": {"POD_IP": "1"}}, "env.POD_IP"),
        ({"env": {"KVTIER_SLOT": "1"}}, "env.KVTIER_SLOT"),
        ({"env": {"DEBUG": 1}}, "env.DEBUG"),
        ({"labels": {"app.kubernetes.io/name": "x"}}, "labels.app.kubernetes.io/name"),
        ({"labels": {"pod-template-hash": "x"}}, "labels.pod-template-hash"),
        ({"labels": {"team": "a b"}}, "labels.team"),
        ({"nodeSelector": {"a b": "x"}}, "nodeSelector.a b"),
        ({"priorityClass": "High"}, "priorityClass"),
        ({"annotations": {"a/b/c": "x"}}, "annotations.a/b/c"),
        ({"resources": {"requests": {"memory": "lots"}}}, "resources.requests.memory"),
        ({"resources": {"request": {}}}, "resources.request"),
        ({"tolerations": ["any"]}, "tolerations[0]"),
        ({"volumes": [{"emptyDir": {}}]}, "volumes[0].name"),
        ({"volumes": [{"name": "a"}, {"name": "a"}]}, "volumes"),
        (
            {"volumes": [{"name": "a"}], "volumeMounts": [{"name": "a", "mountPath": "relative"}]},
            "volumeMounts[0].mountPath",
        ),
        ({"affinity": []}, "affinity"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], path: str) -> None:
    assert list(refused(with_pod(**options))) == [f"spec.roles[0].pod.{path}"]


def test_a_name_of_a_volume_that_is_no_text_is_named_and_no_crash() -> None:
    found = refused(with_pod(volumes=[{"name": []}], volumeMounts=[{"name": "data", "mountPath": "/data"}]))
    assert list(found) == ["spec.roles[0].pod.volumes[0].name", "spec.roles[0].pod.volumeMounts"]


def test_labels_that_no_object_can_have_are_named() -> None:
    assert set(
        refused(
            with_spec(
                observability={"labels": {"release": "a b"}},
                security={"networkPolicy": {"allowFrom": {"-": "x"}}},
                images={"default": "", "engine": "a b", "pullSecrets": [{"name": "A"}]},
            )
        )
    ) == {
        "spec.observability.labels.release",
        "spec.security.networkPolicy.allowFrom.-",
        "spec.images.default",
        "spec.images.engine",
        "spec.images.pullSecrets[0].name",
    }


def test_a_volume_of_etcd_needs_a_size() -> None:
    etcd = {"etcd": {"managed": {"storage": {"class": "fast"}}}}
    assert list(refused(with_spec(coordination=etcd))) == ["spec.coordination.etcd.managed.storage.size"]


def test_ports_of_roles_that_rest_stay_theirs() -> None:
    roles = [{"name": "a", "port": 8010, "replicas": 0}, {"name": "b", "port": 8010, "replicas": 0}]
    assert refused(with_spec(roles=roles)) == {
        "spec.roles[1].port": "role a has ports 8010 to 8010 (engine i has port + i); move one of them"
    }


def test_words_of_a_flag_are_those_of_the_engine_that_runs() -> None:
    settings = {"priority_strategy": "deadline"}
    assert list(refused(with_spec(roles=[{"name": "engine", "settings": settings}]))) == [
        "spec.roles[0].settings.priority_strategy"
    ]
    cluster = parse(with_spec(engine={"dialect": "Xllm"}, roles=[{"name": "engine", "settings": settings}]))
    assert cluster.roles[0].settings == settings
