"""One forward step as the model sees it: flat rows, where they are written, what they attend to. No tensors here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_worker.engine.messages import SequenceStep
from kvtier_worker.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What one sequence does in this step.

    Attributes:
        first_row: its first row in the batch.
        num_rows: its new tokens. More than one attend to each other causally, straight from the batch.
        num_context: tokens that every one of them reads from the cache: those before the step, and for a lone row
            itself too.
        block_table: device blocks from position 0.
    """

    first_row: int
    num_rows: int
    num_context: int
    block_table: tuple[int, ...]

    @property
    def stop_row(self) -> int:
        """Row after its last."""
        return self.first_row + self.num_rows


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """Rows from ``first_row`` on fill whole blocks ``[first_block, first_block + num_blocks)``."""

    first_row: int
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class RowWrite:
    """One row goes to one place of a block."""

    row: int
    block: int
    offset: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A whole step.

    Attributes:
        sequences: in batch order.
        block_writes: rows that fill whole blocks.
        row_writes: all other rows.
        sampling_rows: last rows of the sequences that sample.
        readers: the sequences that sample, each with its last row alone and everything in the cache; for the last
            layer, of which nothing else is needed.
    """

    block_size: int
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    sequences: tuple[SequencePlan, ...]
    block_writes: tuple[BlockWrite, ...]
    row_writes: tuple[RowWrite, ...]
    sampling_rows: tuple[int, ...]
    readers: tuple[SequencePlan, ...]


def _writes(
    step: SequenceStep, first_row: int, block_size: int, whole: list[BlockWrite], single: list[RowWrite]
) -> None:
    """Append the writes of one sequence; whole blocks that are neighbours become one."""
    done, total = 0, len(step.token_ids)
    while done < total:
        place, offset = divmod(step.start + done, block_size)
        block, row = step.block_table[place], first_row + done
        count = min(block_size - offset, total - done)
        if count < block_size:
            single.extend(RowWrite(row + i, block, offset + i) for i in range(count))
        else:
            last = whole[-1] if whole else None
            if last is not None and (
                last.first_row + last.num_blocks * block_size,
                last.first_block + last.num_blocks,
            ) == (
                row,
                block,
            ):
                whole[-1] = BlockWrite(last.first_row, last.first_block, last.num_blocks + 1)
            else:
                whole.append(BlockWrite(row, block, 1))
        done += count


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
    block_writes: list[BlockWrite] = []
    row_writes: list[RowWrite] = []
    sampling_rows: list[int] = []
    readers: list[SequencePlan] = []
    for step in steps:
        _check(step, block_size, num_blocks, vocab_size, num_positions)
        row, count, stop = len(token_ids), len(step.token_ids), step.start + len(step.token_ids)
        table = tuple(step.block_table)
        num_context = stop if count == 1 else step.start
        sequences.append(SequencePlan(row, count, num_context, table))
        token_ids.extend(step.token_ids)
        positions.extend(range(step.start, stop))
        _writes(step, row, block_size, block_writes, row_writes)
        if step.sample:
            readers.append(SequencePlan(len(sampling_rows), 1, stop, table))
            sampling_rows.append(row + count - 1)
    return StepPlan(
        block_size,
        tuple(token_ids),
        tuple(positions),
        tuple(sequences),
        tuple(block_writes),
        tuple(row_writes),
        tuple(sampling_rows),
        tuple(readers),
    )
