"""TTFT by tier and decode speed: ours in each placement of the store against the bound and against the peers.

    python bench/tiers.py [--rounds N] [--peers NAME,…] [--prompt TOKENS] [--threads N]

For each peer, it and both of ours run side by side on one machine and are asked in turn, one at a time, with the same
prompts; a peer's engine is frozen while others are timed, since its threads go on spinning after an answer. The bound
(the phase's matrix products and attention alone, for a store hit with the raw read of its bytes) is timed in the same
rounds. Medians. Where a system answers a phase from another tier than it should, the bench fails
instead of reporting a number.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bounds import DECODE_CONTEXT, TOGETHER, Bounds
from client import Completion, make_prompt, step_seconds
from report import Result, compare, write_report
from systems import BLOCK_SIZE, PEERS, System, model_folder, running

VOCAB_SIZE = 49_152
OUTPUT_TOKENS = 8
DECODE_TOKENS = 48
DECODE_PROMPT = DECODE_CONTEXT - DECODE_TOKENS // 2
PAUSE_S = 0.5
"""Before each request: OpenMP threads of whoever was asked last spin for a while after their work."""

SETTLE_S = 3.0
"""Write-back to the store goes on after the answer: give it this long before anybody is asked again."""

SHORTFALL = 0.95
"""A tier served a phase if the server says that it provided this share of the prompt's full blocks."""

MAX_VS_PEER = {"cold": 1.0, "device": 0.9, "decode 1": None, "decode 16": None}
MAX_VS_PEER_STORE = {"ours-tcp": 0.9, "ours-shm": 0.7}
MAX_VS_BOUND = {
    "cold": 1.1,
    "device": 1.25,
    "store": 1.25,
    "store after restart": 1.25,
    "decode 1": 1.3,
    "decode 16": 1.3,
}


@dataclass(slots=True)
class Samples:
    """Seconds by (system or ``bound``, phase)."""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, system: str, phase: str, seconds: float) -> None:
        """Keep one measurement."""
        self.seconds[system, phase].append(seconds)
        print(f"  {system:<26} {phase:<20} {seconds * 1000:9.1f} ms", flush=True)

    def median(self, system: str, phase: str) -> float | None:
        """Median of a phase; None if it was not measured."""
        found = self.seconds.get((system, phase))
        return statistics.median(found) if found else None


def expect_cached(system: System, phase: str, prompt: list[int], answer: Completion, *, cached: bool) -> None:
    """Fail if the phase was not served as its name says."""
    full = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    if cached and answer.cached_tokens < SHORTFALL * full:
        raise RuntimeError(f"{system.name}: {phase}: only {answer.cached_tokens} of {full} tokens came from the cache")
    if not cached and answer.cached_tokens:
        raise RuntimeError(f"{system.name}: {phase}: {answer.cached_tokens} tokens came from the cache")


def ask(system: System, phase: str, prompt: list[int], samples: Samples, *, cached: bool) -> Completion:
    """Time one request; a peer has to be awake."""
    time.sleep(PAUSE_S)
    answer = system.client.complete(prompt, OUTPUT_TOKENS)
    expect_cached(system, phase, prompt, answer, cached=cached)
    samples.add(system.name, phase, answer.ttft_s)
    return answer


def one_round(systems: list[System], prompt: list[int], samples: Samples) -> None:
    """Cold, device and store hit of one prompt on every system; the answers of each must be equal."""
    texts: dict[str, set[str]] = defaultdict(set)
    for system in systems:
        with system.awake():
            texts[system.name].add(ask(system, "cold", prompt, samples, cached=False).text)
            time.sleep(SETTLE_S)
    for system in systems:
        with system.awake():
            texts[system.name].add(ask(system, "device", prompt, samples, cached=True).text)
    for system in systems:
        if not system.has_store:
            continue
        with system.awake():
            if system.ours:
                system.forget("device")
                texts[system.name].add(ask(system, "host", prompt, samples, cached=True).text)
            system.forget("device", "host")
            texts[system.name].add(ask(system, "store", prompt, samples, cached=True).text)
    for name, answers in texts.items():
        if len(answers) > 1:
            print(f"  {name}: answers differ by tier: {answers}", flush=True)


