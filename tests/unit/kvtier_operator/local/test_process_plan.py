import dataclasses
from itertools import combinations, groupby
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.api import (
    Coordination,
    Durability,
    KVCacheCluster,
    ManagedEtcd,
    StoreKind,
    parse,
)
from kvtier_operator.errors import SpecError
from kvtier_operator.local.process_plan import plan_processes
from kvtier_operator.observed import Component
from kvtier_operator.resources.processes import AnyProbe, HttpProbe, ProcessSpec, Programs
from kvtier_worker.contract import WorkerSettings


def cluster(
    *, nodes: int = 1, engines: int = 1, tensor: int = 1, kind: str = "Kvtier", shm: bool = False, ports: int = 2000
) -> KVCacheCluster:
    return parse(
        {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheCluster",
            "metadata": {"name": "demo"},
            "spec": {
                "store": {"pools": [{"name": "dram", "kind": kind, "replicas": nodes, "segmentSize": "64Mi"}]},
                "transport": {"sharedMemory": shm, "ports": {"range": {"start": 20000, "size": ports}}},
                "model": {"source": {"uri": "/m"}, "identity": {"id": "tiny"}},
                "roles": [
                    {
                        "name": "engine",
                        "type": "Fused",
                        "replicas": engines,
                        "parallelism": {"tensor": tensor},
                        "tiers": {
                            "device": {"size": "64Mi"},
                            "host": {"blocksFactor": "2"},
                            "store": {"enabled": True, "prefetch": {"batch": 4, "timeout": "2s"}},
                        },
                        "settings": {"block_size": 64},
                    }
                ],
            },
        }
    )


def plan(described: KVCacheCluster) -> dict[str, ProcessSpec]:
    return {process.name: process for process in plan_processes(described, "/models/tiny", Programs(), "/state")}


def settings_of(process: ProcessSpec) -> WorkerSettings:
    return WorkerSettings.from_argv(process.argv[2:])


def flags_of(process: ProcessSpec) -> dict[str, str]:
    return dict(argument[2:].split("=", 1) for argument in process.argv if "=" in argument)


def test_processes_start_master_first_and_engine_last() -> None:
    assert list(plan(cluster(nodes=2, engines=2))) == [
        "master-0",
        "store-dram-0",
        "store-dram-1",
        "engine-0",
        "engine-1",
    ]


def test_the_engines_command_parses_to_what_the_manifest_says() -> None:
    processes = plan(cluster(tensor=3))
    settings = settings_of(processes["engine-0"])
    assert processes["engine-0"].argv[:2] == ("kvtier", "engine")
    assert (settings.model, settings.model_id, settings.tp_size, settings.block_size) == ("/models/tiny", "tiny", 3, 64)
    assert (settings.max_cache_size, settings.host_blocks_factor) == (64 * 2**20, 2.0)
    assert (settings.enable_kvcache_store, settings.prefetch_batch_size, settings.prefetch_timeout) == (True, 4, 2000)
    master = flags_of(processes["master-0"])
    assert settings.store_master_server_address == f"{master['rpc_address']}:{master['rpc_port']}"
    assert settings.store_shm_client == ""


@pytest.mark.parametrize("kind", list(StoreKind))
def test_shared_memory_leads_each_engine_to_a_storage_node_of_its_machine(kind: StoreKind) -> None:
    processes = plan(cluster(nodes=2, engines=2, kind=kind, shm=True))
    flag = "shm_port" if kind is StoreKind.KVTIER else "port"
    nodes = [f"127.0.0.1:{flags_of(processes[f'store-dram-{index}'])[flag]}" for index in range(2)]
    assert [settings_of(processes[f"engine-{index}"]).store_shm_client for index in range(2)] == nodes


def test_without_shared_memory_the_node_opens_no_door_for_it() -> None:
    assert "shm_port" not in flags_of(plan(cluster())["store-dram-0"])


