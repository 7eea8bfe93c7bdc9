"""How much of Mooncake's own read speed is left behind our store port: `get` against raw ``batch_get_into``.

Both use one client and the same memory, in turn, in both placements: over TCP, and through shared memory with a
mooncake_client on this machine. Every object is checked once; medians of the interleaved pairs are compared. Also
says what memcpy of the same bytes costs here, and what an empty store costs a read.

    python bench/store_g2h.py [--rounds 40] [--mib 32]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier_worker.adapters.mooncake_store import MooncakeOptions, MooncakeStore
from kvtier_worker.adapters.mooncake_store.connect import open_connection
from kvtier_worker.engine.ports import GetOutcome, PutOutcome, StoreBuffer
from kvtier_worker.mooncake_client.guard import GuardedClient
from kvtier_worker.testing.mooncake import running_master, running_store_node
from kvtier_worker.testing.processes import free_port
from report import Result, compare, write_report

TARGET = 0.85
KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A batch: ``count`` objects of ``nbytes``."""

    nbytes: int
    count: int

    @property
    def name(self) -> str:
        size = f"{self.nbytes // MIB} MiB" if self.nbytes >= MIB else f"{self.nbytes // KIB} KiB"
        return f"{self.count} x {size}"


@dataclass(frozen=True, slots=True)
class Place:
    """A store and the raw client inside it."""

    name: str
    store: MooncakeStore
    client: GuardedClient
    address: int
    nbytes: int


def cases(limit: int) -> Iterator[Case]:
    """Single objects and batches as prefetches make them."""
    for nbytes, count in ((64 * KIB, 1), (MIB, 1), (64 * KIB, 32), (256 * KIB, 32), (MIB, 8), (MIB, 32), (4 * MIB, 8)):
        if nbytes * count <= limit:
            yield Case(nbytes, count)


@contextmanager
def place(name: str, master: str, shm_client: str, nbytes: int) -> Iterator[Place]:
    options = MooncakeOptions(master=master, local_hostname=f"127.0.0.1:{free_port()}", shm_client=shm_client)
    connection = open_connection(options)
    store = MooncakeStore(connection, options, time.monotonic)
    try:
        address = store.allocate(nbytes)
        store.register(address, nbytes)
        yield Place(name, store, connection.client, address, nbytes)
    finally:
        store.close()


def fill(where: Place, case: Case) -> list[StoreBuffer]:
    """Put the case's objects, each with bytes of its own."""
    buffers = [
        StoreBuffer(f"{where.name}/{case.name}/{index}", where.address + index * case.nbytes, case.nbytes)
        for index in range(case.count)
    ]
    for index, buffer in enumerate(buffers):
        ctypes.memset(buffer.address, index + 1, buffer.nbytes)
    outcomes = set(where.store.put(buffers))
    assert outcomes == {PutOutcome.STORED}, outcomes
    ctypes.memset(where.address, 0, case.nbytes * case.count)
    assert set(where.store.get(buffers)) == {GetOutcome.HIT}
    for index, buffer in enumerate(buffers):
        last = ctypes.string_at(buffer.address + buffer.nbytes - 1, 1)[0]
        assert last == ctypes.string_at(buffer.address, 1)[0] == index + 1
    return buffers


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def paired(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median seconds of both, run in turn, each first in half of the rounds."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        order = ((0, first), (1, second)) if number % 2 else ((1, second), (0, first))
        for index, action in order:
            times[index].append(seconds(action))
    return statistics.median(times[0]), statistics.median(times[1])


def measure(where: Place, case: Case, rounds: int) -> Iterator[Result]:
    buffers = fill(where, case)
    keys = [buffer.key for buffer in buffers]
    addresses = [buffer.address for buffer in buffers]
    sizes = [buffer.nbytes for buffer in buffers]
    gigabytes = sum(sizes) / 1e9
    with where.client.use() as raw:
        ours, theirs = paired(
            lambda: where.store.get(buffers), lambda: raw.batch_get_into(keys, addresses, sizes), rounds
        )
    yield compare(f"{where.name}: get {case.name}, GB/s", gigabytes / ours, gigabytes / theirs, at_least=TARGET)


def measure_exists(where: Place, rounds: int) -> Iterator[Result]:
    """What a probe of an empty store costs: 24 keys, the blocks of a 3,000-token prompt."""
    keys = [f"absent/{index}" for index in range(24)]
    with where.client.use() as raw:
        ours, theirs = paired(lambda: where.store.exists(keys), lambda: raw.batch_is_exist(keys), 5 * rounds)
    yield compare(f"{where.name}: exists of 24 absent keys, us", ours * 1e6, theirs * 1e6)


def memcpy_speed(nbytes: int, rounds: int) -> float:
    source, target = ctypes.create_string_buffer(nbytes), ctypes.create_string_buffer(nbytes)
    times = [seconds(lambda: ctypes.memmove(target, source, nbytes)) for _ in range(rounds)]
    return nbytes / 1e9 / statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="pairs per case")
    parser.add_argument("--mib", type=int, default=32, help="largest batch")
    arguments = parser.parse_args()
    limit = arguments.mib * MIB
    results: list[Result] = []
    with (
        running_master(lease_ttl_ms=60_000) as master,
        running_store_node(master.address, segment="1GB", shm=True) as node,
        place("tcp", master.address, "", limit) as tcp,
        place("shm", master.address, node.shm_address, limit) as shm,
    ):
        for where in (tcp, shm):
            for case in cases(limit):
                results += measure(where, case, arguments.rounds)
            results += measure_exists(where, arguments.rounds)
    speeds = {result.metric: result.ours for result in results}
    last = list(cases(limit))[-1].name
    results.append(
        compare(f"shm over tcp: get {last}, GB/s", speeds[f"shm: get {last}, GB/s"], speeds[f"tcp: get {last}, GB/s"])
    )
    results.append(
        compare(
            f"shm over memcpy of {arguments.mib} MiB, GB/s", results[-1].ours, memcpy_speed(limit, arguments.rounds)
        )
    )
    write_report("store_g2h", results, "python bench/store_g2h.py")
    return 0 if all(result.ok is not False for result in results) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