def decode(systems: list[System], prompt: list[int], seed: int, samples: Samples) -> None:
    """Seconds a step with one sequence of the long prompt running, and with sixteen short ones."""
    prompts = [make_prompt(seed + 1 + index, DECODE_PROMPT, VOCAB_SIZE) for index in range(TOGETHER)]
    for system in systems:
        with system.awake():
            time.sleep(PAUSE_S)
            samples.add(system.name, "decode 1", system.client.complete(prompt, DECODE_TOKENS).token_s)
            time.sleep(PAUSE_S)
            samples.add(system.name, "decode 16", step_seconds(system.client.together(prompts, DECODE_TOKENS)))


def after_restart(systems: list[System], prompts: list[list[int]], samples: Samples) -> None:
    """Restart every engine whose store lies outside it; what it computed before must still be found."""
    for system in systems:
        if not system.survives_restart:
            continue
        with system.awake():
            system.restart_engine()
            system.client.complete(make_prompt(10**6, 300, VOCAB_SIZE), 4)
            for prompt in prompts:
                ask(system, "store after restart", prompt, samples, cached=True)


def run_pair(peer: str, options: argparse.Namespace, seed: int, samples: Samples) -> None:
    """One peer and both of ours."""
    model = model_folder()
    with ExitStack() as stack:
        bounds = stack.enter_context(Bounds(model, options.prompt, options.threads))
        names = ["ours-shm", "ours-tcp", *([peer] if peer else [])]
        systems = [stack.enter_context(running(name, model, options.threads, print)) for name in names]
        for system in systems:  # page in, compile, connect; a store hit too
            warm = make_prompt(seed + 900, 600, VOCAB_SIZE)
            system.client.complete(warm, 4)
            time.sleep(SETTLE_S)
            system.forget("device", "host")
            system.client.complete(warm, 4)
            system.freeze()
        prompts = [make_prompt(seed + index, options.prompt, VOCAB_SIZE) for index in range(options.rounds)]
        for index, prompt in enumerate(prompts):
            print(f"{' and '.join(names)}: round {index + 1} of {options.rounds}", flush=True)
            # Take turns at being first: what a neighbour leaves in the processor's caches is not the same for all.
            systems = systems[1:] + systems[:1]
            one_round(systems, prompt, samples)
            decode(systems, prompt, seed + 1000 + 50 * index, samples)
            time.sleep(PAUSE_S)
            for phase, seconds in bounds.measure().items():
                samples.add("bound", phase, seconds)
        after_restart(systems, prompts[: min(3, len(prompts))], samples)


def results(samples: Samples, peers: list[str]) -> list[Result]:
    """Every number with what it is held against."""
    found: list[Result] = []
    for ours in ("ours-shm", "ours-tcp"):
        for phase, limit in MAX_VS_BOUND.items():
            value = samples.median(ours, phase)
            placement = f" {ours.removeprefix('ours-')}" if phase.startswith("store") else ""
            bound = samples.median("bound", phase.removesuffix(" after restart") + placement)
            if value is not None:
                found.append(compare(f"{ours}: {phase}, s, against the bound", value, bound, at_most=limit))
        if (host := samples.median(ours, "host")) is not None:
            found.append(
                compare(
                    f"{ours}: host hit, s, against the bound of a device hit", host, samples.median("bound", "device")
                )
            )
        for peer in peers:
            found += against_peer(samples, ours, peer)
    return found


def against_peer(samples: Samples, ours: str, peer: str) -> list[Result]:
    """Ours against one peer, phase by phase."""
    found: list[Result] = []
    limits = {**MAX_VS_PEER, "store": MAX_VS_PEER_STORE[ours], "store after restart": MAX_VS_PEER_STORE[ours]}
    for phase, limit in limits.items():
        value, other = samples.median(ours, phase), samples.median(peer, phase)
        if value is not None and other is not None:
            found.append(compare(f"{ours}: {phase}, s, against {peer}", value, other, at_most=limit))
    return found


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default=",".join(PEERS), help="comma separated; empty = none")
    parser.add_argument("--prompt", type=int, default=3007)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    peers = [name for name in options.peers.split(",") if name]
    samples = Samples()
    for number, peer in enumerate(peers or [""]):
        run_pair(peer, options, seed=100_000 * (number + 1), samples=samples)
    write_report("tiers", results(samples, peers), " ".join(["python", "bench/tiers.py", *sys.argv[1:]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
