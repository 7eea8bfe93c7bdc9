"""Real Mooncake processes that die, freeze, fill up and come back. Nothing here may crash, hang or lie."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from kvtier_worker.adapters.mooncake_store import MooncakeStore
from kvtier_worker.engine.ports import StoreBuffer
from kvtier_worker.errors import StoreUnavailable
from kvtier_worker.testing.mooncake import running_master, running_mooncake_client
from kvtier_worker.testing.processes import free_port
from kvtier_worker.testing.store_worlds import Arena, content_of, gets, mooncake_options, puts, read, unique, write

pytestmark = [pytest.mark.mooncake, pytest.mark.slow, pytest.mark.timeout(90)]

PLACEMENTS = pytest.mark.parametrize("shared_memory", [False, True], ids=["tcp", "shm"])


def timed(function: Callable[[], list[str]]) -> tuple[list[str], float]:
    started = time.monotonic()
    return function(), time.monotonic() - started


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    assert happens(condition, timeout_s), "it did not happen in time"


def happens(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@PLACEMENTS
def test_a_killed_master_costs_one_slow_call_and_comes_back(*, shared_memory: bool) -> None:
    with running_master() as master, running_mooncake_client(master.address) as client:
        store = MooncakeStore.connect(
            mooncake_options(master.address, shm_client=client.rpc_address if shared_memory else "")
        )
        arena = Arena(store)
        key = unique("before")
        source, target = arena.buffer(key, b"m" * 1000), arena.buffer(key, nbytes=1000)
        assert puts(store, [source]) == ["stored"]
        assert gets(store, [target]) == ["hit"]

        master.kill()
        seen: list[str] = []
        started = time.monotonic()
        while store.state != "open":
            seen += gets(store, [target])
            assert time.monotonic() - started < 12, seen
        assert set(seen) <= {"fault", "miss"}
        outcomes, seconds = timed(lambda: [outcome for _ in range(200) for outcome in gets(store, [target])])
        assert set(outcomes) == {"miss"}
        assert seconds < 1.0
        assert list(store.exists([key])) == [False]
        assert puts(store, [source]) == ["failed"]

        master.start()
        master.wait_serving()
        again = arena.buffer(unique("after"), b"n" * 500)
        wait_for(lambda: puts(store, [again]) == ["stored"])
        assert store.state == "closed"
        assert gets(store, [again]) == ["hit"]
        assert gets(store, [target]) == ["miss"]  # the new master knows nothing of it
        store.close()


@PLACEMENTS
def test_a_killed_storage_client_loses_objects_and_nothing_else(*, shared_memory: bool) -> None:
    with running_master() as master, running_mooncake_client(master.address) as client:
        store = MooncakeStore.connect(
            mooncake_options(master.address, shm_client=client.rpc_address if shared_memory else "")
        )
        arena = Arena(store)
        key = unique("lost")
        source, target = arena.buffer(key, b"l" * 5000), arena.buffer(key, nbytes=5000)
        puts(store, [source])

        client.kill()
        assert gets(store, [target])[0] in {"fault", "miss"}
        outcomes, seconds = timed(lambda: [outcome for _ in range(50) for outcome in gets(store, [target])])
        assert "hit" not in outcomes
        assert seconds < 4.0
        assert list(store.exists([key])) == [False]

        again = arena.buffer(unique("again"), b"a" * 700)
        copy = arena.buffer(again.key, nbytes=700)

        def works() -> bool:
            return puts(store, [again])[0] in {"stored", "exists"} and gets(store, [copy]) == ["hit"]

        # It is pinged once a second, on a busy machine later. A client that is back before its absence was noticed is
        # taken for the old one, which knows our memory.
        for absence_s in (6.0, 20.0):
            client.kill()
            time.sleep(absence_s)
            client.start()
            client.wait_serving()
            if happens(works, 15.0):
                break
        assert read(copy) == b"a" * 700
        store.close()


def test_an_object_that_the_master_lists_but_nobody_holds_is_absent_at_once() -> None:
    with running_master(client_ttl_s=30) as master, running_mooncake_client(master.address) as client:
        store = MooncakeStore.connect(mooncake_options(master.address))
        arena = Arena(store)
        key = unique("ghost")
        target = arena.buffer(key, b"g" * 2000)
        puts(store, [target])
        client.kill()

        assert list(store.exists([key])) == [True]
        assert gets(store, [target]) == ["fault"]
        assert list(store.exists([key])) == [False]
        outcomes, seconds = timed(lambda: gets(store, [target]))
        assert outcomes == ["miss"]
        assert seconds < 1.0
        assert store.error_counts["known_unreadable"] >= 2
        store.close()


@PLACEMENTS
def test_an_object_that_nobody_holds_any_more_is_replaced_on_another_node(*, shared_memory: bool) -> None:
    with (
        running_master(client_ttl_s=60) as master,
        running_mooncake_client(master.address) as lost,
    ):
        writer = MooncakeStore.connect(mooncake_options(master.address))
        key = unique("ghost")
        puts(writer, [Arena(writer).buffer(key, b"g" * 2000)])
        with running_mooncake_client(master.address) as other:
            shm_client = other.rpc_address if shared_memory else ""
            store = MooncakeStore.connect(mooncake_options(master.address, shm_client=shm_client))
            arena = Arena(store)
            target = arena.buffer(key, nbytes=2000)
            lost.kill()
            assert gets(store, [target]) == ["fault"]
            fresh = arena.buffer(key, b"f" * 2000)
            assert puts(store, [fresh]) == ["exists"], "the master lists it for a minute"
            store.discard([key])
            # The lost node's segment is listed too; a put that lands there fails, one that does not heals the key.
            wait_for(lambda: puts(store, [fresh])[0] in {"stored", "exists"})
            wait_for(lambda: gets(store, [target]) == ["hit"])
            assert read(target) == b"f" * 2000
            store.close()
        writer.close()


def test_a_frozen_storage_client_is_given_up_and_never_writes_late() -> None:
    with running_master(client_ttl_s=30) as master, running_mooncake_client(master.address) as client:
        store = MooncakeStore.connect(mooncake_options(master.address, call_timeout_s=2.0))
        arena = Arena(store, 16 << 20)
        key = unique("frozen")
        content = content_of(key, 4 << 20)
        puts(store, [arena.buffer(key, content)])
        target = arena.buffer(key, nbytes=4 << 20)

        client.signal(signal.SIGSTOP)
        outcomes, seconds = timed(lambda: gets(store, [target]))
        assert outcomes == ["fault"]
        assert seconds < 8.0
        marker = b"\x5a" * target.nbytes
        write(target, marker)  # as if the slot had been given to somebody else
        client.signal(signal.SIGCONT)
        time.sleep(1.0)
        assert read(target) == marker
        store.close()


def test_a_full_store_refuses_politely_and_stays_readable() -> None:
    with running_master() as master, running_mooncake_client(master.address, segment="32MB") as client:
        assert client.running
        store = MooncakeStore.connect(mooncake_options(master.address))
        arena = Arena(store, 4 << 20)
        place = arena.buffer("place", b"f" * (2 << 20))
        keys = [unique("full") for _ in range(20)]
        outcomes = []
        for key in keys:
            outcomes += puts(store, [StoreBuffer(key, place.address, place.nbytes)])
            store.exists([key])  # a probe takes a lease, so nothing can be evicted
        stored = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == "stored"]

        assert 5 < len(stored) < 20
        assert store.error_counts["no_space"] >= 1
        assert store.state == "closed"
        assert gets(store, [StoreBuffer(stored[0], place.address, place.nbytes)]) == ["hit"]
        store.close()


def test_an_object_larger_than_the_store_fails_alone() -> None:
    with running_master() as master, running_mooncake_client(master.address, segment="32MB"):
        store = MooncakeStore.connect(mooncake_options(master.address))
        arena = Arena(store, 50 << 20)
        big = StoreBuffer(unique("big"), arena.address, 40 << 20)
        small = StoreBuffer(unique("small"), arena.address, 1 << 20)

        assert sorted(puts(store, [big, small])) == ["failed", "stored"]
        store.close()


def test_memory_of_its_own_cannot_be_used_through_shared_memory() -> None:
    with running_master() as master, running_mooncake_client(master.address) as client:
        own = MooncakeStore.connect(mooncake_options(master.address))
        address = own.allocate(1 << 20)
        shared = MooncakeStore.connect(mooncake_options(master.address, shm_client=client.rpc_address))

        with pytest.raises(StoreUnavailable, match=r"only memory from allocate\(\)"):
            shared.register(address, 1 << 20)
        shared.close()
        own.close()


def test_a_mooncake_client_that_restarts_at_once_is_noticed_and_not_asked_any_more() -> None:
    with running_master() as master, running_mooncake_client(master.address) as client:
        store = MooncakeStore.connect(mooncake_options(master.address, shm_client=client.rpc_address))
        arena = Arena(store)
        client.kill()
        client.start()
        client.wait_serving()
        wait_for(
            lambda: (
                store.error_counts.get("memory_forgotten", 0) > 0
                or bool(puts(store, [arena.buffer(unique("quick"), b"q" * 100)]) == ["stored"])
            )
        )

        key = unique("quick")
        outcome = puts(store, [arena.buffer(key, b"q" * 100)])
        if outcome == ["failed"]:  # its ping did not notice
            assert list(store.exists([key])) == [False]
            assert gets(store, [arena.buffer(key, nbytes=100)]) == ["miss"]
        else:
            assert gets(store, [arena.buffer(key, nbytes=100)]) == ["hit"]
        store.close()


def test_both_placements_see_the_same_objects() -> None:
    with running_master() as master, running_mooncake_client(master.address) as client:
        own = MooncakeStore.connect(mooncake_options(master.address))
        shared = MooncakeStore.connect(mooncake_options(master.address, shm_client=client.rpc_address))
        mine, theirs = Arena(own), Arena(shared)
        key, other = unique("tcp"), unique("shm")
        puts(own, [mine.buffer(key, content_of(key, 70_000))])
        puts(shared, [theirs.buffer(other, content_of(other, 70_000))])
        there, here = theirs.buffer(key, nbytes=70_000), mine.buffer(other, nbytes=70_000)

        assert gets(shared, [there]) == gets(own, [here]) == ["hit"]
        assert read(there) == content_of(key, 70_000)
        assert read(here) == content_of(other, 70_000)
        shared.close()
        own.close()


def test_two_clients_cannot_have_one_label() -> None:
    with running_master() as master:
        options = mooncake_options(master.address)
        first = MooncakeStore.connect(options)

        with pytest.raises(StoreUnavailable, match="cannot be bound"):
            MooncakeStore.connect(options)
        first.close()
        MooncakeStore.connect(options).close()


def test_clients_keep_to_their_ports() -> None:
    base = free_port()
    with running_master() as master:
        options = mooncake_options(master.address)
        narrow = type(options)(
            master=options.master, local_hostname=options.local_hostname, rpc_ports=(base, base), call_timeout_s=2.0
        )
        with pytest.raises(StoreUnavailable, match="needs 2 ports"):
            MooncakeStore.connect(narrow)


def test_something_that_is_no_master_is_refused_in_time() -> None:
    with running_master() as master:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="mooncake setup failed"):
            MooncakeStore.connect(mooncake_options(f"127.0.0.1:{master.metrics_port}"))
        assert time.monotonic() - started < 15
