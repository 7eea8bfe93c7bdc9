"""Replay of the FAST'25 traces against the block pool and its eviction policies: hit rates by capacity.

Every request of a trace is a list of prefix-chained hash ids, one per block of 512 tokens. Two conventions:

engine  only complete blocks are cached and at least one token is computed, as in the engine; hits are counted per
        complete block
trace   every id is a block and all of them may hit, as the published curves count

A request matches its longest resident prefix, leases the rest, publishes it and releases everything, one request at a
time. The reference of a capacity is leaf-first LRU replayed the same way; the reference of an unlimited pool is the
ideal of the trace, computed from the ids alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from kvtier_worker.core.eviction import EvictionPolicy, make_policy
from kvtier_worker.core.ids import BlockHash, Tier
from kvtier_worker.core.pool import BlockPool
from kvtier_worker.core.prefix import full_blocks, restorable_blocks
from report import Result, compare, write_report

BLOCK = 512
TRACES = ("conversation", "synthetic")
CAPACITIES = (500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000)
MUST_GAIN = 5_000  # elsewhere it is enough not to lose
PUBLISHED_IDEAL = {"conversation": 0.366, "synthetic": 0.640}  # FAST'25, every id counted


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace."""

    num_tokens: int
    hashes: tuple[BlockHash, ...]


def load(path: Path) -> list[Request]:
    """The requests of a trace, every id a block."""
    known: dict[int, BlockHash] = {}
    requests = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            hashes = (known.setdefault(i, BlockHash(i.to_bytes(16, "little"))) for i in row["hash_ids"])
            requests.append(Request(row["input_length"], tuple(hashes)))
    return requests


def complete_blocks(requests: Sequence[Request]) -> list[Request]:
    """The same requests without the partial last block, which an engine never caches."""
    return [Request(r.num_tokens, r.hashes[: full_blocks(r.num_tokens, BLOCK)]) for r in requests]


def replay(requests: Sequence[Request], capacity: int, policy: EvictionPolicy, *, engine: bool) -> float:
    """Hit blocks / asked blocks of a pool of ``capacity`` blocks."""
    pool = BlockPool(Tier.DEVICE, capacity + 1, policy)
    asked = hit = 0
    for request in requests:
        hashes = request.hashes
        run = pool.match(hashes)
        asked += len(hashes)
        hit += restorable_blocks(len(run), request.num_tokens, BLOCK) if engine else len(run)
        pool.hit(run)
        for slot in run:
            pool.share(slot)
        slots = run + pool.lease(len(hashes) - len(run))
        pool.fill(slots[len(run) :])
        for index in range(len(run), len(hashes)):
            pool.publish(slots[index], hashes[index], hashes[index - 1] if index else None)
        pool.release(slots)
    pool.check_integrity()
    return hit / asked


def ideal(requests: Sequence[Request], *, engine: bool) -> float:
    """Hit rate of a cache that never evicts, from the ids alone."""
    seen: set[BlockHash] = set()
    asked = hit = 0
    for request in requests:
        run = 0
        while run < len(request.hashes) and request.hashes[run] in seen:
            run += 1
        asked += len(request.hashes)
        hit += min(run, (request.num_tokens - 1) // BLOCK) if engine else run
        seen.update(request.hashes)
    return hit / asked


def unlimited(name: str, requests: Sequence[Request], *, engine: bool) -> Result:
    """A pool that never evicts, against the ideal of the trace."""
    blocks = len({block_hash for request in requests for block_hash in request.hashes})
    ours = replay(requests, blocks, make_policy("s3fifo", blocks), engine=engine)
    convention = "engine" if engine else "trace"
    reference = ideal(requests, engine=engine) if engine else PUBLISHED_IDEAL[name]
    return compare(f"{name}, {convention}: hit rate, unlimited", ours, reference, at_least=0.99, at_most=1.01)


def limited(name: str, requests: Sequence[Request], capacity: int, *, engine: bool) -> Result:
    """The adaptive policy against leaf-first LRU."""
    ours, lru = (replay(requests, capacity, make_policy(p, capacity), engine=engine) for p in ("s3fifo", "lru"))
    convention = "engine" if engine else "trace"
    least = 1.01 if capacity == MUST_GAIN else 1.0
    return compare(f"{name}, {convention}: hit rate, {capacity:,} blocks", ours, lru, at_least=least)


def main() -> None:
    default = Path(__file__).parents[2] / "shared" / "data" / "traces"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--traces", type=Path, default=default, help="folder of *_trace.jsonl.gz (default: %(default)s)"
    )
    parser.add_argument("--capacities", type=int, nargs="+", default=CAPACITIES, metavar="BLOCKS")
    options = parser.parse_args()
    missing = [path for name in TRACES if not (path := options.traces / f"{name}_trace.jsonl.gz").exists()]
    if missing:
        parser.exit(2, f"no {', '.join(map(str, missing))}: give the folder of the FAST'25 traces with --traces\n")
    results = []
    for name in TRACES:
        every = load(options.traces / f"{name}_trace.jsonl.gz")
        for engine, requests in ((True, complete_blocks(every)), (False, every)):
            results.append(unlimited(name, requests, engine=engine))
            results += [limited(name, requests, capacity, engine=engine) for capacity in options.capacities]
    write_report("trace_replay", results, f"python {' '.join(['bench/trace_replay.py', *sys.argv[1:]])}")


if __name__ == "__main__":
    main()
