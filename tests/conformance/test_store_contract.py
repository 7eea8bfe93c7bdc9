"""What every `KVCacheStore` does, real or not. One suite, four worlds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from kvtier_worker.engine.ports import KVCacheStore, StoreBuffer
from kvtier_worker.errors import StoreUnavailable
from kvtier_worker.testing.store_worlds import (
    Arena,
    World,
    content_of,
    faulty_world,
    gets,
    memory_world,
    mooncake_world,
    puts,
    read,
    unique,
    write,
)

Opener = Callable[[], KVCacheStore]


@pytest.fixture(
    scope="module",
    params=[
        "memory",
        "faulty",
        pytest.param("mooncake-tcp", marks=pytest.mark.mooncake),
        pytest.param("mooncake-shm", marks=pytest.mark.mooncake),
    ],
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    worlds: dict[str, Callable[[], AbstractContextManager[World]]] = {
        "memory": memory_world,
        "faulty": faulty_world,
        "mooncake-tcp": lambda: mooncake_world(shared_memory=False),
        "mooncake-shm": lambda: mooncake_world(shared_memory=True),
    }
    with worlds[request.param]() as one:
        yield one


@pytest.fixture
def open_store(world: World) -> Iterator[Opener]:
    stores: list[KVCacheStore] = []

    def opener() -> KVCacheStore:
        stores.append(world.open_store())
        return stores[-1]

    yield opener
    for store in stores:
        store.close()


@pytest.fixture(scope="module")
def store(world: World) -> Iterator[KVCacheStore]:
    """One for all tests that do not close it: leaving a real store takes a second."""
    shared = world.open_store()
    yield shared
    shared.close()


def errors(store: KVCacheStore, name: str) -> int:
    return store.error_counts.get(name, 0)


def test_what_one_store_puts_another_one_reads(open_store: Opener) -> None:
    writer, reader = open_store(), open_store()
    source, target = Arena(writer), Arena(reader)
    keys = [unique("round-trip") for _ in range(5)]
    sizes = [1, 64, 4097, 100_000, 1 << 20]
    contents = [content_of(key, size) for key, size in zip(keys, sizes, strict=True)]

    stored = puts(writer, [source.buffer(key, content) for key, content in zip(keys, contents, strict=True)])
    buffers = [target.buffer(key, nbytes=size) for key, size in zip(keys, sizes, strict=True)]

    assert stored == ["stored"] * 5
    assert gets(reader, buffers) == ["hit"] * 5
    assert [read(buffer) for buffer in buffers] == contents


def test_a_read_touches_only_its_buffers(store: KVCacheStore) -> None:
    arena = Arena(store)
    key = unique("neighbours")
    before, middle, after = (arena.buffer(name, b"\x11" * 64) for name in ("before", key, "after"))
    puts(store, [middle])
    write(middle, b"\x00" * 64)

    assert gets(store, [middle]) == ["hit"]
    assert read(middle) == b"\x11" * 64
    assert read(before) == read(after) == b"\x11" * 64


def test_an_existing_object_is_never_overwritten(open_store: Opener) -> None:
    store, other = open_store(), open_store()
    arena, others = Arena(store), Arena(other)
    key = unique("keep")

    assert puts(store, [arena.buffer(key, b"first" * 100)]) == ["stored"]
    assert puts(store, [arena.buffer(key, b"other" * 100)]) == ["exists"]
    assert puts(other, [others.buffer(key, b"longer" * 200)]) == ["exists"]
    target = arena.buffer(key, nbytes=500)
    assert gets(store, [target]) == ["hit"]
    assert read(target) == b"first" * 100


def test_a_discarded_object_can_be_written_anew_at_once(open_store: Opener) -> None:
    """Even under the lease that looking at it took."""
    store, other = open_store(), open_store()
    arena, place = Arena(store), Arena(other)
    keys = [unique("discarded"), unique("never-there")]
    assert puts(store, [arena.buffer(keys[0], b"o" * 300)]) == ["stored"]
    assert gets(other, [place.buffer(keys[0], nbytes=300)]) == ["hit"]
    store.discard(keys)
    assert list(store.exists(keys)) == [False, False]
    assert puts(store, [arena.buffer(keys[0], b"n" * 300)]) == ["stored"]
    again = place.buffer(keys[0], nbytes=300)
    assert gets(other, [again]) == ["hit"]
    assert read(again) == b"n" * 300


def test_only_missing_objects_of_a_batch_are_written(store: KVCacheStore) -> None:
    arena = Arena(store)
    old, new = unique("old"), unique("new")
    puts(store, [arena.buffer(old, b"a" * 32)])

    assert puts(store, [arena.buffer(new, b"n" * 32), arena.buffer(old, b"b" * 32)]) == ["stored", "exists"]


def test_the_first_of_repeated_keys_is_written(store: KVCacheStore) -> None:
    arena = Arena(store)
    key, other = unique("twice"), unique("once")
    outcomes = puts(store, [arena.buffer(key, b"1" * 48), arena.buffer(other, b"x" * 48), arena.buffer(key, b"2" * 48)])

    assert outcomes == ["stored", "stored", "exists"]
    target = arena.buffer(key, nbytes=48)
    assert gets(store, [target]) == ["hit"]
    assert read(target) == b"1" * 48


def test_a_read_that_names_a_key_twice_reads_nothing(store: KVCacheStore) -> None:
    arena = Arena(store)
    key = unique("double-read")
    puts(store, [arena.buffer(key, b"z" * 80)])
    first, second = arena.buffer(key, nbytes=80), arena.buffer(key, nbytes=80)
    before = errors(store, "duplicate_keys")

    assert gets(store, [first, second]) == ["miss", "miss"]
    assert read(first) == read(second) == b"\xee" * 80
    assert errors(store, "duplicate_keys") == before + 1


def test_missing_objects_are_misses_beside_hits(store: KVCacheStore) -> None:
    arena = Arena(store)
    key = unique("present")
    puts(store, [arena.buffer(key, b"p" * 200)])
    buffers = [arena.buffer(name, nbytes=200) for name in (unique("absent"), key, unique("absent"))]

    assert gets(store, buffers) == ["miss", "hit", "miss"]
    assert read(buffers[1]) == b"p" * 200


def test_exists_answers_in_order(store: KVCacheStore) -> None:
    arena = Arena(store)
    key = unique("there")
    puts(store, [arena.buffer(key, b"t" * 16)])

    assert list(store.exists([unique("gone"), key, unique("gone"), key])) == [False, True, False, True]
    assert list(store.exists([])) == []


@pytest.mark.parametrize("nbytes", [99, 101, 1, 5000])
def test_an_object_of_another_size_is_a_miss(store: KVCacheStore, nbytes: int) -> None:
    arena = Arena(store)
    key = unique("size")
    puts(store, [arena.buffer(key, b"s" * 100)])
    beside, guard = arena.buffer(key, nbytes=nbytes), arena.buffer("guard", b"g" * 64)
    before = errors(store, "size_mismatch")

    assert gets(store, [beside]) == ["miss"]
    assert errors(store, "size_mismatch") == before + 1
    assert read(guard) == b"g" * 64
    assert gets(store, [arena.buffer(key, nbytes=100)]) == ["hit"]


def test_an_empty_object_is_neither_stored_nor_found(store: KVCacheStore) -> None:
    arena = Arena(store)
    key = unique("empty")
    empty = StoreBuffer(key, arena.address, 0)

    assert puts(store, [empty]) == ["failed"]
    assert gets(store, [empty]) == ["miss"]
    assert list(store.exists([key])) == [False]


def test_empty_batches_are_fine(store: KVCacheStore) -> None:
    assert gets(store, []) == []
    assert puts(store, []) == []


def test_unregistered_memory_is_neither_read_nor_written(store: KVCacheStore) -> None:
    arena = Arena(store)
    key = unique("stray")
    puts(store, [arena.buffer(key, b"s" * 64)])
    beyond = StoreBuffer(key, arena.address + arena.nbytes - 32, 64)
    good = arena.buffer(unique("good"), b"g" * 64)
    stray = StoreBuffer(unique("stray"), beyond.address, 64)
    before = errors(store, "unregistered_memory")

    assert gets(store, [beyond]) == ["miss"]
    assert puts(store, [good, stray]) == ["stored", "failed"]
    assert errors(store, "unregistered_memory") == before + 2


def test_a_range_registered_twice_is_one_registration(store: KVCacheStore) -> None:
    arena = Arena(store)
    store.register(arena.address, arena.nbytes)

    assert puts(store, [arena.buffer(unique("again"), b"a" * 8)]) == ["stored"]


@pytest.mark.parametrize(("shift", "nbytes"), [(0, 4096), (4096, 2 << 20), (0, 0), (0, -5)])
def test_an_overlapping_or_empty_range_is_refused(store: KVCacheStore, shift: int, nbytes: int) -> None:
    arena = Arena(store)

    with pytest.raises(StoreUnavailable, match="cannot register"):
        store.register(arena.address + shift, nbytes)


def test_a_null_range_is_refused(store: KVCacheStore) -> None:
    with pytest.raises(StoreUnavailable, match="not a range of memory"):
        store.register(0, 4096)


def test_allocated_memory_is_zeroed_and_page_aligned(store: KVCacheStore) -> None:
    address = store.allocate(123_456)

    assert address % 4096 == 0
    assert read(StoreBuffer("whole", address, 123_456)) == bytes(123_456)


def test_a_closed_store_answers_misses(open_store: Opener) -> None:
    store = open_store()
    survivor = open_store()
    arena, kept = Arena(store), Arena(survivor)
    key = unique("closed")
    buffer = arena.buffer(key, b"c" * 64)
    puts(store, [buffer])
    store.close()
    store.close()

    assert gets(store, [buffer]) == ["miss"]
    assert puts(store, [buffer]) == ["failed"]
    assert list(store.exists([key])) == [False]
    with pytest.raises(StoreUnavailable):
        store.register(4096, 4096)
    with pytest.raises(StoreUnavailable):
        store.allocate(4096)
    assert gets(survivor, [kept.buffer(key, nbytes=64)]) == ["hit"]


def test_eight_threads_read_what_was_written(store: KVCacheStore) -> None:
    arena = Arena(store)
    wrong: list[str] = []
    prefix = unique("threads")

    def work(number: int) -> None:
        for turn in range(12):
            key = f"{prefix}/{number}/{turn}"
            content = content_of(key, 20_000 + number)
            source, target = (StoreBuffer(key, place.address, len(content)) for place in places[number])
            write(source, content)
            if puts(store, [source]) != ["stored"] or gets(store, [target]) != ["hit"] or read(target) != content:
                wrong.append(key)

    places = [(arena.buffer("source", nbytes=32_768), arena.buffer("target", nbytes=32_768)) for _ in range(8)]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_threads_that_write_one_key_leave_one_whole_object(store: KVCacheStore) -> None:
    arena = Arena(store)
    key = unique("race")
    buffers = [arena.buffer(key, bytes([number]) * 50_000) for number in range(1, 7)]
    threads = [threading.Thread(target=store.put, args=([buffer],)) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    target = arena.buffer(key, nbytes=50_000)

    assert gets(store, [target]) == ["hit"]
    assert len(set(read(target))) == 1


def test_closing_while_threads_call_loses_nobody(open_store: Opener) -> None:
    store = open_store()
    arena = Arena(store)
    prefix = unique("closing")
    seen: list[str] = []

    def work(number: int) -> None:
        address = arena.address + 4096 * number
        for turn in range(50):
            seen.extend(puts(store, [StoreBuffer(f"{prefix}/{number}/{turn}", address, 4096)]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    store.close()
    for thread in threads:
        thread.join()

    assert len(seen) == 200
    assert set(seen) <= {"stored", "failed"}
