"""Unit tests of what keeps the index true, with watches that a test holds in its hands and without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

import pytest
from kvtier_operator.cluster import Listed
from kvtier_operator.controller.index import ClusterKey, Index, record_of
from kvtier_operator.controller.informer import Deliver, Seen
from kvtier_operator.controller.kube_client import Request
from kvtier_operator.controller.metrics import OperatorMetrics
from kvtier_operator.controller.run import is_disturbing
from kvtier_operator.controller.watching import NO_DEFINITION, Watching
from kvtier_operator.errors import ApiNotFound, ApiUnavailable
from kvtier_operator.kinds import CLUSTER_KIND, Kind
from kvtier_operator.labels import CLUSTER, MANAGED_BY, MANAGER
from kvtier_operator.observed import ObjectRef
from kvtier_operator.testing.memory_cluster import MemoryCluster

LLM = ClusterKey("llm", "qwen")


def service(name: str) -> dict[str, Any]:
    meta = {"name": name, "namespace": "llm", "labels": {MANAGED_BY: MANAGER, CLUSTER: "qwen"}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta}


class HeldWatches:
    """Shows what the test says."""

    def __init__(
        self, kinds: Sequence[Kind], namespaces: Collection[str], deliver: Deliver, restarted: Callable[[], None]
    ) -> None:
        self.kinds, self.namespaces, self.restarted = [kind.name for kind in kinds], namespaces, restarted
        self.deliver, self.running = deliver, False

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def silence_s(self) -> float:
        return 7.0


class Undefined(MemoryCluster):
    """Has no KVCacheClusters until told so."""

    defined = False

    async def serves(self, kind: Kind) -> bool:
        return await super().serves(kind) and (self.defined or kind != CLUSTER_KIND)


class World:
    """A `Watching` whose pauses are steps that a test takes."""

    def __init__(self, api: MemoryCluster | None = None) -> None:
        self.api = api or MemoryCluster()
        self.index = Index()
        self.woken: list[ClusterKey] = []
        self.optional: list[frozenset[str]] = []
        self.made: list[HeldWatches] = []
        self.metrics = OperatorMetrics()
        self.pauses: list[float] = []
        self._gate = asyncio.Semaphore(0)

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self._gate.acquire()

    def informer(self, *arguments: Any) -> HeldWatches:
        self.made.append(HeldWatches(*arguments))
        return self.made[-1]

    async def step(self, times: int = 1) -> None:
        """End the pauses that there are."""
        for _ in range(times):
            self._gate.release()
            await self.turns()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let a thread do its part; `play` ends a wait in vain."""
        while not condition():  # noqa: ASYNC110 - a thread has no asyncio.Event to set
            await asyncio.sleep(0.001)

    async def turns(self) -> None:
        """Let every task do what it can."""
        for _ in range(100):
            await asyncio.sleep(0)

    def play(self, test: Callable[[World, Watching], Any]) -> None:
        async def run() -> None:
            watching = Watching(
                self.api,
                self.index,
                (),
                self.woken.append,
                self.optional.append,
                self.metrics,
                self.informer,
                self.pause,
            )
            task = asyncio.create_task(watching.run())
            for _ in range(30):
                await asyncio.sleep(0)
            await test(self, watching)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not any(watches.running for watches in self.made)

        asyncio.run(asyncio.wait_for(run(), 10))


def test_it_waits_for_the_definition_and_says_so() -> None:
    api = Undefined()

    async def test(world: World, watching: Watching) -> None:
        assert watching.waits_for == NO_DEFINITION
        assert not world.made
        api.defined = True
        await world.step()
        assert world.made[0].running
        assert watching.warm.is_set()
        assert watching.waits_for == ""
        assert watching.silence_s() == 7.0

    World(api).play(test)


def test_it_is_warm_when_the_watches_have_shown_what_the_lists_have() -> None:
    world = World()
    body = world.api.put(service("a"))

    async def test(world: World, watching: Watching) -> None:
        assert not watching.warm.is_set()
        assert watching.waits_for == "the first lists"
        world.made[0].deliver(record_of("Service", body), Seen.CHANGED)
        await world.step(2)
        assert watching.warm.is_set()
        assert (
            world.metrics.registry.get_sample_value("kvtier_operator_index_repairs_total", {"kind": "Service"}) is None
        )

    world.play(test)


def test_an_object_that_goes_while_the_first_lists_come_in_is_not_waited_for() -> None:
    world = World()
    world.api.put(service("a"))

    async def test(world: World, watching: Watching) -> None:
        world.api.objects.clear()
        await world.step(9)
        assert not watching.warm.is_set()
        await world.step()
        assert watching.warm.is_set()

    world.play(test)


def test_watches_that_missed_an_object_are_started_anew() -> None:
    async def test(world: World, watching: Watching) -> None:
        world.api.put(service("a"))
        await world.step()  # the five minutes
        assert world.index.find("llm", ObjectRef("Service", "a")) is None
        await world.step()  # the grace that a watch has
        assert world.index.find("llm", ObjectRef("Service", "a")) is not None
        assert world.woken == [LLM]
        await world.until(lambda: [watches.running for watches in world.made] == [False, True])
        assert watching.warm.is_set()

    World().play(test)


