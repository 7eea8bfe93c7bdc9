"""`MooncakeStore` over a scripted client: every code that the real one was seen to return, in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.adapters.mooncake_store import BreakerPolicy, MooncakeOptions, MooncakeStore
from kvtier_worker.adapters.mooncake_store.connect import Connection
from kvtier_worker.engine.ports import StoreBuffer
from kvtier_worker.errors import StoreUnavailable
from kvtier_worker.mooncake_client.guard import GuardedClient

BASE = 1 << 20
ARENA = 1 << 20
Answer = Sequence[int] | Exception | Callable[[Sequence[str]], Sequence[int]]


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ScriptedClient:
    """Answers from lists; when a list is empty: everything is missing, every get succeeds, every put works."""

    clock: Clock
    exists: list[Answer] = field(default_factory=list)
    gets: list[Answer] = field(default_factory=list)
    puts: list[Answer] = field(default_factory=list)
    cost_s: float = 0.0
    register_code: int = 0
    calls: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)
    unregistered: list[int] = field(default_factory=list)
    closed: int = 0

    def _answer(self, name: str, script: list[Answer], keys: Sequence[str], default: Sequence[int]) -> list[int]:
        assert not self.closed, "the client was used after it was closed: SIGSEGV"
        self.calls.append((name, tuple(keys)))
        self.clock.now += self.cost_s
        answer = script.pop(0) if script else default
        if isinstance(answer, Exception):
            raise answer
        return list(answer(keys) if callable(answer) else answer)

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return self._answer("exists", self.exists, keys, [0] * len(keys))

    def batch_get_into(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        return self._answer("get", self.gets, keys, sizes)

    def batch_put_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], config: Any
    ) -> list[int]:
        self.configs.append(config)
        return self._answer("put", self.puts, keys, [0] * len(keys))

    def register_buffer(self, address: int, nbytes: int) -> int:
        return self.register_code

    def unregister_buffer(self, address: int) -> int:
        self.unregistered.append(address)
        return 0

    def alloc_from_mem_pool(self, nbytes: int) -> int:
        return 0

    def allocate_and_mount_segment(self, nbytes: int, protocol: str) -> dict[str, Any]:
        return {"ret": -1, "segment_ids": []}

    def unmount_and_free_segment(self, segment_ids: Sequence[str]) -> int:
        return 0

    def remove(self, key: str, force: bool) -> int:
        return 0

    def close(self) -> int:
        self.closed += 1
        return 0


@dataclass
class Setup:
    store: MooncakeStore
    client: ScriptedClient
    clock: Clock
    reachable: list[bool]

    def get(self, *keys: str, nbytes: int = 64) -> list[str]:
        return [outcome.value for outcome in self.store.get(buffers(*keys, nbytes=nbytes))]

    def put(self, *keys: str, nbytes: int = 64) -> list[str]:
        return [outcome.value for outcome in self.store.put(buffers(*keys, nbytes=nbytes))]

    def called(self, name: str) -> list[tuple[str, ...]]:
        return [keys for call, keys in self.client.calls if call == name]


def buffers(*keys: str, nbytes: int = 64) -> list[StoreBuffer]:
    return [StoreBuffer(key, BASE + 64 * index, nbytes) for index, key in enumerate(keys)]


def build(**changes: Any) -> Setup:
    clock = Clock()
    client = ScriptedClient(clock)
    reachable = [True]
    options = MooncakeOptions(
        master="127.0.0.1:1",
        local_hostname="127.0.0.1:2",
        breaker=BreakerPolicy(max_faults=3, first_pause_s=1.0, max_pause_s=4.0),
        absent_ttl_s=10.0,
        no_space_pause_s=0.5,
        **changes,
    )
    connection = Connection(GuardedClient(client), "config", shared_memory=False, reachable=lambda: reachable[0])
    store = MooncakeStore(connection, options, clock)
    store.register(BASE, ARENA)
    return Setup(store, client, clock, reachable)


@pytest.fixture
def setup() -> Setup:
    return build()


@pytest.mark.parametrize(
    ("code", "outcome", "error"),
    [
        (64, "hit", ""),
        (-704, "miss", ""),
        (-703, "miss", "replica_not_ready"),
        (-712, "miss", "replica_gone"),
        (-600, "miss", "size_mismatch"),
        (63, "miss", "size_mismatch"),
        (65, "miss", "size_mismatch"),
        (0, "miss", "size_mismatch"),
        (-800, "fault", "transfer_fail"),
        (-801, "fault", "checksum_mismatch"),
        (-900, "fault", "rpc_fail"),
        (-901, "fault", "rpc_timeout"),
        (-1, "fault", "internal"),
        (-10, "fault", "code_10"),
        (-123456, "fault", "code_123456"),
    ],
)
def test_every_code_of_a_read_has_one_outcome(setup: Setup, code: int, outcome: str, error: str) -> None:
    setup.client.gets = [[64, code]]

    assert setup.get("good", "other") == ["hit", outcome]
    assert setup.store.error_counts == ({error: 1} if error else {})


@given(codes=st.lists(st.one_of(st.just(64), st.integers(-1100, 100)), max_size=12), asked=st.integers(1, 8))
def test_a_read_is_a_hit_only_for_exactly_the_asked_bytes(codes: list[int], asked: int) -> None:
    setup = build()
    setup.client.gets = [codes, [-707] * 8]
    keys = [f"k{index}" for index in range(asked)]

    outcomes = setup.get(*keys)

    assert len(outcomes) == asked
    for index, outcome in enumerate(outcomes):
        assert (outcome == "hit") == (index < len(codes) and codes[index] == 64)


def test_a_result_that_is_too_short_is_a_fault_for_the_tail(setup: Setup) -> None:
    setup.client.gets = [[64]]

    assert setup.get("a", "b", "c") == ["hit", "fault", "fault"]
    assert setup.store.error_counts["short_result"] == 2


def test_an_exception_of_the_client_is_a_fault(setup: Setup) -> None:
    setup.client.gets = [RuntimeError("boom"), TypeError("keys")]

    assert setup.get("a") == ["fault"]
    assert setup.get("a") == ["fault"]
    assert setup.store.error_counts["client_exception"] == 2


def test_an_expired_lease_is_asked_for_once_more(setup: Setup) -> None:
    setup.client.gets = [[64, -707, -707], [64, -707]]

    assert setup.get("a", "b", "c") == ["hit", "hit", "miss"]
    assert [call for call, _ in setup.client.calls] == ["get", "exists", "get"]
    assert setup.called("get") == [("a", "b", "c"), ("b", "c")]
    assert setup.store.error_counts["lease_expired"] == 3  # two the first time, one the second


def test_an_unreadable_object_is_absent_until_its_time_is_over(setup: Setup) -> None:
    setup.client.gets = [[64, -800]]
    setup.client.exists = [[1], [1, 1]]
    setup.get("good", "bad")

    assert list(setup.store.exists(["bad", "good"])) == [False, True]
    assert setup.get("bad", "good") == ["miss", "hit"]
    assert setup.called("exists")[-1] == ("good",)
    assert setup.called("get")[-1] == ("good",)
    setup.clock.now += 10.0
    assert list(setup.store.exists(["bad", "good"])) == [True, True]


def test_an_object_written_again_is_not_absent_any_more(setup: Setup) -> None:
    setup.client.gets = [[-800]]
    setup.get("key")
    assert setup.put("key") == ["stored"]

    assert setup.get("key") == ["hit"]


def test_a_dead_master_stops_calls_after_the_first_costly_one(setup: Setup) -> None:
    setup.client.cost_s = 4.3
    setup.client.gets = [[-900]]

    assert setup.get("a") == ["fault"]
    assert setup.store.state == "open"
    assert setup.get("a") == ["miss"]
    assert list(setup.store.exists(["a"])) == [False]
    assert setup.put("a") == ["failed"]
    assert len(setup.client.calls) == 1
    assert setup.store.error_counts["breaker_open"] == 3


def test_memory_that_the_mooncake_client_forgot_is_noticed_by_writes_and_comes_back() -> None:
    setup = build(shm_client="127.0.0.1:3")
    setup.client.puts = [[-600]]
    setup.client.exists = [[0], [0], [1]]

    assert setup.put("a") == ["failed"]
    assert setup.store.error_counts["memory_forgotten"] == 1
    assert list(setup.store.exists(["a"])) == [False]
    assert setup.get("a") == ["miss"]
    assert [call for call, _ in setup.client.calls] == ["exists", "put"]
    assert setup.put("a") == ["stored"]
    assert list(setup.store.exists(["a"])) == [True]
    assert setup.get("a") == ["hit"]


def test_a_killed_master_that_nobody_replaced_costs_no_slow_call(setup: Setup) -> None:
    setup.client.gets = [[-900]]  # the connection broke: at once
    assert setup.get("a") == ["fault"]
    setup.client.cost_s = 4.3
    setup.reachable[0] = False

    assert setup.get("a") == ["miss"]
    assert setup.store.state == "open"
    assert len(setup.client.calls) == 1


def test_a_trial_looks_first_whether_anybody_answers(setup: Setup) -> None:
    setup.client.cost_s = 4.3
    setup.client.gets = [[-900]]
    setup.get("a")
    setup.reachable[0] = False
    setup.clock.now += 1.0

    assert setup.get("a") == ["miss"]
    assert len(setup.client.calls) == 1
    assert setup.store.error_counts["unreachable"] == 1

    setup.reachable[0] = True
    setup.client.cost_s = 0.0
    setup.clock.now += 4.0
    assert setup.get("a") == ["hit"]
    assert setup.store.state == "closed"


def test_misses_do_not_open_the_breaker(setup: Setup) -> None:
    for _ in range(10):
        setup.client.gets = [[-704, -704]]
        setup.get("a", "b")

    assert setup.store.state == "closed"


def test_one_dead_node_among_others_does_not_open_the_breaker(setup: Setup) -> None:
    for turn in range(10):
        setup.client.gets = [[64, -800]]
        setup.get("good", f"bad{turn}")

    assert setup.store.state == "closed"


def test_only_missing_objects_are_written(setup: Setup) -> None:
    setup.client.exists = [[0, 1, 0]]

    assert setup.put("a", "b", "c") == ["stored", "exists", "stored"]
    assert setup.called("put") == [("a", "c")]


def test_an_object_whose_existence_is_unknown_counts_as_missing(setup: Setup) -> None:
    setup.client.exists = [[1, -703]]

    assert setup.put("a", "b") == ["exists", "stored"]
    assert setup.called("put") == [("b",)]


def test_nothing_is_written_when_the_master_does_not_answer(setup: Setup) -> None:
    setup.client.exists = [[-900, -900]]

    assert setup.put("a", "b") == ["failed", "failed"]
    assert setup.called("put") == []
    assert setup.store.error_counts["rpc_fail"] == 2


def test_a_lost_race_for_a_key_is_an_existing_object(setup: Setup) -> None:
    setup.client.puts = [[-705]]

    assert setup.put("a") == ["exists"]


def test_a_full_store_pauses_writes_and_then_tries_again(setup: Setup) -> None:
    setup.client.puts = [[0, -200]]

    assert setup.put("a", "b") == ["stored", "failed"]
    assert setup.store.error_counts["no_space"] == 1
    assert setup.put("c") == ["failed"]
    assert setup.store.error_counts["put_paused"] == 1
    assert setup.called("put") == [("a", "b")]
    assert setup.get("a") == ["hit"]
    setup.clock.now += 0.5
    assert setup.put("c") == ["stored"]


def test_a_full_store_is_not_a_fault(setup: Setup) -> None:
    for _ in range(5):
        setup.client.puts = [[-200]]
        setup.put("a")
        setup.clock.now += 1.0

    assert setup.store.state == "closed"


def test_the_first_of_repeated_keys_decides_for_all(setup: Setup) -> None:
    setup.client.puts = [[0, -800]]

    assert setup.put("a", "b", "a", "b") == ["stored", "failed", "exists", "failed"]
    assert setup.called("put") == [("a", "b")]


def test_replicas_are_asked_for_with_every_write(setup: Setup) -> None:
    setup.put("a")

    assert setup.client.configs == ["config"]


def test_long_lists_are_cut_into_calls_that_a_lease_outlives() -> None:
    setup = build(max_batch_keys=3, max_batch_bytes=64 * 3)
    keys = [f"k{index}" for index in range(7)]

    assert setup.put(*keys) == ["stored"] * 7
    assert setup.get(*keys) == ["hit"] * 7
    assert setup.called("get") == [tuple(keys[0:3]), tuple(keys[3:6]), tuple(keys[6:])]
    assert setup.called("put") == setup.called("get")


def test_an_object_larger_than_the_limit_goes_alone() -> None:
    setup = build(max_batch_bytes=100)
    big = StoreBuffer("big", BASE, 1000)
    small = [StoreBuffer(f"s{index}", BASE + 2000 + 64 * index, 40) for index in range(3)]

    assert [outcome.value for outcome in setup.store.get([small[0], big, *small[1:]])] == ["hit"] * 4
    assert setup.called("get") == [("s0",), ("big",), ("s1", "s2")]


def test_existence_is_asked_in_batches(setup: Setup) -> None:
    keys = [f"k{index}" for index in range(5000)]
    setup.client.exists = [lambda some: [1] * len(some)] * 2

    assert list(setup.store.exists(keys)) == [True] * 5000
    assert [len(some) for some in setup.called("exists")] == [4096, 904]


def test_closing_unregisters_then_closes_once(setup: Setup) -> None:
    setup.store.close()
    setup.store.close()

    assert setup.client.unregistered == [BASE]
    assert setup.client.closed == 1
    assert setup.get("a") == ["miss"]
    assert setup.put("a") == ["failed"]
    assert list(setup.store.exists(["a"])) == [False]


def test_closing_waits_for_a_call_in_flight(setup: Setup) -> None:
    entered, go_on, order = threading.Event(), threading.Event(), []

    def slow(keys: Sequence[str]) -> Sequence[int]:
        entered.set()
        assert go_on.wait(10)
        order.append("read")
        return [64] * len(keys)

    setup.client.gets = [slow]
    reader = threading.Thread(target=lambda: setup.get("a"))
    reader.start()
    assert entered.wait(10)

    def close() -> None:
        setup.store.close()
        order.append("closed")

    closer = threading.Thread(target=close)
    closer.start()
    go_on.set()
    reader.join()
    closer.join()

    assert order == ["read", "closed"]


def test_a_child_after_fork_never_touches_the_client(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: -1)

    assert setup.get("a") == ["miss"]
    assert setup.client.calls == []


def test_a_refused_registration_says_so(setup: Setup) -> None:
    setup.client.register_code = -600

    with pytest.raises(StoreUnavailable, match=r"refused .* \(invalid_params\)"):
        setup.store.register(BASE + ARENA, 4096)
    assert [outcome.value for outcome in setup.store.get([StoreBuffer("a", BASE + ARENA, 64)])] == ["miss"]


def test_buffers_in_two_ranges_are_read_in_one_call(setup: Setup) -> None:
    setup.store.register(BASE + 2 * ARENA, 4096)
    pair = [StoreBuffer("a", BASE, 64), StoreBuffer("b", BASE + 2 * ARENA, 64)]

    assert [outcome.value for outcome in setup.store.get(pair)] == ["hit", "hit"]
    assert setup.called("get") == [("a", "b")]


def test_a_buffer_that_spans_a_gap_between_ranges_is_refused(setup: Setup) -> None:
    setup.store.register(BASE + ARENA + 64, 4096)
    spanning = StoreBuffer("a", BASE + ARENA - 32, 128)

    assert [outcome.value for outcome in setup.store.get([spanning])] == ["miss"]
    assert setup.client.calls == []
