"""One suite over every admin interface of masters: a real master, the one that answers over HTTP, the one in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest
from kvtier_operator.controller.masters import AdminAddress, DrainProgress, DrainUnsupported, MasterAdmin
from kvtier_operator.controller.masters_client import HttpMasterAdmin
from kvtier_operator.observed import DrainPhase, MasterRole
from kvtier_operator.testing.fake_masters import FakeMasters, MasterServers
from kvtier_worker.testing.mooncake import running_master, running_mooncake_client
from kvtier_worker.testing.processes import free_port

PATIENCE_S = 30.0


@dataclass
class Stage:
    """A master that leads, with two storage nodes that hold nothing.

    Attributes:
        end_drains: lets every drain succeed; a real master does so by itself.
    """

    admin: MasterAdmin
    address: AdminAddress
    end_drains: Callable[[], None]

    async def progress(self, job: str) -> DrainProgress:
        return await self.admin.drain_progress(self.address, job)

    async def start(self, segment: str) -> str:
        return await self.admin.start_drain(self.address, segment)

    async def cancel(self, job: str) -> bool:
        return await self.admin.cancel_drain(self.address, job)

    async def segments(self) -> tuple[str, ...]:
        return await self.admin.segments(self.address)

    async def is_done(self, job: str) -> bool:
        self.end_drains()
        for _ in range(int(PATIENCE_S / 0.1)):
            if (await self.progress(job)).phase is not DrainPhase.RUNNING:
                break
            await asyncio.sleep(0.1)
        return (await self.progress(job)).phase is DrainPhase.DONE


@asynccontextmanager
async def real() -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        master = stack.enter_context(running_master())
        for _ in range(2):
            stack.enter_context(running_mooncake_client(master.address))
        admin = await stack.enter_async_context(HttpMasterAdmin())
        stage = Stage(admin, AdminAddress("127.0.0.1", master.metrics_port), lambda: None)
        for _ in range(int(PATIENCE_S / 0.1)):
            if len(await stage.segments()) == 2:
                break
            await asyncio.sleep(0.1)
        yield stage


@asynccontextmanager
async def served() -> AsyncIterator[Stage]:
    address = AdminAddress("127.0.0.1", free_port())
    with MasterServers(address.port) as servers:
        servers.leader, servers.segments = address.host, ("s-0:1", "s-1:1")
        servers.start(address.host)
        async with HttpMasterAdmin() as admin:
            yield Stage(admin, address, partial(setattr, servers, "job_status", "SUCCEEDED"))


@asynccontextmanager
async def in_memory() -> AsyncIterator[Stage]:
    address = AdminAddress("127.0.0.1", 1)
    masters = FakeMasters({address}, address, mounted=("s-0:1", "s-1:1"))

    def end_drains() -> None:
        running = [job for job, progress in masters.progress.items() if progress.phase is DrainPhase.RUNNING]
        masters.progress |= dict.fromkeys(running, DrainProgress(DrainPhase.DONE))

    yield Stage(masters, address, end_drains)


Play = Callable[[Callable[[Stage], Awaitable[None]]], None]


@pytest.fixture(params=[pytest.param(real, marks=pytest.mark.mooncake), served, in_memory])
def play(request: pytest.FixtureRequest) -> Play:
    """Tells a story on a stage of its own."""

    async def told(story: Callable[[Stage], Awaitable[None]]) -> None:
        async with request.param() as stage:
            await story(stage)

    return lambda story: asyncio.run(told(story))


def test_a_leader_says_so_and_lists_its_segments(play: Play) -> None:
    async def story(stage: Stage) -> None:
        health = await stage.admin.health(stage.address)
        assert (health.role, health.serving) == (MasterRole.LEADER, True)
        assert len(set(await stage.segments())) == 2

    play(story)


def test_a_drain_that_has_moved_everything_cannot_be_ended_nor_made_again(play: Play) -> None:
    async def story(stage: Stage) -> None:
        segment = (await stage.segments())[0]
        job = await stage.start(segment)
        assert await stage.is_done(job)
        assert not await stage.cancel(job)
        assert (await stage.progress(job)).phase is DrainPhase.DONE
        again = await stage.start(segment)
        assert (await stage.progress(again)).phase is DrainPhase.DONE
        assert not await stage.cancel(again)

    play(story)


def test_a_drain_whose_job_was_forgotten_is_followed_by_its_segment(play: Play) -> None:
    async def story(stage: Stage) -> None:
        segment = (await stage.segments())[0]
        forgotten = await stage.start(segment)
        found = await stage.start(segment)
        assert found != forgotten
        assert await stage.is_done(found)

    play(story)


def test_a_cancelled_drain_has_failed_and_can_be_made_again(play: Play) -> None:
    async def story(stage: Stage) -> None:
        for segment in await stage.segments():
            job = await stage.start(segment)
            if await stage.cancel(job):  # else a real master was quicker
                assert (await stage.progress(job)).phase is DrainPhase.FAILED
                assert await stage.cancel(job)
                again = await stage.start(segment)
                assert again not in {job, f"segment:{segment}"}
                assert await stage.is_done(again)
                return
        pytest.fail("no drain could be cancelled")

    play(story)


def test_what_the_master_does_not_know_has_failed_or_cannot_be_drained(play: Play) -> None:
    async def story(stage: Stage) -> None:
        for job in ("1-2", "segment:nowhere:1"):
            assert (await stage.progress(job)).phase is DrainPhase.FAILED
            assert await stage.cancel(job)
        with pytest.raises(DrainUnsupported):
            await stage.start("nowhere:1")

    play(story)
