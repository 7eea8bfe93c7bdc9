"""What the store costs a request that finds nothing in it: store on and empty, against no host tier at all.

Both engines run side by side and get the same never-seen prompts in turn; medians of TTFT and of the whole answer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from client import make_prompt
from report import compare, write_report
from systems import model_folder, running

VOCAB_SIZE = 49_152
NAMES = ("ours-off", "ours-shm", "ours-tcp")


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompt", type=int, default=1023)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    ttft: dict[str, list[float]] = defaultdict(list)
    total: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        model = model_folder()
        systems = [stack.enter_context(running(name, model, options.threads, print)) for name in NAMES]
        for system in systems:
            system.client.complete(make_prompt(1, options.prompt, VOCAB_SIZE), options.tokens)
        for index in range(options.rounds):
            prompt = make_prompt(1000 + index, options.prompt, VOCAB_SIZE)
            # Whoever comes first in a round pays for what the others left in the processor's caches: take turns.
            for system in systems[index % len(systems) :] + systems[: index % len(systems)]:
                answer = system.client.complete(prompt, options.tokens)
                assert answer.cached_tokens == 0, answer
                ttft[system.name].append(answer.ttft_s)
                total[system.name].append(answer.total_s)
    found = []
    for name in NAMES[1:]:
        for what, samples in (("TTFT", ttft), ("whole answer", total)):
            ours, without = statistics.median(samples[name]), statistics.median(samples["ours-off"])
            metric = f"{name}: {what} of a prompt that no tier has, s, against no store"
            found.append(compare(metric, ours, without, at_most=1.02))
    write_report("miss_overhead", found, " ".join(["python", "bench/miss_overhead.py", *sys.argv[1:]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
