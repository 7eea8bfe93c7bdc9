"""Do others' prefetches slow down a request that computes? p95 of the TTFT of cold requests.

Each cold request runs beside one whose prompt is cached. In one half of the rounds that prompt is on the device, in the
other half it must come from the store: the compute beside the cold request is the same, only the prefetch differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from client import make_prompt
from report import Result, compare, write_report
from systems import System, model_folder, running

VOCAB_SIZE = 49_152
NAMES = ("ours-shm", "ours-tcp")


def p95(values: list[float]) -> float:
    """95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


def cold_beside(system: System, cold: list[int], cached: list[int], *, from_store: bool) -> float:
    """TTFT of ``cold`` while ``cached`` is being served from the device or from the store."""
    if from_store:
        system.forget("device", "host")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(system.client.complete, cached, 1)
        answer = system.client.complete(cold, 1)
        found = other.result().tiers
    wanted = "store" if from_store else "device"
    if not found.get(wanted):
        raise RuntimeError(f"{system.name}: the other request was to come from the {wanted}: {dict(found)}")
    return answer.ttft_s


def measure(system: System, options: argparse.Namespace) -> Result:
    """One placement of the store."""
    cached = make_prompt(7, options.cached, VOCAB_SIZE)
    system.client.complete(cached, 1)
    time.sleep(2.0)
    samples: dict[bool, list[float]] = defaultdict(list)
    for index in range(options.rounds * 2):
        cold = make_prompt(1000 + index, options.prompt, VOCAB_SIZE)
        samples[index % 2 == 0].append(cold_beside(system, cold, cached, from_store=index % 2 == 0))
    metric = f"{system.name}: TTFT p95 of cold requests, s, others from the store against others from the device"
    return compare(metric, p95(samples[True]), p95(samples[False]), at_most=1.05)


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=600)
    parser.add_argument("--cached", type=int, default=3007)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    model = model_folder()
    found = []
    for name in NAMES:
        with ExitStack() as stack:
            found.append(measure(stack.enter_context(running(name, model, options.threads, print)), options))
    write_report("interference", found, " ".join(["python", "bench/interference.py", *sys.argv[1:]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
