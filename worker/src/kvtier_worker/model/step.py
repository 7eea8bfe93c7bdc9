"""One forward step as the model sees it: flat rows, where they are written, what each sequence attends to. No tensors.

Keys carry their position, so an unmasked read may take the blocks of a context in any order. Blocks are therefore
sorted, and neighbours in memory become one run that is read without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier_worker.engine.messages import SequenceStep
from kvtier_worker.errors import ProtocolError

Run = tuple[int, int]
"""Half-open range of token slots in the cache; slot = block x block size + offset."""


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What one sequence does in this step.

    Attributes:
        first_row: its first row in the batch.
        num_rows: its new tokens. More than one attend to each other causally, straight from the batch.
        num_context: tokens that every one of them reads from the cache: those before the step, and for a lone row
            itself too.
        block_table: device blocks from position 0.
        context_runs: where the context is, in memory order.
    """

    first_row: int
    num_rows: int
    num_context: int
    block_table: tuple[int, ...]
    context_runs: tuple[Run, ...]

    @property
    def stop_row(self) -> int:
        """Row after its last."""
        return self.first_row + self.num_rows


@dataclass(frozen=True, slots=True)
class WriteRun:
    """Rows ``[first_row, first_row + count)`` go to slots ``[first_slot, first_slot + count)``."""

    first_row: int
    first_slot: int
    count: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A whole step.

    Attributes:
        sequences: in batch order.
        writes: every row once.
        sampling_rows: last rows of the sequences that sample.
        readers: the sequences that sample, each with its last row alone and everything in the cache; for the last
            layer, of which nothing else is needed.
    """

    block_size: int
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    sequences: tuple[SequencePlan, ...]
    writes: tuple[WriteRun, ...]
    sampling_rows: tuple[int, ...]
    readers: tuple[SequencePlan, ...]


def cache_runs(block_table: Sequence[int], num_tokens: int, block_size: int) -> tuple[Run, ...]:
    """Slot ranges of the first ``num_tokens`` positions, adjacent ones joined, in memory order."""
    full, rest = divmod(num_tokens, block_size)
    parts = [(block * block_size, (block + 1) * block_size) for block in block_table[:full]]
    if rest:
        first = block_table[full] * block_size
        parts.append((first, first + rest))
    runs: list[Run] = []
    for start, stop in sorted(parts):
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return tuple(runs)


def _writes(step: SequenceStep, first_row: int, block_size: int) -> Iterator[WriteRun]:
    done, total = 0, len(step.token_ids)
    while done < total:
        block, offset = divmod(step.start + done, block_size)
        count = min(block_size - offset, total - done)
        yield WriteRun(first_row + done, step.block_table[block] * block_size + offset, count)
        done += count


def _joined(writes: Iterator[WriteRun]) -> Iterator[WriteRun]:
    last: WriteRun | None = None
    for run in writes:
        if last is not None and last.first_slot + last.count == run.first_slot:
            last = WriteRun(last.first_row, last.first_slot, last.count + run.count)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def _check(step: SequenceStep, block_size: int, num_blocks: int, vocab_size: int, num_positions: int) -> None:
    stop = step.start + len(step.token_ids)
    if not step.token_ids or step.start < 0:
        raise ProtocolError(f"{step.request_id}: {len(step.token_ids)} tokens at {step.start}; need at least 1 at >= 0")
    if stop > len(step.block_table) * block_size:
        raise ProtocolError(
            f"{step.request_id}: tokens up to {stop} do not fit {len(step.block_table)} blocks of {block_size}"
        )
    if stop > num_positions:
        raise ProtocolError(f"{step.request_id}: position {stop - 1} is beyond the model's {num_positions} positions")
    if not 0 < min(step.block_table) <= max(step.block_table) < num_blocks:
        raise ProtocolError(f"{step.request_id}: block table {step.block_table} leaves blocks 1 to {num_blocks - 1}")
    if not 0 <= min(step.token_ids) <= max(step.token_ids) < vocab_size:
        raise ProtocolError(f"{step.request_id}: a token id is outside the vocabulary of {vocab_size}")


def plan_step(
    steps: Sequence[SequenceStep], *, block_size: int, num_blocks: int, vocab_size: int, num_positions: int
) -> StepPlan:
    """Lay the sequences of one step out in rows.

    Raises:
        ProtocolError: a sequence that the cache or the model cannot hold.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    sequences: list[SequencePlan] = []
    writes: list[WriteRun] = []
    sampling_rows: list[int] = []
    readers: list[SequencePlan] = []
    for step in steps:
        _check(step, block_size, num_blocks, vocab_size, num_positions)
        row, count, stop = len(token_ids), len(step.token_ids), step.start + len(step.token_ids)
        table = tuple(step.block_table)
        num_context = stop if count == 1 else step.start
        runs = cache_runs(table, num_context, block_size)
        sequences.append(SequencePlan(row, count, num_context, table, runs))
        token_ids.extend(step.token_ids)
        positions.extend(range(step.start, stop))
        writes.extend(_joined(_writes(step, row, block_size)))
        if step.sample:
            runs = cache_runs(table, stop, block_size)
            readers.append(SequencePlan(len(sampling_rows), 1, stop, table, runs))
            sampling_rows.append(row + count - 1)
    return StepPlan(
        block_size,
        tuple(token_ids),
        tuple(positions),
        tuple(sequences),
        tuple(writes),
        tuple(sampling_rows),
        tuple(readers),
    )
