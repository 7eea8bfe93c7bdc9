"""Parser and API server take and refuse the same manifests, as far as schema and CEL can say what the parser says."""

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from kvtier_operator.api import parse
from kvtier_operator.errors import SpecError
from kvtier_operator.testing.api_client import RequestFailed
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.installation import install_definition

pytestmark = pytest.mark.apiserver

ROUNDS = 250
STORED: dict[str, Any] = {"host": {"blocksFactor": "2"}, "store": {"enabled": True}}
MODEL: dict[str, Any] = {"source": {"uri": "/models/tiny"}, "identity": {"id": "tiny"}}
POOL: dict[str, Any] = {"name": "dram", "segmentSize": "1Gi"}
BASES: list[dict[str, Any]] = [
    {"model": MODEL, "roles": [{"name": "engine"}]},
    {"model": MODEL, "roles": [{"name": "engine", "port": 8010}, {"name": "other", "port": 8020}]},
    {
        "model": MODEL,
        "coordination": {"etcd": {"managed": {"replicas": 3}}},
        "master": {"replicas": 3},
        "store": {"pools": [POOL]},
        "transport": {"hostNetwork": True},
        "roles": [{"name": "engine", "tiers": STORED}],
    },
    {
        "model": MODEL,
        "engine": {"dialect": "Xllm"},
        "store": {"pools": [POOL]},
        "roles": [
            {"name": "prefill", "type": "Prefill", "port": 8010, "tiers": STORED},
            {"name": "decode", "type": "Decode", "port": 8110, "tiers": STORED},
        ],
        "router": {"port": 8888},
    },
]
NAMES = [
    "engine",
    "other",
    "api",
    "ports",
    "store",
    "store-x",
    "stored",
    "a-role-whose-name-is-as-long-as-it-may-b",
    "A",
    "",
]
PORTS = [80, 8010, 8011, 8020, 8888, 19_999, 20_000, 21_999, 22_000, 29_999, 30_000, 32_767, 32_768, 65_535]
DECIMALS = [0, 1, 2, "0", "1", "1.0", "1.000000001", "1.5", "-1", "", "x", "1e3"]
DURATIONS = ["0s", "999ms", "1s", "1500ms", "1m30s", "2000h", "99999h", "1", "s", "", "1d"]
SIZES = ["16Mi", "16777215", 16_777_216, "1Gi", "1GB", "0.001Gi", "-1Gi", "", 0]


def anywhere(field: str, values: list[Any], *parents: str) -> Callable[[dict[str, Any], random.Random], None]:
    """Set a field of an object of the spec, which is made if absent."""

    def change(spec: dict[str, Any], dice: random.Random) -> None:
        at = spec
        for parent in parents:
            at = at.setdefault(parent, {})
        at[field] = deepcopy(dice.choice(values))

    return change


def in_a_role(field: str, values: list[Any], *parents: str) -> Callable[[dict[str, Any], random.Random], None]:
    def change(spec: dict[str, Any], dice: random.Random) -> None:
        anywhere(field, values, *parents)(dice.choice(spec["roles"]), dice)

    return change


def in_the_pool(field: str, values: list[Any], *parents: str) -> Callable[[dict[str, Any], random.Random], None]:
    def change(spec: dict[str, Any], dice: random.Random) -> None:
        pools = spec.setdefault("store", {}).setdefault("pools", [])
        if not pools:
            pools.append(deepcopy(POOL))
        anywhere(field, values, *parents)(pools[0], dice)

    return change


def drop(field: str) -> Callable[[dict[str, Any], random.Random], None]:
    def change(spec: dict[str, Any], _dice: random.Random) -> None:
        spec.pop(field, None)

    return change


