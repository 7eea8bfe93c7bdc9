"""Unit tests of asking masters: what a round makes of the answers, when it is made, whom it wakes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web
from kvtier_operator.controller.index import ClusterKey
from kvtier_operator.controller.masters import AdminAddress, DrainProgress, Health, MasterSilent, MastersView, Targets
from kvtier_operator.controller.masters_client import HttpMasterAdmin
from kvtier_operator.controller.masters_poll import MasterPoller
from kvtier_operator.observed import DrainPhase, MasterRole
from kvtier_operator.testing.fake_masters import FakeMasters, MasterServers
from kvtier_worker.testing.processes import free_port

KEY = ClusterKey("llm", "qwen")
ONE, TWO, THREE = (AdminAddress(f"10.0.0.{n}", 9003) for n in (1, 2, 3))
MASTERS = {"m-0": ONE, "m-1": TWO, "m-2": THREE}


def asked(fake: FakeMasters, targets: Targets | None = None) -> MastersView:
    return asyncio.run(MasterPoller(fake, lambda _key: None).ask(targets or Targets(MASTERS)))


def test_a_round_tells_leader_standbys_and_who_is_silent() -> None:
    view = asked(FakeMasters(up={ONE, TWO}, leader=TWO))
    assert set(view.masters) == {"m-0", "m-1"}
    assert (view.masters["m-1"].role, view.masters["m-1"].serving) == (MasterRole.LEADER, True)
    assert (view.masters["m-0"].role, view.masters["m-0"].caught_up) == (MasterRole.STANDBY, True)
    assert view.leader == TWO


@pytest.mark.parametrize(("lag", "caught_up"), [(0, True), (100, True), (101, False), (None, False)])
def test_a_standby_has_caught_up_when_its_lag_is_small_and_known(lag: int | None, caught_up: bool) -> None:
    view = asked(FakeMasters(up={ONE, TWO}, leader=TWO, lag=lag))
    assert view.masters["m-0"].caught_up is caught_up


def test_a_leader_that_warms_up_is_not_asked_for_segments() -> None:
    fake = FakeMasters(up={ONE}, leader=ONE, serving=False, mounted=("x:1",))
    assert asked(fake).leader is None
    assert "segments" not in fake.calls


def test_segments_belong_to_pods_by_host_name_or_address() -> None:
    fake = FakeMasters(up={ONE}, leader=ONE, mounted=("s-0.s.llm.svc:20000", "10.1.1.1:20000", "stranger:1"))
    stores = {"s-0": "s-0", "s-1": "s-1", "10.1.1.1": "s-1"}
    view = asked(fake, Targets(MASTERS, stores))
    assert view.segments == {"s-0": "s-0.s.llm.svc:20000", "s-1": "10.1.1.1:20000"}


def test_drain_jobs_are_asked_of_the_leader() -> None:
    done = DrainProgress(DrainPhase.DONE, "moved 3")
    fake = FakeMasters(up={ONE}, leader=ONE, progress={"a": done})
    view = asked(fake, Targets(MASTERS, {}, frozenset({"a", "lost"})))
    assert view.drains == {"a": done, "lost": DrainProgress(DrainPhase.FAILED, "unknown job")}


def test_of_two_that_claim_to_lead_the_later_election_counts() -> None:
    class Split(FakeMasters):
        async def health(self, address: AdminAddress) -> Health:
            return Health(MasterRole.LEADER, serving=True, view_version=7 if address == TWO else 6)

    assert asked(Split(up={ONE, TWO, THREE})).leader == TWO


def test_only_changed_answers_wake_the_cluster() -> None:
    woken: list[ClusterKey] = []
    fake = FakeMasters(up={ONE, TWO, THREE}, leader=ONE)
    poller = MasterPoller(fake, woken.append)

    async def play() -> None:
        poller.watch(KEY, Targets(MASTERS))
        running = asyncio.create_task(poller.run())
        for _ in range(20):
            await asyncio.sleep(0)
        assert woken == [KEY]
        poller.watch(KEY, Targets(dict(MASTERS)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert woken == [KEY]
        assert poller.view(KEY).leader == ONE
        poller.watch(KEY, Targets())
        assert poller.view(KEY) == MastersView()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    asyncio.run(play())


def test_an_unexpected_end_of_a_round_forgets_what_was_true_once() -> None:
    woken: list[ClusterKey] = []
    now = [0.0]

    class Odd(FakeMasters):
        odd = False

        async def health(self, address: AdminAddress) -> Health:
            if self.odd:
                raise ZeroDivisionError
            return await FakeMasters.health(self, address)

    fake = Odd(up={ONE}, leader=ONE)
    poller = MasterPoller(fake, woken.append, lambda: now[0])

    async def a_round() -> None:
        running = asyncio.create_task(poller.run())
        for _ in range(20):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def play() -> None:
        poller.watch(KEY, Targets({"m-0": ONE}))
        await a_round()
        assert poller.view(KEY).leader == ONE
        fake.odd, now[0] = True, 60.0
        await a_round()
        assert poller.view(KEY) == MastersView()
        assert woken == [KEY, KEY]

    asyncio.run(play())


class Odd(MasterServers):
    """Answers whatever a test wants."""

    reply: tuple[int, str] = (200, "")

    def answer(self, _method: str, _host: str, _path: str, _body: Mapping[str, Any]) -> tuple[int, str]:
        return self.reply


ODD = {
    "text": "hello",
    "a list": "[]",
    "deep": "[" * 100_000,
    "a word as version": '{"role": "leader", "service_ready": true, "view_version": "x"}',
    "a version too large": f'{{"role": "leader", "service_ready": true, "view_version": {2**64}}}',
    "a negative version": '{"role": "leader", "service_ready": true, "view_version": -1}',
    "a fraction": '{"role": "leader", "service_ready": true, "view_version": 1.5}',
    "half a character": '{"role": "leader", "service_ready": true, "leader_address": "\\ud800"}',
    "endless": f'{{"role": "{"x" * (5 << 20)}"}}',
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_a_master_that_talks_nonsense_is_silent(text: str) -> None:
    port = free_port()

    async def play() -> None:
        async with HttpMasterAdmin() as admin:
            with pytest.raises(MasterSilent):
                await admin.health(AdminAddress("127.0.0.1", port))

    with Odd(port) as masters:
        masters.reply = (200, text)
        masters.start("127.0.0.1")
        asyncio.run(play())


def test_what_is_written_down_of_a_master_s_words_is_short() -> None:
    port = free_port()
    address = AdminAddress("127.0.0.1", port)

    async def play() -> None:
        async with HttpMasterAdmin() as admin:
            masters.reply = (200, f'{{"role": "leader", "leader_address": "{"x" * 9000}"}}')
            assert len((await admin.health(address)).leader) < 1000
            masters.reply = (200, f'{{"status_name": "RUNNING", "message": "{"x" * 9000}"}}')
            assert len((await admin.drain_progress(address, "1&x=/../#")).detail) < 1000
            masters.reply = (200, f'{{"job_id": "{"x" * 9000}"}}')
            with pytest.raises(MasterSilent):
                await admin.start_drain(address, "s:1")

    with Odd(port) as masters:
        masters.start("127.0.0.1")
        asyncio.run(play())


def test_a_standby_s_odd_metrics_mean_that_its_lag_is_not_known() -> None:
    port = free_port()

    class Metrics(MasterServers):
        def answer(self, method: str, host: str, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
            return (
                (200, "ha_oplog_standby_lag inf\n") if path == "/metrics" else super().answer(method, host, path, body)
            )

    async def play() -> None:
        async with HttpMasterAdmin() as admin:
            health = await admin.health(AdminAddress("127.0.0.1", port))
            assert (health.role, health.lag) == (MasterRole.STANDBY, None)

    with Metrics(port) as masters:
        masters.start("127.0.0.1")
        asyncio.run(play())


def test_nobody_else_speaks_for_a_master() -> None:
    """Neither where it points to, nor a proxy."""
    asked: list[str] = []

    async def refer(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPFound("/elsewhere")

    async def play() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", refer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            port = free_port()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            async with HttpMasterAdmin() as admin:
                with pytest.raises(MasterSilent):
                    await admin.health(AdminAddress("127.0.0.1", port))
        finally:
            await runner.cleanup()

    asyncio.run(play())
    assert asked == ["/health"]


def test_the_http_client_understands_what_masters_say() -> None:
    port = free_port()

    async def play() -> None:
        async with HttpMasterAdmin() as admin:
            leader, standby = AdminAddress("127.0.0.1", port), AdminAddress("127.0.0.2", port)
            assert (await admin.health(leader)).serving
            other = await admin.health(standby)
            assert (other.role, other.serving, other.lag, other.leader) == (MasterRole.STANDBY, False, 0, "127.0.0.1")
            assert await admin.segments(leader) == ("s-0:1", "s-1:1")
            with pytest.raises(MasterSilent):
                await admin.segments(standby)
            job = await admin.start_drain(leader, "s-0:1")
            assert (await admin.drain_progress(leader, job)).phase is DrainPhase.RUNNING
            masters.job_status = "SUCCEEDED"
            assert (await admin.drain_progress(leader, job)).phase is DrainPhase.DONE
            assert (await admin.drain_progress(leader, "unknown")).phase is DrainPhase.FAILED
            await admin.cancel_drain(leader, "unknown")
            masters.stop("127.0.0.1")
            with pytest.raises(MasterSilent):
                await admin.health(leader)

    with MasterServers(port) as masters:
        masters.leader, masters.segments = "127.0.0.1", ("s-0:1", "s-1:1")
        masters.start("127.0.0.1")
        masters.start("127.0.0.2")
        asyncio.run(play())
