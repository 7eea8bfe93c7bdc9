"""What a step costs besides the model: plan, dispatch, commit and delivery, with workers that answer at once.

Every sequence decodes; one step is one turn of the engine thread, messages encoded as for real workers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import RequestId
from kvtier_worker.core.sampling import SamplingParams
from kvtier_worker.engine.frontend import EngineRequest, RequestOutput
from kvtier_worker.engine.loop import EngineLoop
from kvtier_worker.engine.messages import (
    PROTOCOL_VERSION,
    Forward,
    ForwardDone,
    FromWorker,
    TokenOutput,
    ToWorker,
    WorkerReady,
)
from kvtier_worker.engine.wire import encode
from report import Result, compare, write_report

BLOCK_SIZE = 128
PROMPT_TOKENS = 1000
TARGET_MS = 1.0


class NullWorkerGroup:
    """One rank that computes nothing, and answers before it is asked again."""

    def __init__(self, num_device_blocks: int) -> None:
        self._num_blocks = num_device_blocks
        self._answers: list[FromWorker] = []

    @property
    def ready(self) -> Sequence[WorkerReady]:
        return [WorkerReady(PROTOCOL_VERSION, 0, 0, self._num_blocks, 0, 1, 50_000, 1 << 20, [], 0)]

    def send(self, message: ToWorker) -> None:
        encode(message)
        if isinstance(message, Forward):
            outputs = [TokenOutput(step.request_id, 7) for step in message.sequences if step.sample]
            self._answers.append(ForwardDone(0, message.batch_id, outputs, 0.0, 0.0))

    def poll(self, timeout_s: float) -> Sequence[FromWorker]:
        del timeout_s
        answers, self._answers = self._answers, []
        return answers

    def wake(self) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass


def step_ms(num_running: int, num_steps: int) -> tuple[float, float, float]:
    """Median wall, median processor and 99th percentile wall time of a decoding step, milliseconds."""
    blocks = num_running * ((PROMPT_TOKENS + num_steps) // BLOCK_SIZE + 3) + 1
    settings = WorkerSettings(model="null", block_size=BLOCK_SIZE, max_seqs_per_batch=256, max_concurrent_requests=256)
    engine = EngineLoop(settings, NullWorkerGroup(blocks))
    received: list[RequestOutput] = []
    for number in range(num_running):
        params = SamplingParams(max_tokens=num_steps * 2, temperature=0.0)
        prompt = tuple(range(number, number + PROMPT_TOKENS))
        engine.submit(EngineRequest(RequestId(f"request-{number}"), prompt, params), received.append)
    while len(received) < num_running:  # until all of them decode in one step
        received.clear()
        engine.turn()
    times, cpu_times = [], []
    for _ in range(num_steps):
        received.clear()
        start, cpu_start = time.perf_counter(), time.thread_time()
        engine.turn()
        times.append((time.perf_counter() - start) * 1000)
        cpu_times.append((time.thread_time() - cpu_start) * 1000)
        if len(received) != num_running:
            msg = f"{len(received)} tokens of {num_running} in a step"
            raise AssertionError(msg)
    return statistics.median(times), statistics.median(cpu_times), statistics.quantiles(times, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    results: list[Result] = []
    for num_running in (1, 4, 16, 64, 128, 256):
        median, cpu, worst = step_ms(num_running, steps)
        results.append(compare(f"step ms, {num_running} running, median", median, at_most=TARGET_MS))
        results.append(compare(f"step ms, {num_running} running, median of processor time", cpu))
        results.append(compare(f"step ms, {num_running} running, p99", worst))
    write_report("step_overhead", results, "python bench/step_overhead.py")


if __name__ == "__main__":
    main()
