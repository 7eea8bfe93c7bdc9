"""What stands in the pods of a cluster."""

from dataclasses import replace
from pathlib import Path

import yaml
from kvtier_operator import labels
from kvtier_operator.api import DrainMode, KVCacheCluster, ManagedEtcd, PodOptions, parse
from kvtier_operator.observed import Manifest
from kvtier_operator.planning.revision import effective_model_id
from kvtier_operator.testing.rendered import Objects, built, container, environment, flags, pod, slot_lines, workloads
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.store_node.settings import StoreNodeSettings

CLUSTERS = Path(__file__).parents[3] / "golden" / "clusters"


def cluster(name: str = "highly-available") -> KVCacheCluster:
    return parse(yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text()))


def engine_set(objects: Objects) -> Manifest:
    return next(item for (kind, name), item in objects.items() if kind == "StatefulSet" and "-engine-" in name)


def test_an_engines_line_is_what_its_slot_and_its_template_say_together() -> None:
    described = cluster()
    objects = built(described)
    workload = engine_set(objects)
    name = workload["metadata"]["name"]
    assert container(workload)["command"] == ["kvtier", "slot", "--dir=/etc/kvtier", "--", "kvtier", "engine"]
    for slot in range(2):
        settings = WorkerSettings.from_argv(
            [*container(workload)["args"], *slot_lines(objects, name, f"slot-{slot}.flags")]
        )
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