def test_a_cluster_without_store_is_engines_only() -> None:
    document = {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheCluster",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"source": {"uri": "/m"}, "identity": {"id": "tiny"}},
            "roles": [{"name": "engine", "type": "Fused", "tiers": {"device": {"size": "64Mi"}}}],
        },
    }
    processes = plan(parse(document))
    assert list(processes) == ["engine-0"]
    assert not settings_of(processes["engine-0"]).enable_kvcache_store


def test_what_the_engine_would_refuse_is_refused_before_anything_starts() -> None:
    described = cluster()
    role = described.roles[0]
    document_settings = {**role.settings, "enable_prefix_cache": False}
    broken = KVCacheCluster(
        described.name,
        described.master,
        described.pools,
        described.transport,
        described.model,
        (type(role)(role.name, role.type, role.replicas, role.tensor, role.port, role.tiers, document_settings),),
    )
    with pytest.raises(SpecError, match="enable_prefix_cache"):
        plan(broken)


def test_a_range_that_is_too_small_says_how_many_ports_are_needed() -> None:
    with pytest.raises(SpecError, match=r"spec\.transport\.ports\.range\.size = 18: this cluster needs 19 ports"):
        plan(cluster(ports=18))
    plan(cluster(ports=19))


@given(nodes=st.integers(1, 5), engines=st.integers(1, 4), tensor=st.integers(1, 8), shm=st.booleans())
def test_no_port_has_two_owners_and_all_lie_in_the_range(nodes: int, engines: int, tensor: int, shm: bool) -> None:
    described = cluster(nodes=nodes, engines=engines, tensor=tensor, shm=shm)
    claims: list[set[int]] = []
    for process in plan(described).values():
        mine = set(process.ports)
        flags = flags_of(process)
        low, high = process.env.get("MC_MIN_RPC_PORT"), process.env.get("MC_MAX_RPC_PORT")
        if low and high:
            assert int(high) - int(low) + 1 >= 2 * (tensor if process.name.startswith("engine") else 1)
            assert set(range(int(low), int(high) + 1)) <= mine
        if "host" in flags:
            mine.add(int(flags["host"].split(":")[1]))
        if process.name.startswith("engine"):
            settings = settings_of(process)
            labels = {settings.store_endpoint(rank).port for rank in range(tensor)}
            assert not labels & mine
            mine |= labels
            mine.remove(settings.port)
        assert all(described.transport.ports.start <= port < described.transport.ports.stop for port in mine)
        claims.append(mine)
    assert all(not one & other for one, other in combinations(claims, 2))


def test_the_same_manifest_gives_the_same_commands() -> None:
    assert plan(cluster(nodes=3, engines=2)) == plan(cluster(nodes=3, engines=2))


def with_election(described: KVCacheCluster, *, members: int = 1, masters: int = 3) -> KVCacheCluster:
    return dataclasses.replace(
        described,
        master=dataclasses.replace(described.master, replicas=masters, durability=Durability.OPLOG),
        coordination=Coordination(managed=ManagedEtcd(replicas=members)),
    )


def test_etcd_comes_first_and_each_kind_starts_as_one_batch_except_engines() -> None:
    processes = plan(with_election(cluster(nodes=2, engines=2), members=3, masters=2))
    batches = [list(batch) for _, batch in groupby(processes, key=lambda name: processes[name].batch or name)]
    assert batches == [
        ["etcd-0", "etcd-1", "etcd-2"],
        ["master-0", "master-1"],
        ["store-dram-0", "store-dram-1"],
        ["engine-0"],
        ["engine-1"],
    ]


