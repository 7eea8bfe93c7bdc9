from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from kvtier_operator.api import PortRange, Protocol, RoleType, StoreKind, parse
from kvtier_operator.errors import SpecError
from kvtier_operator.manifest import load
from kvtier_worker.contract import WorkerSettings

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*.yaml"))

DOCUMENT: dict[str, Any] = {
    "apiVersion": "kvtier.dev/v1alpha1",
    "kind": "KVCacheCluster",
    "metadata": {"name": "demo"},
    "spec": {
        "store": {"pools": [{"name": "dram", "segmentSize": "1Gi"}]},
        "model": {"source": {"uri": "/models/tiny"}, "identity": {"id": "tiny"}},
        "roles": [
            {
                "name": "engine",
                "type": "Fused",
                "tiers": {
                    "device": {"size": "512Mi"},
                    "host": {"blocksFactor": "2"},
                    "store": {"enabled": True, "prefetch": {"batch": 8, "timeout": "30s"}},
                },
            }
        ],
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """DOCUMENT with one field set; path parts are names or indices."""
    document = deepcopy(DOCUMENT)
    at: Any = document
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in parents:
        at = at[part] if isinstance(part, int) else at.setdefault(part, {})
    at[last] = value
    return document


def violations_of(document: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse(document)
    return {violation.path: violation.fix for violation in caught.value.violations}


def test_a_small_manifest_is_read_with_defaults_in_place() -> None:
    cluster = parse(DOCUMENT)
    assert cluster.name == "demo"
    assert cluster.master.client_ttl_ms == 5000
    assert cluster.pools[0].kind is StoreKind.KVTIER
    assert cluster.pools[0].segment_bytes == 2**30
    assert cluster.transport.protocol is Protocol.TCP
    assert not cluster.transport.shared_memory
    assert cluster.transport.ports == PortRange(20000, 2000)
    role = cluster.roles[0]
    assert role.type is RoleType.FUSED
    assert (role.tensor, role.replicas, role.port) == (1, 1, WorkerSettings().port)
    assert role.tiers.device_bytes == 512 * 2**20
    assert role.tiers.prefetch_timeout_ms == 30_000
    assert cluster.uses_store


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_parses(path: Path) -> None:
    assert load(path).name == path.stem


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_all_violations_are_reported_at_once_with_path_value_and_fix() -> None:
    document = {
        "apiVersion": "kvtier.dev/v1",
        "kind": "KVCacheCluster",
        "metadata": {"name": "Demo"},
        "extra": 1,
        "spec": {
            "masters": {},
            "master": {"replicas": 3, "leaseTTL": 10, "clientTTL": "1500ms"},
            "store": {"pools": [{"name": "dram", "segmentSize": "1GB", "kind": "Redis", "size": 1}]},
            "transport": {"protocol": "rdma", "sharedMemory": "yes", "ports": {"range": {"start": 80}}},
            "model": {"source": {"uri": "https://hub/model"}, "identity": {"id": 7}},
            "roles": [
                {
                    "name": "store-x",
                    "type": "Mixed",
                    "replicas": -1,
                    "parallelism": {"tensor": "2"},
                    "port": 20001,
                    "tiers": {
                        "device": {"size": "1Gi", "memoryFraction": "1.5"},
                        "host": {"blocksFactor": 0.5},
                        "store": {"enabled": True, "prefetch": {"timeout": "fast"}},
                    },
                    "settings": {"block_size": "128", "blocksize": 1, "model": "x", "max_memory": 1},
                }
            ],
        },
    }
    with pytest.raises(SpecError) as caught:
        parse(document)
    paths = [violation.path for violation in caught.value.violations]
    assert set(paths) == {
        "apiVersion",
        "metadata.name",
        "extra",
        "spec.masters",
        "spec.master.replicas",
        "spec.master.leaseTTL",
        "spec.master.clientTTL",
        "spec.store.pools[0].segmentSize",
        "spec.store.pools[0].kind",
        "spec.store.pools[0].size",
        "spec.transport.protocol",
        "spec.transport.sharedMemory",
        "spec.transport.ports.range.start",
        "spec.model.source.uri",
        "spec.model.identity.id",
        "spec.roles[0].name",
        "spec.roles[0].type",
        "spec.roles[0].replicas",
        "spec.roles[0].parallelism.tensor",
        "spec.roles[0].port",
        "spec.roles[0].tiers.device.memoryFraction",
        "spec.roles[0].tiers.host.blocksFactor",
        "spec.roles[0].tiers.store.prefetch.timeout",
        "spec.roles[0].settings.block_size",
        "spec.roles[0].settings.blocksize",
        "spec.roles[0].settings.model",
        "spec.roles[0].settings.max_memory",
    }
    by_path = {violation.path: violation for violation in caught.value.violations}
    assert by_path["spec.masters"].fix == "unknown; did you mean master?"
    assert by_path["spec.roles[0].settings.blocksize"].fix == "unknown; did you mean block_size?"
    assert by_path["spec.roles[0].settings.model"].fix == "not set here; use model.source.uri"
    assert str(by_path["spec.store.pools[0].segmentSize"]).startswith("spec.store.pools[0].segmentSize = '1GB': write")


@pytest.mark.parametrize(
    ("path", "value", "violation"),
    [
        ("spec.roles", [], "spec.roles"),
        ("spec.roles", "engine", "spec.roles"),
        ("spec.roles", [{"name": f"r{number}", "port": 8010 + number} for number in range(7)], "spec.roles"),
        ("spec.roles.0", "engine", "spec.roles[0]"),
        ("spec.model", None, "spec.model.source.uri"),
        ("spec.model.identity", None, "spec.model.identity.id"),
        ("spec.store.pools", [], "spec.store.pools"),
        ("spec.roles.0.tiers.store.enabled", False, "spec.store.pools"),
        ("spec.roles.0.tiers.host.blocksFactor", "1", "spec.roles[0].tiers.host.blocksFactor"),
        ("spec.roles.0.tiers.host.blocksFactor", True, "spec.roles[0].tiers.host.blocksFactor"),
        ("spec.roles.0.port", 70000, "spec.roles[0].port"),
        ("spec.roles.0.settings", {"max_seqs_per_batch": True}, "spec.roles[0].settings.max_seqs_per_batch"),
        ("spec.roles.0.settings", {"api_key": "secret"}, "spec.roles[0].settings.api_key"),
        ("spec.roles.0.settings", [1], "spec.roles[0].settings"),
        ("spec.store.pools.0.segmentSize", "15Mi", "spec.store.pools[0].segmentSize"),
        ("spec.store.pools.0.segmentSize", "0.3", "spec.store.pools[0].segmentSize"),
        ("spec.transport.ports.range.size", 60000, "spec.transport.ports.range.size"),
        ("spec.master.leaseTTL", "10s5", "spec.master.leaseTTL"),
        ("spec.master.leaseTTL", "10ms", "spec.master.leaseTTL"),
    ],
)
def test_a_bad_value_is_named(path: str, value: Any, violation: str) -> None:
    assert violation in violations_of(changed(path, value))


def test_two_pools_of_one_name_are_refused() -> None:
    pool = {"name": "dram", "segmentSize": "1Gi"}
    assert violations_of(changed("spec.store.pools", [pool, pool])) == {
        "spec.store.pools": "give every pool another name"
    }


@pytest.mark.parametrize(
    ("text", "milliseconds"), [("500ms", 500), ("30s", 30_000), ("1m30s", 90_000), ("1h", 3_600_000)]
)
def test_durations_have_units(text: str, milliseconds: int) -> None:
    cluster = parse(changed("spec.roles.0.tiers.store.prefetch.timeout", text))
    assert cluster.roles[0].tiers.prefetch_timeout_ms == milliseconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("1Gi", 2**30), ("1.5Gi", 3 * 2**29), ("64M", 64 * 10**6), (33554432, 2**25), ("33554432", 2**25)],
)
def test_quantities_are_those_of_kubernetes(text: str | int, size: int) -> None:
    assert parse(changed("spec.store.pools.0.segmentSize", text)).pools[0].segment_bytes == size


def test_settings_have_the_types_of_the_engines_flags() -> None:
    settings = {"block_size": 64, "dtype": "float32", "enable_mix_batch": False}
    assert parse(changed("spec.roles.0.settings", settings)).roles[0].settings == settings


def test_fields_of_the_api_server_are_no_violation() -> None:
    document = changed("metadata.uid", "7c1d")
    document["status"] = {"phase": "Ready"}
    parse(document)


def test_a_field_that_stands_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("kind: KVCacheCluster\nkind: Other\n")
    with pytest.raises(SpecError, match="stands twice"):
        load(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml")
