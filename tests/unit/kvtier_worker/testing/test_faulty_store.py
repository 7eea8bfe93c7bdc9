"""The fault wrapper does what its profile says, reproducibly, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kvtier_worker.testing.faulty_store import FaultProfile, FaultyStore
from kvtier_worker.testing.store import MemoryBackend, MemoryStore
from kvtier_worker.testing.store_worlds import Arena, content_of, gets, puts, read

KEYS = [f"k{index}" for index in range(40)]


def filled() -> MemoryBackend:
    backend = MemoryBackend()
    for key in KEYS:
        backend.write(key, content_of(key, 100))
    return backend


def history(profile: FaultProfile, seed: int) -> tuple[list[str], list[bytes], Sequence[bool]]:
    store = FaultyStore(MemoryStore(filled()), profile, seed, sleep=lambda _: None)
    arena = Arena(store, 1 << 16)
    buffers = [arena.buffer(key, nbytes=100) for key in KEYS]
    outcomes = gets(store, buffers)
    return outcomes, [read(buffer) for buffer in buffers], store.exists(KEYS)


@pytest.mark.parametrize(
    "profile",
    [
        FaultProfile(partial_get=0.3, corrupt=0.3, hidden=0.5),
        FaultProfile(short_read=0.5, vanish=0.2),
        FaultProfile(lease_expiry=0.5),
    ],
)
def test_a_seed_repeats_its_faults(profile: FaultProfile) -> None:
    assert history(profile, 7) == history(profile, 7)
    assert any(history(profile, 7) != history(profile, seed) for seed in range(8, 13))


def test_no_profile_means_no_fault() -> None:
    outcomes, contents, found = history(FaultProfile(), 1)

    assert outcomes == ["hit"] * 40
    assert contents == [content_of(key, 100) for key in KEYS]
    assert all(found)


def test_a_corrupt_hit_differs_in_one_bit() -> None:
    outcomes, contents, _ = history(FaultProfile(corrupt=1.0), 3)

    assert outcomes == ["hit"] * 40
    for key, content in zip(KEYS, contents, strict=True):
        flipped = int.from_bytes(content, "big") ^ int.from_bytes(content_of(key, 100), "big")
        assert flipped.bit_count() == 1


def test_a_short_read_is_a_miss_with_garbage() -> None:
    outcomes, contents, _ = history(FaultProfile(short_read=1.0), 3)

    assert outcomes == ["miss"] * 40
    assert contents[0] != content_of(KEYS[0], 100)
    assert contents[0][:50] == content_of(KEYS[0], 100)[:50]


def test_an_object_can_vanish_between_probe_and_read() -> None:
    outcomes, _, found = history(FaultProfile(vanish=1.0), 3)

    assert all(found)
    assert outcomes == ["miss"] * 40


def test_an_outage_ends_by_itself() -> None:
    store = FaultyStore(MemoryStore(filled()), FaultProfile(outages=((1, 3),)))
    arena = Arena(store, 1 << 16)
    buffer = arena.buffer(KEYS[0], nbytes=100)

    assert gets(store, [buffer]) == ["hit"]
    assert store.state == "open"
    assert gets(store, [buffer]) == ["fault"]
    assert puts(store, [buffer]) == ["failed"]
    assert gets(store, [buffer]) == ["hit"]
    assert store.state == "closed"
    assert store.error_counts["injected_outage"] == 2


def test_a_dead_store_knows_nothing_until_it_lives_again() -> None:
    store = FaultyStore(MemoryStore(filled()))
    store.dead = True
    assert list(store.exists(KEYS)) == [False] * 40
    store.dead = False
    assert list(store.exists(KEYS)) == [True] * 40


def test_a_lost_put_claims_success() -> None:
    store = FaultyStore(MemoryStore(), FaultProfile(lost_put=1.0))
    arena = Arena(store, 1 << 16)

    assert puts(store, [arena.buffer("a", b"x" * 10)]) == ["stored"]
    assert list(store.exists(["a"])) == [False]


def test_a_failed_put_stores_nothing() -> None:
    store = FaultyStore(MemoryStore(), FaultProfile(failed_put=1.0))
    arena = Arena(store, 1 << 16)

    assert puts(store, [arena.buffer("a", b"x" * 10)]) == ["failed"]
    assert list(store.exists(["a"])) == [False]


def test_slowness_uses_the_given_sleep() -> None:
    slept: list[float] = []
    store = FaultyStore(MemoryStore(), FaultProfile(slow=1.0, delay_s=3.0), sleep=slept.append)
    store.exists(["a"])

    assert slept == [3.0]


def test_a_full_backend_refuses_and_counts() -> None:
    store = MemoryStore(MemoryBackend(capacity_bytes=100))
    arena = Arena(store, 1 << 16)

    assert puts(store, [arena.buffer("a", b"x" * 80), arena.buffer("b", b"y" * 30)]) == ["stored", "failed"]
    assert store.error_counts["no_space"] == 1