def test_masters_are_probed_on_their_admin_port_and_publish_an_address() -> None:
    master = built(cluster())["StatefulSet", "ha-master"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container(master)[probe]["httpGet"] == {"path": "/health", "port": "admin"}
    assert flags(container(master)["args"])["rpc_address"] == "$(POD_IP)"


def test_an_etcds_quota_fits_its_volume() -> None:
    described = cluster()
    small = replace(described, coordination=replace(described.coordination, managed=ManagedEtcd(3, 1 << 30)))
    etcd = built(small)["StatefulSet", "ha-etcd"]
    assert int(flags(pod(etcd)["initContainers"][0]["command"])["quota-backend-bytes"]) < 1 << 30
    (claim,) = etcd["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Gi"
    assert etcd["spec"]["updateStrategy"]["type"] == "RollingUpdate"


def test_an_etcds_member_is_prepared_in_the_volume_that_it_starts_from() -> None:
    etcd = built(cluster())["StatefulSet", "ha-etcd"]
    (before,) = pod(etcd)["initContainers"]
    assert before["command"][:2] == ["kvtier", "etcd-member"]
    given = flags(before["command"])
    assert container(etcd)["args"] == [f"--config-file={given['config']}"]
    assert given["endpoints"].split(";")[2] == "ha-etcd-2.ha-etcd.llm.svc:21000"
    assert before["volumeMounts"] == container(etcd)["volumeMounts"]
    assert before["securityContext"] == container(etcd)["securityContext"]


def test_memory_is_asked_for_unless_the_user_does() -> None:
    objects = built(cluster("minimal"))
    assert container(objects["StatefulSet", "minimal-store-dram"])["resources"] == {"requests": {"memory": "4608Mi"}}
    # /dev/shm 1 GiB, two times the device cache of 512 MiB, and what an engine needs besides.
    assert container(engine_set(objects))["resources"] == {"requests": {"memory": "4Gi"}}
    stated = built(cluster())["StatefulSet", "ha-store-dram"]
    assert container(stated)["resources"] == {"requests": {"cpu": "2", "memory": "66Gi"}, "limits": {"memory": "66Gi"}}


def test_a_memory_volume_and_a_claim_of_weights_reach_the_engine() -> None:
    workload = engine_set(built(cluster()))
    volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
    mounts = {item["mountPath"]: item for item in container(workload)["volumeMounts"]}
    assert volumes["kvtier-shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert mounts["/dev/shm"]["name"] == "kvtier-shm"
    assert volumes["kvtier-model"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert mounts["/models/models"]["readOnly"]
    assert mounts["/work"]["name"] == "work"


def test_what_the_user_adds_to_pods_stands_beside_ours() -> None:
    workload = engine_set(built(cluster()))
    spec = pod(workload)
    affinity = spec["affinity"]
    assert "requiredDuringSchedulingIgnoredDuringExecution" in affinity["nodeAffinity"]
    assert "preferredDuringSchedulingIgnoredDuringExecution" in affinity["podAntiAffinity"]
    assert (spec["priorityClassName"], spec["runtimeClassName"]) == ("production", "nvidia")
    assert spec["serviceAccountName"] == "engines"
    assert workload["spec"]["template"]["metadata"]["labels"]["team"] == "inference"
    assert environment(workload)["KVTIER_API_KEY"] == "secret"
    assert environment(workload)["HOME"] == "/work"


def test_the_users_own_anti_affinity_is_kept() -> None:
    described = cluster("host-network")
    term = {"topologyKey": "rack", "labelSelector": {}}
    own = PodOptions(affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}})
    objects = built(replace(described, master=replace(described.master, pod=own)))
    rules = pod(objects["StatefulSet", "host-master"])["affinity"]["podAntiAffinity"]
    assert [rule["topologyKey"] for rule in rules["requiredDuringSchedulingIgnoredDuringExecution"]] == [
        "rack",
        "kubernetes.io/hostname",
    ]


def test_a_label_of_the_user_never_takes_the_place_of_ours() -> None:
    described = cluster("minimal")
    own = PodOptions(labels={labels.CLUSTER: "other", "a": "b"})
    objects = built(replace(described, master=replace(described.master, pod=own)))
    found = objects["StatefulSet", "minimal-master"]["spec"]["template"]["metadata"]["labels"]
    assert (found[labels.CLUSTER], found["a"]) == ("minimal", "b")


def test_pods_on_the_host_network_keep_off_each_others_nodes() -> None:
    for workload in workloads(built(cluster("host-network"))):
        spec = pod(workload)
        assert spec["hostNetwork"]
        assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
        (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        # Two revisions of a role share the role's HTTP port.
        assert labels.REVISION not in term["labelSelector"]["matchLabels"]


def test_a_drain_before_a_stop_has_its_time() -> None:
    described = cluster()
    objects = built(described)
    dram, wheel = objects["StatefulSet", "ha-store-dram"], objects["StatefulSet", "ha-store-wheel"]
    given = flags(container(dram)["args"])
    assert given["drain_timeout"] == "60000"
    for slot in range(2):
        own = flags(slot_lines(objects, "ha-store-dram", f"slot-{slot}.flags"))
        leader, *masters = own["master_admin_address"].split(";")
        assert leader == "ha-leader.llm.svc:21003"
        assert masters == [f"ha-master-{number}.ha-master.llm.svc:21003" for number in range(3)]
    assert objects["Service", "ha-leader"]["spec"]["ports"][1]["port"] == 21003
    assert pod(dram)["terminationGracePeriodSeconds"] == 75
    assert "drain_timeout" not in flags(container(wheel)["args"])
    assert "master_admin_address" not in flags(slot_lines(objects, "ha-store-wheel", "slot-0.flags"))
    pools = tuple(replace(pool, drain=replace(pool.drain, mode=DrainMode.DISCARD)) for pool in described.pools)
    objects = built(replace(described, pools=pools))
    dram = objects["StatefulSet", "ha-store-dram"]
    assert "master_admin_address" not in flags(slot_lines(objects, "ha-store-dram", "slot-0.flags"))
    assert pod(dram)["terminationGracePeriodSeconds"] == 15


def test_more_masters_restart_no_storage_node() -> None:
    described = cluster()
    more = replace(described, master=replace(described.master, replicas=5))
    before, after = (built(one)["StatefulSet", "ha-store-dram"]["spec"]["template"] for one in (described, more))
    assert before == after
    assert "ha-master-4." in "".join(slot_lines(built(more), "ha-store-dram", "slot-0.flags"))


def test_a_storage_nodes_command_is_one_that_it_takes() -> None:
    objects = built(cluster())
    known = set(StoreNodeSettings.__dataclass_fields__)
    for slot in range(2):
        given = flags(
            [
                *container(objects["StatefulSet", "ha-store-dram"])["args"],
                *slot_lines(objects, "ha-store-dram", f"slot-{slot}.flags"),
            ]
        )
        assert set(given) <= known
        assert given["host"].startswith(f"ha-store-dram-{slot}.ha-store-dram.llm.svc:")


def test_requests_in_flight_end_before_an_engine_does() -> None:
    workload = engine_set(built(cluster()))
    assert container(workload)["lifecycle"]["preStop"]["sleep"]["seconds"] == 3
    assert pod(workload)["terminationGracePeriodSeconds"] == 60 + 3 + 15
    described = cluster()
    roles = tuple(replace(role, grace_ms=90_500) for role in described.roles)
    workload = engine_set(built(replace(described, roles=roles)))
    assert pod(workload)["terminationGracePeriodSeconds"] == 91


def test_engines_of_xllm_get_its_flags_one_process_a_rank() -> None:
    objects = built(cluster("split"))
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
    objects = built(replace(described, roles=roles))
    given = flags(container(objects["Deployment", "split-router"])["args"])
    assert (given["block_size"], given["xxh3_128bits_seed"]) == ("32", "7")
    assert given["tokenizer_path"] == "/models/models/qwen3-32b"


def test_the_routers_image_is_its_own_else_that_of_the_engines() -> None:
    described = cluster("split")
    router = container(built(described)["Deployment", "split-router"])
    assert router["image"] == "registry.example/xllm-service:1.0"
    bare = replace(described, images=replace(described.images, router=""))
    assert container(built(bare)["Deployment", "split-router"])["image"] == "registry.example/xllm:1.0"


def test_who_listens_at_a_name_waits_until_it_is_its_own() -> None:
    objects = built(cluster())
    engine = engine_set(objects)["metadata"]["name"]
    for name, service in ((engine, "ha-engine"), ("ha-store-dram", "ha-store-dram")):
        assert slot_lines(objects, name, "slot-1.hosts") == [f"{name}-1.{service}.llm.svc"]
    assert "slot-0.hosts" not in objects["ConfigMap", "ha-master"]["data"]
    alone = built(cluster("engines-only"))
    configs = [item for (kind, _), item in alone.items() if kind == "ConfigMap"]
    assert len(configs) == 2
    assert all("slot-0.hosts" not in item["data"] for item in configs)
