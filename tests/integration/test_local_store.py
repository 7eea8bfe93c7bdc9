"""The store's processes as `kvtier up` starts them, without an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtier_operator.local.process_plan import plan_processes
from kvtier_operator.local.supervisor import LocalCluster
from kvtier_operator.manifest import find_programs, load
from kvtier_operator.observed import Component

pytestmark = pytest.mark.mooncake


def store_cluster(file: Path, tmp_path: Path) -> tuple[LocalCluster, str]:
    """The master and the storage nodes of a manifest, and the url of the master's admin port."""
    processes = [
        process
        for process in plan_processes(load(file), "/no/model", find_programs())
        if not process.name.startswith("engine")
    ]
    return LocalCluster(processes, tmp_path / "logs", print), processes[0].url


@pytest.mark.parametrize("kind", ["Kvtier", "MooncakeClient"])
@pytest.mark.parametrize("shared_memory", [False, True])
def test_every_node_has_mounted_its_segment_when_the_cluster_is_ready(
    manifest: Callable[..., Path], tmp_path: Path, kind: str, shared_memory: bool
) -> None:
    def changes(spec: dict[str, Any]) -> None:
        spec["transport"]["sharedMemory"] = shared_memory
        spec["store"]["pools"] = [{"name": "dram", "kind": kind, "replicas": 2, "segmentSize": "64Mi"}]

    cluster, admin = store_cluster(manifest("local-tcp.yaml", changes), tmp_path)
    with cluster:
        segments = httpx.get(f"{admin}/get_all_segments").text.split()
        assert len(segments) == 2
        for segment in segments:
            told = httpx.get(f"{admin}/query_segment?segment={segment}").text
            assert f"Capacity(bytes) : {64 * 2**20}" in told


def test_a_kvtier_node_unmounts_when_it_is_stopped(manifest: Callable[..., Path], tmp_path: Path) -> None:
    cluster, admin = store_cluster(manifest("local-tcp.yaml"), tmp_path)
    with cluster:
        cluster.stop_process("store-dram-1")
        assert len(httpx.get(f"{admin}/get_all_segments").text.split()) == 1


@pytest.mark.etcd
def test_nodes_of_both_kinds_find_the_leader_through_an_etcd_of_several_members(
    manifest: Callable[..., Path], tmp_path: Path
) -> None:
    def changes(spec: dict[str, Any]) -> None:
        spec["coordination"] = {"etcd": {"managed": {"replicas": 3}}}
        spec["master"] = {"replicas": 2}
        spec["store"]["pools"] = [
            {"name": "dram", "segmentSize": "64Mi"},
            {"name": "wheel", "kind": "MooncakeClient", "segmentSize": "64Mi"},
        ]

    file = manifest("local-tcp.yaml", changes)
    etcd = find_programs(etcd=True)
    processes = [
        process
        for process in plan_processes(load(file), "/no/model", etcd, str(tmp_path))
        if process.component is not Component.ENGINE
    ]
    masters = [process.url for process in processes if process.component is Component.MASTER]
    with LocalCluster(processes, tmp_path / "logs", print):
        (leader,) = [url for url in masters if httpx.get(f"{url}/health").json()["service_ready"]]
        assert len(httpx.get(f"{leader}/get_all_segments").text.split()) == 2
