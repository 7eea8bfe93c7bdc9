"""What every `Cluster` does, the real API server and the one in memory. One suite, two worlds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import kopf
import pytest
from kvtier_operator.cluster import Cluster, Listed
from kvtier_operator.controller.kube_client import KubeClient
from kvtier_operator.errors import ApiConflict, ApiNotFound
from kvtier_operator.kinds import CHILD_KINDS, CONFIG_MAP_KIND, KINDS
from kvtier_operator.observed import Manifest
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.memory_cluster import MemoryCluster

Story = Callable[[Cluster, str], Awaitable[None]]
Run = Callable[[Story], None]
Attempt = Callable[[], Awaitable[object]]


@asynccontextmanager
async def kubernetes(control_plane: ControlPlane) -> AsyncIterator[Cluster]:
    info = kopf.ConnectionInfo(
        server=control_plane.server, ca_path=str(control_plane.ca_file), token=control_plane.token
    )
    async with KubeClient(lambda: info) as client:
        yield client


@pytest.fixture(params=["memory", "kubernetes"])
def run(request: pytest.FixtureRequest) -> Run:
    """Lets a story happen in one world, in a namespace of its own."""
    if request.param == "memory":
        return lambda story: asyncio.run(_told(story, MemoryCluster()))
    control_plane, namespace = request.getfixturevalue("control_plane"), request.getfixturevalue("namespace")

    async def told(story: Story) -> None:
        async with kubernetes(control_plane) as cluster:
            await story(cluster, namespace)

    return lambda story: asyncio.run(told(story))


async def _told(story: Story, cluster: Cluster) -> None:
    await story(cluster, "somewhere")


def config(namespace: str, name: str = "one", text: str = "a", **metadata: object) -> Manifest:
    labels = {"kvtier.dev/test": name}
    meta = {"name": name, "namespace": namespace, "labels": labels, **metadata}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"text": text}}


async def listed(cluster: Cluster, namespace: str, selector: str) -> list[Listed]:
    return [item async for item in cluster.list_metadata(CONFIG_MAP_KIND, namespace, selector)]


def test_what_is_applied_can_be_read_and_found_by_its_labels(run: Run) -> None:
    async def story(cluster: Cluster, namespace: str) -> None:
        made = await cluster.apply(config(namespace), force=False)
        found = await cluster.get(CONFIG_MAP_KIND, namespace, "one")
        assert found is not None
        assert found["data"] == {"text": "a"}
        assert found["metadata"]["uid"] == made["metadata"]["uid"]
        (item,) = await listed(cluster, namespace, "kvtier.dev/test=one")
        assert (item.name, item.uid, item.version) == (
            "one",
            made["metadata"]["uid"],
            int(made["metadata"]["resourceVersion"]),
        )
        assert await listed(cluster, namespace, "kvtier.dev/test=two") == []

    run(story)


def test_absence_is_none_for_a_read_and_an_error_for_a_change(run: Run) -> None:
    async def story(cluster: Cluster, namespace: str) -> None:
        assert await cluster.get(CONFIG_MAP_KIND, namespace, "none") is None
        with pytest.raises(ApiNotFound):
            await cluster.merge(CONFIG_MAP_KIND, namespace, "none", {"data": {"text": "b"}})
        with pytest.raises(ApiNotFound):
            await cluster.delete(CONFIG_MAP_KIND, namespace, "none", "uid")

    run(story)


def test_every_change_gives_a_newer_version(run: Run) -> None:
    async def story(cluster: Cluster, namespace: str) -> None:
        versions = [int((await cluster.apply(config(namespace), force=False))["metadata"]["resourceVersion"])]
        for text in ("b", "c"):
            answer = await cluster.apply(config(namespace, text=text), force=True)
            assert answer["data"] == {"text": text}
            versions.append(int(answer["metadata"]["resourceVersion"]))
        assert versions == sorted(set(versions))

    run(story)


def test_an_object_that_must_be_new_is_never_changed(run: Run) -> None:
    async def story(cluster: Cluster, namespace: str) -> None:
        await cluster.create(CONFIG_MAP_KIND, namespace, config(namespace))
        attempts: list[Attempt] = [
            lambda: cluster.create(CONFIG_MAP_KIND, namespace, config(namespace, text="b")),
            lambda: cluster.apply(config(namespace, text="b"), force=False),
        ]
        for attempt in attempts:
            with pytest.raises(ApiConflict):
                await attempt()
        found = await cluster.get(CONFIG_MAP_KIND, namespace, "one")
        assert found is not None
        assert found["data"] == {"text": "a"}

    run(story)


def test_a_uid_is_a_precondition_of_every_change(run: Run) -> None:
    async def story(cluster: Cluster, namespace: str) -> None:
        uid = (await cluster.apply(config(namespace), force=False))["metadata"]["uid"]
        other = "00000000-0000-4000-8000-000000000000"
        attempts: list[Attempt] = [
            lambda: cluster.apply(config(namespace, text="b", uid=other), force=True),
            lambda: cluster.merge(
                CONFIG_MAP_KIND, namespace, "one", {"metadata": {"uid": other}, "data": {"text": "b"}}
            ),
            lambda: cluster.delete(CONFIG_MAP_KIND, namespace, "one", other),
        ]
        for attempt in attempts:
            with pytest.raises(ApiConflict):
                await attempt()
        await cluster.merge(CONFIG_MAP_KIND, namespace, "one", {"metadata": {"uid": uid}, "data": {"more": "m"}})
        found = await cluster.get(CONFIG_MAP_KIND, namespace, "one")
        assert found is not None
        assert found["data"] == {"text": "a", "more": "m"}
        assert await cluster.delete(CONFIG_MAP_KIND, namespace, "one", uid) is None
        assert await cluster.get(CONFIG_MAP_KIND, namespace, "one") is None

    run(story)


def test_a_merge_with_null_removes_a_field(run: Run) -> None:
    async def story(cluster: Cluster, namespace: str) -> None:
        await cluster.apply(config(namespace), force=False)
        answer = await cluster.merge(CONFIG_MAP_KIND, namespace, "one", {"data": {"text": None, "new": "n"}})
        assert answer["data"] == {"new": "n"}

    run(story)


def test_of_two_that_replace_one_version_the_second_loses(run: Run) -> None:
    async def story(cluster: Cluster, namespace: str) -> None:
        read = await cluster.create(CONFIG_MAP_KIND, namespace, config(namespace))
        won = await cluster.replace(CONFIG_MAP_KIND, namespace, "one", {**read, "data": {"text": "first"}})
        assert won["data"] == {"text": "first"}
        with pytest.raises(ApiConflict):
            await cluster.replace(CONFIG_MAP_KIND, namespace, "one", {**read, "data": {"text": "second"}})
        found = await cluster.get(CONFIG_MAP_KIND, namespace, "one")
        assert found is not None
        assert found["data"] == {"text": "first"}

    run(story)


def test_a_name_made_anew_has_another_uid(run: Run) -> None:
    async def story(cluster: Cluster, namespace: str) -> None:
        first = await cluster.create(CONFIG_MAP_KIND, namespace, config(namespace))
        await cluster.delete(CONFIG_MAP_KIND, namespace, "one", first["metadata"]["uid"])
        second = await cluster.create(CONFIG_MAP_KIND, namespace, config(namespace))
        assert second["metadata"]["uid"] != first["metadata"]["uid"]

    run(story)


def test_a_generated_name_is_completed(run: Run) -> None:
    async def story(cluster: Cluster, namespace: str) -> None:
        manifest = config(namespace)
        del manifest["metadata"]["name"]
        manifest["metadata"]["generateName"] = "some-"
        names = {(await cluster.create(CONFIG_MAP_KIND, namespace, manifest))["metadata"]["name"] for _ in range(2)}
        assert len(names) == 2
        assert all(name.startswith("some-") and len(name) > len("some-") for name in names)

    run(story)


def test_ordinary_kinds_are_served_and_those_of_prometheus_are_not(run: Run) -> None:
    async def story(cluster: Cluster, _namespace: str) -> None:
        for kind in CHILD_KINDS:
            assert await cluster.serves(kind), kind
        assert not await cluster.serves(KINDS["ServiceMonitor"])

    run(story)
