"""Our model against its bound: the same matrix products and attention, timed alone, interleaved in one run.

Two bounds. "plain" is torch's `linear` and `scaled_dot_product_attention`, which is what any engine on torch starts
from; "packed" replaces `linear` by the packed products that our layers use, and is the one the aims are held against.
A phase is what one step computes: new rows per sequence, tokens in the cache before them, sequences.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.engine.messages import SamplingSpec, SequenceStep
from kvtier_worker.model.collective import SingleRank
from kvtier_worker.model.config import ModelConfig, load_config
from kvtier_worker.model.factory import build_runner, cache_shape, kv_layout, load_decoder, resolve_dtype, torch_dtype
from kvtier_worker.model.linear import Linear, LinearFactory, PlainLinear
from kvtier_worker.model.prepare import default_folder, prepare
from kvtier_worker.model.runner import PagedRunner
from report import Result, compare, write_report
from torch.nn import functional

CPU = torch.device("cpu")
BLOCK = 128
GREEDY = SamplingSpec(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
    logprobs=None,
)


@dataclass(frozen=True, slots=True)
class Phase:
    """One kind of step, and the aim for ours / bound."""

    name: str
    num_rows: int
    num_cached: int
    num_sequences: int
    at_most: float | None


PHASES = (
    Phase("cold, 3,000 tokens", 3000, 0, 1, 1.10),
    Phase("tail of 63 over 2,944", 63, 2944, 1, 1.25),
    Phase("decode, 1 running at 3,000", 1, 3000, 1, 1.30),
    Phase("decode, 16 running at 200", 1, 200, 16, 1.30),
    Phase("decode, 16 running at 1,000", 1, 1000, 16, 1.30),
)


@dataclass(frozen=True, slots=True)
class BoundTime:
    """Seconds of one pass over all layers."""

    products_s: float
    attention_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.products_s + self.attention_s


class Bound:
    """The matrix products and attention of one phase, with weights and cache of their real size.

    Args:
        config: of the model.
        phase: what to compute.
        dtype: of everything.
        packed: use the packed products where they exist.
        clock: seconds.
    """

    def __init__(
        self,
        config: ModelConfig,
        phase: Phase,
        dtype: torch.dtype = torch.float32,
        *,
        packed: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._phase = phase
        make: Callable[[torch.Tensor], Linear] = LinearFactory(CPU, dtype) if packed else PlainLinear
        hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
        queries, keys = config.num_heads * head, config.num_kv_heads * head
        shapes = ((queries + 2 * keys, hidden), (hidden, queries), (inner, hidden), (inner, hidden), (hidden, inner))
        self._layers = [[make(torch.rand(shape, dtype=dtype)) for shape in shapes] for _ in range(config.num_layers)]
        self._head = make(torch.rand(config.vocab_size, hidden, dtype=dtype))
        rows, sequences = phase.num_rows, phase.num_sequences
        self._inputs = [torch.rand(rows * sequences, shape[1], dtype=dtype) for shape in shapes]
        self._last = torch.rand(sequences, hidden, dtype=dtype)
        length = phase.num_cached + rows
        self._queries = torch.rand(sequences, config.num_heads, rows, head, dtype=dtype)
        shape = (config.num_layers, sequences, config.num_kv_heads, length, head)
        self._keys, self._values = torch.rand(shape, dtype=dtype), torch.rand(shape, dtype=dtype)

    @torch.inference_mode()
    def measure(self) -> BoundTime:
        """Time one pass."""
        start = self._clock()
        for layer in self._layers:
            for linear, x in zip(layer, self._inputs, strict=True):
                linear(x)
        self._head(self._last)
        middle = self._clock()
        # A tail is timed without its mask: less than 2 % of its scores are masked, and torch is slower with one.
        causal = self._phase.num_cached == 0 and self._phase.num_rows > 1
        for keys, values in zip(self._keys, self._values, strict=True):
            functional.scaled_dot_product_attention(self._queries, keys, values, is_causal=causal, enable_gqa=True)
        return BoundTime(middle - start, self._clock() - middle)


def measure_bound(
    config: ModelConfig, phase: Phase, dtype: torch.dtype = torch.float32, *, packed: bool = True, repeats: int = 3
) -> BoundTime:
    """Median bound of a phase, after one pass to warm up."""
    bound = Bound(config, phase, dtype, packed=packed)
    bound.measure()
    return median([bound.measure() for _ in range(repeats)])


def median(times: Sequence[BoundTime]) -> BoundTime:
    """The pass of median total."""
    return sorted(times, key=lambda passed: passed.total_s)[len(times) // 2]


class Ours:
    """Our runner on the same phase, dense block tables, greedy."""

    def __init__(self, settings: WorkerSettings, config: ModelConfig, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._config = config
        self._settings = settings
        self._decoder = load_decoder(settings, config, SingleRank(), CPU)

    def steps(self, phase: Phase) -> Callable[[], float]:
        """A function that runs one step of the phase and returns its seconds."""
        dtype = resolve_dtype(self._settings, self._config, CPU)
        blocks = -(-(phase.num_cached + phase.num_rows) // BLOCK)
        layout = kv_layout(self._config, 1, BLOCK, dtype)
        cache = torch.rand(cache_shape(layout, 1 + blocks * phase.num_sequences), dtype=torch_dtype(dtype))
        runner: PagedRunner = build_runner(self._decoder, layout, cache)
        sequences = [
            SequenceStep(
                request_id=str(index),
                token_ids=[(7 * token + index) % self._config.vocab_size for token in range(phase.num_rows)],
                start=phase.num_cached,
                block_table=list(range(1 + index * blocks, 1 + (index + 1) * blocks)),
                sample=True,
                sampling=GREEDY,
            )
            for index in range(phase.num_sequences)
        ]

        def step() -> float:
            start = self._clock()
            runner.forward(sequences, None)
            return self._clock() - start

        return step


def compare_phase(ours: Ours, config: ModelConfig, phase: Phase, args: argparse.Namespace) -> list[Result]:
    """Both bounds and ours, interleaved; medians."""
    dtype = getattr(torch, args.dtype)
    packed = Bound(config, phase, dtype, packed=True, clock=args.clock)
    plain = Bound(config, phase, dtype, packed=False, clock=args.clock)
    step = ours.steps(phase)
    packed.measure(), plain.measure(), step()
    repeats = args.repeats if phase.num_rows > 1 else args.repeats * 4
    rounds = [(packed.measure(), plain.measure(), step()) for _ in range(repeats)]
    ours_ms = 1e3 * statistics.median(passed for _, _, passed in rounds)
    best, common = median([one[0] for one in rounds]), median([one[1] for one in rounds])
    print(
        f"{phase.name}: products {1e3 * best.products_s:.1f} packed, {1e3 * common.products_s:.1f} plain, "
        f"attention {1e3 * best.attention_s:.1f} ms",
        flush=True,
    )
    return [
        compare(f"{phase.name}, packed bound (ms)", ours_ms, 1e3 * best.total_s, at_most=phase.at_most),
        compare(f"{phase.name}, plain bound (ms)", ours_ms, 1e3 * common.total_s, at_most=phase.at_most),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="model folder; default: the demo model, prepared when missing")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--layers", type=int, default=0, help="only so many layers, with random weights; for a quick look"
    )
    parser.add_argument("--only", default="", help="phases whose name has this")
    parser.add_argument(
        "--clock", default="wall", choices=("wall", "cpu"), help="cpu with --threads=1 is steady on a busy machine"
    )
    args = parser.parse_args()
    args.clock = time.perf_counter if args.clock == "wall" else time.process_time
    torch.set_num_threads(args.threads)
    folder = args.model or str(prepare(default_folder(os.environ)))
    config = load_config(folder)
    settings = WorkerSettings(model=folder, device="cpu", dtype=args.dtype, cpu_threads=args.threads)
    if args.layers:
        config = replace(config, num_layers=args.layers)
        settings = replace(settings, load_format="dummy")
    ours = Ours(settings, config, args.clock)
    results = [
        result for phase in PHASES if args.only in phase.name for result in compare_phase(ours, config, phase, args)
    ]
    write_report("model_bound", results, "python bench/model_bound.py " + " ".join(sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
