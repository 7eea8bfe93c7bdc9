"""Passes against a real API server, cut off or failing at every single write; and the client's promises about the API.

In this process: the index is filled from lists, so that nothing depends on when a watch shows something.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml
from kvtier_operator.controller.apply import Executor
from kvtier_operator.controller.events import Events
from kvtier_operator.controller.foreign import ForeignObjects
from kvtier_operator.controller.index import ClusterKey, Index
from kvtier_operator.controller.kube_client import KubeClient, Request
from kvtier_operator.controller.leadership import Leadership, OpenFence
from kvtier_operator.controller.loop import Controller, Policy
from kvtier_operator.controller.masters_poll import MasterPoller
from kvtier_operator.controller.metrics import OperatorMetrics
from kvtier_operator.controller.relist import Relist
from kvtier_operator.errors import (
    ApiConflict,
    ApiDenied,
    ApiError,
    ApiInvalid,
    ApiNotFound,
    ApiUnavailable,
    NamespaceEnding,
)
from kvtier_operator.kinds import CHILD_KINDS, CLUSTER_KIND, CONFIG_MAP_KIND, KINDS, LEASE_KIND, POD_KIND
from kvtier_operator.labels import CLUSTER, MANAGED_BY, MANAGER
from kvtier_operator.reconcile import reconcile, refuse
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.fake_masters import FakeMasters
from kvtier_operator.testing.faulty_cluster import Crash, Fault, FaultyCluster
from kvtier_operator.testing.installation import install_definition, small_cluster, stored_cluster

pytestmark = pytest.mark.apiserver
KEEP_PASSES = 12


@pytest.fixture(scope="module")
def installed(control_plane: ControlPlane) -> ControlPlane:
    install_definition(control_plane)
    return control_plane


def login_of(control_plane: ControlPlane) -> kopf.ConnectionInfo:
    ca = control_plane.ca_file
    return kopf.ConnectionInfo(server=control_plane.server, ca_path=str(ca), token=control_plane.token)


@asynccontextmanager
async def client(control_plane: ControlPlane) -> AsyncIterator[KubeClient]:
    async with KubeClient(lambda: login_of(control_plane)) as api:
        yield api


class Process:
    """One operator process, as far as its passes go: it begins with an empty index and may die."""

    def __init__(self, api: KubeClient, namespace: str, faults: deque[Fault] | None = None) -> None:
        self.api = FaultyCluster(api, faults or deque())
        self.index, self.metrics, masters = Index(), OperatorMetrics(), FakeMasters()
        foreign = ForeignObjects(self.api)
        executor = Executor(
            api=self.api,
            index=self.index,
            fence=OpenFence(),
            admin=masters,
            events=Events(self.api, "test"),
            metrics=self.metrics,
            operator_namespace=namespace,
            seen_foreign=foreign.seen,
        )
        self.controller = Controller(
            policy=Policy(reconcile, refuse),
            index=self.index,
            executor=executor,
            poller=MasterPoller(masters, lambda _key: None),
            foreign=foreign,
            metrics=self.metrics,
            operator_namespace=namespace,
        )
        self._relist = Relist(self.api, self.index, (namespace,), lambda _key: None, lambda _kind: None)

    async def look_around(self) -> None:
        """As the watches would have it."""
        await self._relist.repair(await self._relist.missing([CLUSTER_KIND, *CHILD_KINDS, POD_KIND]))

    async def settle(self, key: ClusterKey) -> None:
        """Passes until one writes nothing; failed ones are tried again."""
        for _ in range(KEEP_PASSES):
            await self.look_around()
            try:
                outcome, _ = await self.controller.look_after(key)
            except ApiError:
                continue
            if outcome == "unchanged":
                return
        pytest.fail(f"still {outcome} after {KEEP_PASSES} passes")

    async def rest(self, key: ClusterKey) -> None:
        """Settle until also what Kubernetes makes of it, pods that wait for nodes, leaves nothing to write."""
        writes = -1
        for _ in range(KEEP_PASSES):
            await self.settle(key)
            if self.api.writes == writes:
                return
            writes = self.api.writes
            await asyncio.sleep(1)
        pytest.fail(f"{self.api.writes} writes after {KEEP_PASSES} s and no rest")


async def intents(api: KubeClient, namespace: str, name: str) -> dict[str, Any]:
    """What stands of our objects that does not differ from one namespace to the next."""
    found = {}
    for kind in CHILD_KINDS:
        async for listed in api.list_metadata(kind, namespace, f"{MANAGED_BY}={MANAGER},{CLUSTER}={name}"):
            live = await api.get(kind, namespace, listed.name)
            assert live is not None
            spec, labels = live.get("spec") or {}, live["metadata"]["labels"]
            fields = ("replicas", "ports", "podSelector", "maxUnavailable")
            kept = {field: spec[field] for field in fields if field in spec}
            files = [] if listed.name.endswith("-ports") else sorted(live.get("data") or {})
            found[f"{kind.name}/{listed.name}"] = (kept, labels, files)
    return found


async def make(api: KubeClient, namespace: str, manifest: dict[str, Any]) -> ClusterKey:
    await api.create(CLUSTER_KIND, namespace, manifest)
    return ClusterKey(namespace, manifest["metadata"]["name"])


def comparable(manifest: dict[str, Any]) -> dict[str, Any]:
    """With an id that does not follow the namespace, so that equal specs get equal names of revisions."""
    return manifest | {"spec": manifest["spec"] | {"clusterID": "same"}}


@pytest.mark.parametrize("manifest", [small_cluster("cut"), stored_cluster("cut")], ids=["small", "stored"])
def test_a_process_that_dies_at_any_write_leaves_what_the_next_one_completes(
    installed: ControlPlane, manifest: dict[str, Any]
) -> None:
    manifest = comparable(manifest)

    async def play() -> None:
        async with client(installed) as api:
            with installed.namespace("cut") as namespace:
                whole = Process(api, namespace)
                await whole.settle(await make(api, namespace, manifest))
                expected = await intents(api, namespace, "cut")
            # To die right before a write is to die right after the one before it. Until one lives: how many writes it
            # takes to settle depends on how soon Kubernetes makes the pods.
            num_crashes, lived = 0, False
            while not lived:
                with installed.namespace("cut") as namespace:
                    key = await make(api, namespace, manifest)
                    dying = Process(api, namespace, deque([*[Fault.NONE] * num_crashes, Fault.CRASH_AFTER]))
                    try:
                        await dying.settle(key)
                    except Crash:
                        num_crashes += 1
                    else:
                        lived = True
                    await Process(api, namespace).settle(key)
                    assert await intents(api, namespace, "cut") == expected, f"after write {num_crashes}"
            assert num_crashes > 5

    asyncio.run(play())


@pytest.mark.parametrize("fault", [Fault.CONFLICT, Fault.BUSY, Fault.BROKEN, Fault.LOST_BEFORE, Fault.LOST_AFTER])
def test_any_write_may_fail_in_any_way_and_the_end_is_the_same(installed: ControlPlane, fault: Fault) -> None:
    manifest = comparable(small_cluster("flaky"))

    async def play() -> None:
        async with client(installed) as api:
            with installed.namespace("flaky") as namespace:
                sound = Process(api, namespace)
                await sound.settle(await make(api, namespace, manifest))
                expected = await intents(api, namespace, "flaky")
            with installed.namespace("flaky") as namespace:
                key = await make(api, namespace, manifest)
                flaky = Process(api, namespace, deque([Fault.NONE, fault] * 5))
                await flaky.settle(key)
                assert await intents(api, namespace, "flaky") == expected

    asyncio.run(play())


def test_a_restarted_process_writes_nothing(installed: ControlPlane, namespace: str) -> None:
    async def play() -> None:
        async with client(installed) as api:
            key = await make(api, namespace, stored_cluster("quiet"))
            await Process(api, namespace).rest(key)
            again = Process(api, namespace)
            await again.settle(key)
            assert again.api.writes == 0

    asyncio.run(play())


def service(namespace: str, port: int = 80, **meta: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s", "namespace": namespace, **meta},
        "spec": {"ports": [{"name": "x", "port": port}], "selector": {"a": "b"}},
    }


def test_the_client_keeps_what_the_port_promises(installed: ControlPlane, namespace: str) -> None:
    kind = KINDS["Service"]
    seen: list[Request] = []

    async def play() -> None:
        async with KubeClient(lambda: login_of(installed), seen.append) as api:
            assert await api.get(kind, namespace, "s") is None
            with pytest.raises(ApiConflict):
                await api.apply(service(namespace, uid="00000000-0000-0000-0000-000000000000"), force=True)
            first = await api.apply(service(namespace), force=False)
            uid = first["metadata"]["uid"]
            same = await api.apply(service(namespace, uid=uid), force=True)
            assert same["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
            with pytest.raises(ApiConflict):
                await api.apply(service(namespace, uid="00000000-0000-0000-0000-000000000000"), force=True)
            with pytest.raises(ApiInvalid) as invalid:
                await api.apply(service(namespace, port=-1, uid=uid), force=True)
            assert "port" in invalid.value.message
            wrong = {"metadata": {"uid": "00000000-0000-0000-0000-000000000000", "labels": {"x": "y"}}}
            with pytest.raises(ApiConflict):
                await api.merge(kind, namespace, "s", wrong)
            with pytest.raises(ApiConflict):
                await api.delete(kind, namespace, "s", "00000000-0000-0000-0000-000000000000")
            await api.delete(kind, namespace, "s", uid)
            assert await api.get(kind, namespace, "s") is None
            with pytest.raises(ApiNotFound):
                await api.delete(kind, namespace, "s", uid)
            assert await api.serves(CLUSTER_KIND)
            assert not await api.serves(KINDS["ServiceMonitor"])

    asyncio.run(play())
    assert Request("patch", "services", 409) in seen
    assert Request("delete", "services", 200) in seen


@pytest.mark.parametrize("data", [{"a": "theirs"}, {"b": "theirs"}], ids=["same field", "other field"])
def test_an_object_that_appears_between_look_and_first_apply_is_not_taken_over(
    installed: ControlPlane, namespace: str, data: dict[str, str]
) -> None:
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": namespace}, "data": data}
    ours = theirs | {"data": {"a": "ours"}, "metadata": theirs["metadata"] | {"labels": {"kind": "ours"}}}  # type: ignore[operator]

    async def play() -> None:
        async with client(installed) as api:
            await api.create(CONFIG_MAP_KIND, namespace, theirs)
            with pytest.raises(ApiConflict):
                await api.apply(ours, force=False)
            now = await api.get(CONFIG_MAP_KIND, namespace, "c")
            assert now is not None
            assert now["data"] == data
            assert "labels" not in now["metadata"]

    asyncio.run(play())


def test_a_write_under_an_old_version_is_a_conflict(installed: ControlPlane, namespace: str) -> None:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "ledger", "namespace": namespace}, "data": {}}

    async def play() -> None:
        async with client(installed) as api:
            first = await api.create(CONFIG_MAP_KIND, namespace, body)
            await api.replace(CONFIG_MAP_KIND, namespace, "ledger", first | {"data": {"a": "1"}})
            with pytest.raises(ApiConflict):
                await api.replace(CONFIG_MAP_KIND, namespace, "ledger", first | {"data": {"a": "2"}})
            with pytest.raises(ApiConflict):
                await api.create(CONFIG_MAP_KIND, namespace, body)

    asyncio.run(play())


def test_a_namespace_that_is_being_deleted_is_told_from_missing_rights(installed: ControlPlane) -> None:
    async def play() -> None:
        async with client(installed) as api:
            with installed.namespace("ending") as namespace:
                meta = {"name": "held", "namespace": namespace, "finalizers": ["example.org/held"]}
                await api.create(
                    CONFIG_MAP_KIND, namespace, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}
                )
                installed.api.delete(f"/api/v1/namespaces/{namespace}")
                with pytest.raises(NamespaceEnding):
                    await api.apply(service(namespace), force=False)
                await api.merge(CONFIG_MAP_KIND, namespace, "held", {"metadata": {"finalizers": None}})

    asyncio.run(play())


def test_lists_come_in_pages_and_only_with_our_label(installed: ControlPlane, namespace: str) -> None:
    async def play() -> None:
        async with client(installed) as api:
            for number in range(3):
                labels = {"kind": "ours"} if number else {}
                meta = {"name": f"c{number}", "namespace": namespace, "labels": labels}
                await api.create(
                    CONFIG_MAP_KIND, namespace, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}
                )
            listed = [item async for item in api.list_metadata(CONFIG_MAP_KIND, namespace, "kind=ours")]
            assert [item.name for item in listed] == ["c1", "c2"]
            assert all(item.version > 0 and item.uid and item.namespace == namespace for item in listed)
            everywhere = [item async for item in api.list_metadata(CONFIG_MAP_KIND, "", "kind=ours")]
            assert len(everywhere) >= 2

    asyncio.run(play())


def test_refused_credentials_are_read_again_once(installed: ControlPlane, namespace: str) -> None:
    tokens = ["stale", installed.token]

    def login() -> kopf.ConnectionInfo:
        token = tokens.pop(0)
        return kopf.ConnectionInfo(server=installed.server, ca_path=str(installed.ca_file), token=token)

    async def play() -> None:
        async with KubeClient(login) as api:
            assert await api.get(CONFIG_MAP_KIND, namespace, "none") is None
        tokens[:] = ["stale", "stale"]
        async with KubeClient(login) as api:
            with pytest.raises(ApiDenied):
                await api.get(CONFIG_MAP_KIND, namespace, "none")

    asyncio.run(play())


def test_no_server_and_a_slow_one_are_unavailable(installed: ControlPlane, namespace: str) -> None:
    async def play() -> None:
        nowhere = kopf.ConnectionInfo(server="https://127.0.0.1:1", ca_path=str(installed.ca_file), token="t")
        async with KubeClient(lambda: nowhere) as api:
            with pytest.raises(ApiUnavailable):
                await api.get(CONFIG_MAP_KIND, namespace, "none")
        async with KubeClient(lambda: login_of(installed), timeout_s=1e-4) as api:
            with pytest.raises(ApiUnavailable):
                await api.get(CONFIG_MAP_KIND, namespace, "none")

    asyncio.run(play())


def test_two_candidates_elect_one_leader_on_a_real_lease(installed: ControlPlane, namespace: str) -> None:
    async def play() -> None:
        async with client(installed) as api:
            place = (namespace, "lease")
            one, two = (Leadership(api, place, name, lambda _leads: None) for name in ("one", "two"))
            await asyncio.gather(one.take_part(), two.take_part())
            assert one.leading is not two.leading
            await asyncio.gather(one.take_part(), two.take_part())
            assert one.leading is not two.leading
            lease = await api.get(LEASE_KIND, *place)
            assert lease is not None
            assert lease["spec"]["holderIdentity"] == ("one" if one.leading else "two")

    asyncio.run(play())


def test_every_example_settles_and_then_rests(installed: ControlPlane) -> None:
    async def play() -> None:
        async with client(installed) as api:
            for path in sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")):
                manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
                manifest["metadata"].pop("namespace", None)
                with installed.namespace("example") as namespace:
                    key = await make(api, namespace, manifest)
                    process = Process(api, namespace)
                    await process.rest(key)
                    writes = process.api.writes
                    await process.settle(key)
                    assert process.api.writes == writes, path.name

    asyncio.run(play())
