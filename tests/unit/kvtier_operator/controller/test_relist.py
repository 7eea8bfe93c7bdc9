"""Unit tests of comparing the index with lists."""

from __future__ import annotations

import asyncio
from typing import Any

from kvtier_operator.controller.index import ClusterKey, Index, record_of
from kvtier_operator.controller.relist import Relist
from kvtier_operator.kinds import CHILD_KINDS, CLUSTER_KIND, KINDS
from kvtier_operator.labels import CLUSTER, MANAGED_BY, MANAGER
from kvtier_operator.observed import ObjectRef
from kvtier_operator.testing.memory_cluster import MemoryCluster

LLM = ClusterKey("llm", "qwen")
SERVICE = KINDS["Service"]


def service(name: str, namespace: str = "llm", **labels: str) -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "labels": {MANAGED_BY: MANAGER, CLUSTER: "qwen"} | labels}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta}


class World:
    """An API, an index, and what the comparison told."""

    def __init__(self, *namespaces: str) -> None:
        self.api, self.index = MemoryCluster(), Index()
        self.woken: list[ClusterKey] = []
        self.repaired: list[str] = []
        self.relist = Relist(self.api, self.index, namespaces, self.woken.append, self.repaired.append)

    def shown(self, body: dict[str, Any]) -> None:
        """The watch shows it."""
        self.index.put(record_of(body["kind"], body))

    def check(self) -> int:
        async def run() -> int:
            return await self.relist.repair(await self.relist.missing([CLUSTER_KIND, *CHILD_KINDS]))

        return asyncio.run(run())


def test_a_true_index_is_left_alone() -> None:
    world = World()
    world.shown(world.api.put(service("a")))
    assert world.check() == 0
    assert (world.woken, world.repaired) == ([], [])


def test_an_object_that_vanished_unseen_is_removed_and_its_cluster_woken() -> None:
    world = World()
    world.shown(world.api.put(service("a")))
    world.api.objects.clear()
    world.check()
    assert world.index.find("llm", ObjectRef("Service", "a")) is None
    assert (world.woken, world.repaired) == ([LLM], ["Service"])


def test_an_object_that_the_watch_did_not_show_is_read() -> None:
    world = World()
    world.api.put(service("a"))
    assert world.check() == 1
    assert world.index.find("llm", ObjectRef("Service", "a")) is not None
    assert (world.woken, world.repaired) == ([LLM], ["Service"])


def test_an_older_version_is_replaced_and_one_that_the_watch_brings_meanwhile_is_not_read() -> None:
    world = World()
    world.shown(world.api.put(service("a")))
    newer = world.api.put(service("a", extra="x"))
    stale = asyncio.run(world.relist.missing([SERVICE]))
    assert [listed.name for _, listed in stale] == ["a"]
    world.shown(newer)
    assert world.relist.still_missing(stale) == []
    assert asyncio.run(world.relist.repair(stale)) == 0
    assert world.repaired == []


def test_objects_without_our_label_do_not_count() -> None:
    world = World()
    world.api.put(service("theirs", **{MANAGED_BY: "helm"}))
    assert world.check() == 0


def test_only_the_served_namespaces_are_compared() -> None:
    world = World("llm")
    world.api.put(service("a", "elsewhere"))
    assert world.check() == 0
    world.api.put(service("a"))
    assert world.check() == 1
