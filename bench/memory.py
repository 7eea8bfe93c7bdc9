"""Resident memory of each process of an engine under mixed load, against its weights and configured pools.

Prompts of many lengths, alone and sixteen together, so that every cache of kernels and buffers has grown; then the
largest resident size of engine and worker is held against the weights (worker), the device cache and the host arena.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import psutil
from client import make_prompt
from report import Result, compare, write_report
from systems import DEVICE_BYTES, HOST_BLOCKS_FACTOR, System, model_folder, running

VOCAB_SIZE = 49_152
NAMES = ("ours-shm", "ours-tcp")
MIB = 1 << 20


def load(system: System, rounds: int) -> None:
    """Requests of many shapes."""
    for index in range(rounds):
        system.client.complete(make_prompt(10 + index, 37 + 211 * index, VOCAB_SIZE), 16)
    for round_number in range(3):
        prompts = [make_prompt(1000 + 20 * round_number + n, 50 + 61 * n, VOCAB_SIZE) for n in range(16)]
        system.client.together(prompts, 24)


def measure(system: System, weights: int, rounds: int) -> list[Result]:
    """Excess of each process in MiB."""
    engine = psutil.Process(system.cluster.pid(system.engine))
    family = [engine, *engine.children(recursive=True)]
    largest: dict[int, int] = {}
    for _ in range(2):
        load(system, rounds)
        for process in family:
            largest[process.pid] = max(largest.get(process.pid, 0), process.memory_info().rss)
    worker = max(largest, key=lambda pid: largest[pid])
    others = [size for pid, size in largest.items() if pid != worker]
    pools = DEVICE_BYTES * (1 + HOST_BLOCKS_FACTOR)
    excess = (largest[worker] - weights - pools) / MIB
    return [
        compare(f"{system.name}: worker, MiB beyond weights and pools", excess, at_most=400),
        compare(f"{system.name}: worker, MiB in all", largest[worker] / MIB, (weights + pools) / MIB),
        compare(f"{system.name}: largest other process (engine), MiB", max(others) / MIB, at_most=400),
    ]


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    model = model_folder()
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    found: list[Result] = []
    for name in NAMES:
        with running(name, model, options.threads, print) as system:
            found += measure(system, weights, options.rounds)
    write_report("memory", found, " ".join(["python", "bench/memory.py", *sys.argv[1:]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