CHANGES = [
    anywhere("replicas", [0, 1, 2, 3, 9, 10], "master"),
    anywhere("durability", ["None", "OpLog", "Snapshot"], "master"),
    anywhere("leaseTTL", DURATIONS, "master"),
    anywhere("clientTTL", DURATIONS, "master"),
    anywhere("etcd", [{}, {"managed": {}}, {"managed": {"replicas": 2}}], "coordination"),
    anywhere("external", [{"endpoints": ["etcd:2379"]}, {"endpoints": []}, {}], "coordination", "etcd"),
    drop("coordination"),
    anywhere("dialect", ["Kvtier", "Xllm", "vllm"], "engine"),
    anywhere("router", [{}, *({"port": port} for port in PORTS), {"port": 8007, "replicas": 4}]),
    drop("router"),
    anywhere("sharedMemory", [True, False], "transport"),
    anywhere("hostNetwork", [True, False], "transport"),
    anywhere("start", [1023, 1024, 7000, 20_000, 29_000, 32_768, 65_000], "transport", "ports", "range"),
    anywhere("size", [0, 1, 536, 537, 1000, 1001, 12_000], "transport", "ports", "range"),
    anywhere("pools", [[], [POOL], [POOL, {**POOL, "name": "spare"}], [POOL, POOL]], "store"),
    in_the_pool("name", NAMES),
    in_the_pool("segmentSize", SIZES),
    in_the_pool("timeout", DURATIONS, "drain"),
    in_a_role("name", NAMES),
    in_a_role("type", ["Fused", "Prefill", "Decode", "Encode"]),
    in_a_role("replicas", [0, 1, 2, 10, 11, 256, 257]),
    in_a_role("port", PORTS),
    in_a_role("enabled", [True, False], "tiers", "store"),
    in_a_role("blocksFactor", DECIMALS, "tiers", "host"),
    in_a_role("memoryFraction", DECIMALS, "tiers", "device"),
    in_a_role("size", SIZES, "tiers", "device"),
    in_a_role("block_size", [0, 1, 64, 65_536, 65_537], "settings"),
    in_a_role("env", [{"A": "b"}, {"MC_A": "b"}, {"KVTIER_API_KEY": "b"}, {"KVTIER_A": "b"}], "pod"),
    in_a_role("labels", [{"a": "b"}, {"kvtier.dev/a": "b"}, {"controller-revision-hash": "b"}], "pod"),
    in_a_role("mountPath", ["/a", "/tmp", "/tmp/a", "/tmpa", "a"], "mount"),
    in_a_role("memory", ["1Gi", "2Gi", "3G", 1], "pod", "resources", "limits"),
    in_a_role("memory", ["1Gi", "2Gi", "2.5Gi", 1], "pod", "resources", "requests"),
    anywhere(
        "uri", ["/a", "pvc://a", "pvc://a/b", "pvc://", "file:///a", "file://a", "http://a", ""], "model", "source"
    ),
]


def with_mounts(role: dict[str, Any]) -> dict[str, Any]:
    """A role whose `mount` stands for a volume and its mount."""
    if "mount" in role:
        mount = {"name": "data", **role.pop("mount")}
        role.setdefault("pod", {}).update(volumes=[{"name": "data", "emptyDir": {}}], volumeMounts=[mount])
    return role


def manifest(dice: random.Random) -> dict[str, Any]:
    spec = deepcopy(dice.choice(BASES))
    for _ in range(dice.randint(1, 3)):
        dice.choice(CHANGES)(spec, dice)
    spec["roles"] = [with_mounts(role) for role in spec["roles"]]
    name = dice.choice(["demo", "demo", "demo", "a-demo", "1demo", "demo.a", "a" * 11, "a" * 12, "a" * 45, "a" * 46])
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "kvtier.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": metadata, "spec": spec}


@pytest.mark.parametrize("seed", range(2))
def test_parser_and_api_server_agree(control_plane: ControlPlane, seed: int) -> None:
    install_definition(control_plane)
    dice = random.Random(seed)
    taken = 0
    for _ in range(ROUNDS):
        document = manifest(dice)
        ours, theirs = parsers_answer(document), servers_answer(control_plane, document)
        assert (not ours) == (not theirs), f"{document}\nparser: {ours}\nAPI server: {theirs}"
        taken += not ours
    assert ROUNDS / 12 < taken < ROUNDS * 11 / 12


def parsers_answer(document: dict[str, Any]) -> str:
    try:
        parse(document)
    except SpecError as error:
        return str(error)
    return ""


def servers_answer(control_plane: ControlPlane, document: dict[str, Any]) -> str:
    path = "/apis/kvtier.dev/v1alpha1/namespaces/default/kvcacheclusters?dryRun=All&fieldValidation=Strict"
    try:
        control_plane.api.create(path, document)
    except RequestFailed as error:
        return str(error)
    return ""