def test_a_watch_that_is_only_late_is_left_alone() -> None:
    async def test(world: World, _watching: Watching) -> None:
        body = world.api.put(service("a"))
        await world.step()
        world.made[0].deliver(record_of("Service", body), Seen.CHANGED)
        await world.step()
        await asyncio.sleep(0.05)
        assert len(world.made) == 1

    World().play(test)


def test_what_the_watches_show_gone_is_removed() -> None:
    world = World()
    body = world.api.put(service("a"))

    async def test(world: World, _watching: Watching) -> None:
        record = record_of("Service", body)
        world.made[0].deliver(record, Seen.LISTED)
        await world.step(2)
        world.made[0].deliver(record, Seen.GONE)
        await world.step(0)
        await asyncio.sleep(0)
        assert world.index.find("llm", ObjectRef("Service", "a")) is None

    world.play(test)


def test_kinds_that_appear_later_are_watched_and_made_known() -> None:
    async def test(world: World, _watching: Watching) -> None:
        assert world.optional == [frozenset()]
        world.api.optional = {"ServiceMonitor"}
        await world.step()
        await world.until(lambda: world.optional[-1] == {"ServiceMonitor"})
        await world.until(lambda: world.made[-1].running)
        assert "ServiceMonitor" in world.made[-1].kinds

    World().play(test)


class Strict(MemoryCluster):
    """Has no list of a kind that it does not have."""

    defined = True

    async def serves(self, kind: Kind) -> bool:
        return await super().serves(kind) and (self.defined or kind != CLUSTER_KIND)

    async def list_metadata(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[Listed]:
        if not await self.serves(kind):
            raise ApiNotFound("list", 404, "the server could not find the requested resource")
        async for listed in super().list_metadata(kind, namespace, selector):
            yield listed


def test_kinds_that_go_are_watched_no_more_and_the_others_still_are() -> None:
    api = Strict(optional={"ServiceMonitor"})

    async def test(world: World, _watching: Watching) -> None:
        assert "ServiceMonitor" in world.made[-1].kinds
        api.optional = set()
        api.put(service("unseen"))
        await world.step()
        await asyncio.sleep(0.05)
        assert world.optional[-1] == frozenset()
        assert "ServiceMonitor" not in world.made[-1].kinds
        await world.step()
        assert world.index.find("llm", ObjectRef("Service", "unseen")) is not None

    World(api).play(test)


def test_a_definition_that_goes_is_waited_for_and_the_watches_begin_anew() -> None:
    api = Strict()

    async def test(world: World, watching: Watching) -> None:
        assert watching.warm.is_set()
        api.defined = False
        await world.step()
        assert watching.waits_for == NO_DEFINITION
        api.defined = True
        await world.step()
        await asyncio.sleep(0.05)
        assert watching.waits_for == ""
        assert [watches.running for watches in world.made] == [False, True]

    World(api).play(test)


@pytest.mark.parametrize(
    ("request_", "disturbs"),
    [
        (Request("patch", "services", 0), True),
        (Request("get", "services", 503), True),
        (Request("patch", "servicemonitors", 404), True),
        (Request("patch", "pods", 404), False),
        (Request("get", "servicemonitors", 404), False),
        (Request("patch", "services", 409), False),
    ],
)
def test_what_makes_the_index_doubtful(request_: Request, disturbs: bool) -> None:
    assert is_disturbing(request_) is disturbs


def test_after_a_gap_of_a_watch_what_vanished_meanwhile_is_found_soon() -> None:
    """The lists that follow a gap show what is there, and never what is not there any more."""
    world = World()
    gone, stays = world.api.put(service("gone")), world.api.put(service("stays"))

    async def test(world: World, watching: Watching) -> None:
        for body in (gone, stays):
            world.made[0].deliver(record_of("Service", body), Seen.LISTED)
        await world.step(2)
        assert watching.warm.is_set()
        del world.api.objects["Service", "llm", "gone"]
        world.pauses.clear()
        world.made[0].deliver(record_of("Service", stays), Seen.LISTED)
        await world.step(0)
        await world.until(lambda: min(world.pauses, default=60) <= 1)
        await world.step(2)
        assert world.index.find("llm", ObjectRef("Service", "gone")) is None
        assert world.index.find("llm", ObjectRef("Service", "stays")) is not None

    world.play(test)


def test_after_an_outage_of_the_server_the_index_is_compared_until_that_works() -> None:
    class Flaky(MemoryCluster):
        broken = True

        def list_metadata(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[Listed]:
            if self.broken and self.objects:
                raise ApiUnavailable("list", 0, "no answer")
            return super().list_metadata(kind, namespace, selector)

    api = Flaky()

    async def test(world: World, watching: Watching) -> None:
        assert watching.warm.is_set()
        body = api.put(service("a"))
        world.made[0].deliver(record_of("Service", body), Seen.CHANGED)
        watching.disturbed()
        await world.step(4)
        assert world.index.find("llm", ObjectRef("Service", "a")) is not None
        api.objects.clear()
        await world.step(4)
        assert world.index.find("llm", ObjectRef("Service", "a")) is None

    World(api).play(test)


def test_a_server_in_lasting_trouble_is_asked_for_lists_ever_more_rarely() -> None:
    async def test(world: World, watching: Watching) -> None:
        world.pauses.clear()
        for _ in range(8):
            watching.disturbed()
            await world.turns()
            await world.step()
        soon = [seconds for seconds in world.pauses if seconds <= 60]
        assert soon[:4] == [1, 2, 4, 8]
        assert max(soon) == 60

    World().play(test)