def test_masters_elect_over_etcd_and_clients_find_them_there_under_the_same_id() -> None:
    processes = plan(with_election(cluster(), members=3))
    endpoints = [flags_of(processes[f"etcd-{index}"])["advertise-client-urls"] for index in range(3)]
    hosts = [endpoint.removeprefix("http://") for endpoint in endpoints]
    masters = [flags_of(processes[f"master-{index}"]) for index in range(3)]
    assert {master["ha_backend_connstring"] for master in masters} == {";".join(hosts)}
    assert {master["enable_ha"] for master in masters} == {master["enable_oplog"] for master in masters} == {"true"}
    (cluster_id,) = {master["cluster_id"] for master in masters}
    assert cluster_id == "default.demo"
    for client in (processes["store-dram-0"], processes["engine-0"]):
        assert flags_of(client).items() & {
            ("master_server_address", f"etcd://{';'.join(hosts)}"),
            ("store_master_server_address", f"etcd://{';'.join(hosts)}"),
        }
        assert client.env["MC_STORE_CLUSTER_ID"] == cluster_id


def test_without_durability_the_masters_keep_no_log() -> None:
    described = with_election(cluster())
    described = dataclasses.replace(described, master=dataclasses.replace(described.master, durability=Durability.NONE))
    assert flags_of(plan(described)["master-0"])["enable_oplog"] == "false"


def test_masters_are_ready_when_each_answers_and_one_of_them_serves() -> None:
    processes = plan(with_election(cluster(), masters=2))
    admins = [processes[f"master-{index}"].url for index in range(2)]
    for index, admin in enumerate(admins):
        own, leader = processes[f"master-{index}"].probes
        assert own == HttpProbe(f"{admin}/health")
        assert isinstance(leader, AnyProbe)
        assert leader.probes == tuple(HttpProbe(f"{one}/health", {"service_ready": True}) for one in admins)


def test_a_master_that_died_stays_away_for_an_election_unless_it_is_the_only_one() -> None:
    pauses = {
        masters: plan(with_election(cluster(), masters=masters))["master-0"].restart_pause_s for masters in (1, 2)
    }
    assert pauses[1] == 0
    assert pauses[2] > 5


def test_an_external_etcd_is_used_as_it_is() -> None:
    described = dataclasses.replace(cluster(), coordination=Coordination(external=("10.0.0.1:2379", "10.0.0.2:2379")))
    processes = plan(described)
    assert not [name for name in processes if name.startswith("etcd")]
    assert flags_of(processes["master-0"])["ha_backend_connstring"] == "10.0.0.1:2379;10.0.0.2:2379"
    assert settings_of(processes["engine-0"]).store_master_server_address == "etcd://10.0.0.1:2379;10.0.0.2:2379"


def test_members_of_an_etcd_know_one_another_and_keep_their_data_apart() -> None:
    members = [plan(with_election(cluster(), members=3))[f"etcd-{index}"] for index in range(3)]
    flags = [flags_of(member) for member in members]
    listed = ",".join(f"{flag['name']}={flag['initial-advertise-peer-urls']}" for flag in flags)
    assert {flag["initial-cluster"] for flag in flags} == {listed}
    folders = [flag["data-dir"] for flag in flags]
    assert folders == [member.data_dir for member in members] == [f"/state/etcd-{index}" for index in range(3)]


def test_every_process_has_an_address_of_its_own_as_a_pod_has() -> None:
    processes = plan(with_election(cluster(nodes=2, engines=2)))
    urls = [process.url for process in processes.values() if process.component is not Component.ENGINE]
    hosts = [str(urlsplit(url).hostname) for url in urls]
    hosts += [settings_of(processes[f"engine-{index}"]).store_endpoint(0).host for index in range(2)]
    assert len(set(hosts)) == len(hosts)
    assert all(host.startswith("127.0.1.") for host in hosts)


def test_several_pools_and_roles_run_side_by_side_and_none_may_be_idle() -> None:
    described = cluster()
    pool, role = described.pools[0], described.roles[0]
    described = dataclasses.replace(
        described,
        pools=(pool, dataclasses.replace(pool, name="more", replicas=2)),
        roles=(
            role,
            dataclasses.replace(role, name="small", port=9000, replicas=2),
            dataclasses.replace(role, name="idle", port=9100, replicas=0),
        ),
    )
    assert list(plan(described)) == [
        "master-0",
        "store-dram-0",
        "store-more-0",
        "store-more-1",
        "engine-0",
        "small-0",
        "small-1",
    ]
