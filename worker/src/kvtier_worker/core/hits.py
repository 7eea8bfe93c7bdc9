"""What a prefetch found: a rank x block matrix, and the AND over ranks that decides what may be used (A2, A5).

Every rank reads its own objects and reports, batch by batch, which logical blocks are whole in its host memory. A
block is a hit only if it is one on every rank. The scheduler owns the matrix; workers only send messages.
"""

from __future__ import annotations

from kvtier_worker.core.ids import Rank
from kvtier_worker.core.prefix import run_length
from kvtier_worker.errors import IntegrityError, ProtocolError

_HIT = 1
_MISS = 2  # 0 = not reported


class HitMatrix:
    """Collects the reports of one prefetch job.

    Args:
        num_ranks: tensor-parallel ranks, at least 1.
        num_blocks: logical blocks the job asks for, at least 1.
    """

    __slots__ = ("_num_blocks", "_pending", "_rows")

    def __init__(self, num_ranks: int, num_blocks: int) -> None:
        if num_ranks < 1 or num_blocks < 1:
            msg = f"a hit matrix needs ranks and blocks, got {num_ranks} x {num_blocks}"
            raise ValueError(msg)
        self._num_blocks = num_blocks
        self._rows = [bytearray(num_blocks) for _ in range(num_ranks)]
        self._pending = set(range(num_ranks))

    def record(self, rank: Rank, offset: int, hits: bytes) -> bool:
        """Take one batch's report: one byte per block from ``offset`` on, 1 = whole on this rank.

        Returns:
            False if the rank is done or failed already: the report came too late and is ignored.

        Raises:
            ProtocolError: unknown rank, a range outside the job, a byte that is neither 0 nor 1, or a block reported
                twice. Nothing was recorded; the caller fails the rank.
        """
        row = self._row(rank)
        if rank not in self._pending:
            return False
        stop = offset + len(hits)
        if offset < 0 or not hits or stop > self._num_blocks:
            msg = f"rank {rank} reports blocks [{offset}, {stop}) of a prefetch of {self._num_blocks}"
            raise ProtocolError(msg)
        if hits.strip(b"\x00\x01"):
            msg = f"rank {rank} reports something else than hit and miss for blocks [{offset}, {stop})"
            raise ProtocolError(msg)
        if any(row[offset:stop]):
            msg = f"rank {rank} reports blocks of [{offset}, {stop}) twice"
            raise ProtocolError(msg)
        row[offset:stop] = bytes(_HIT if hit else _MISS for hit in hits)
        return True

    def mark_rank_done(self, rank: Rank) -> None:
        """``rank`` sends nothing more; what it did not report is a miss. Idempotent."""
        self._row(rank)
        self._pending.discard(rank)

    def mark_rank_failed(self, rank: Rank) -> None:
        """``rank`` cannot be trusted: all its blocks are misses, also after it was done. Idempotent."""
        row = self._row(rank)
        row[:] = bytes(self._num_blocks)
        self._pending.discard(rank)

    @property
    def num_blocks(self) -> int:
        """Logical blocks of the job."""
        return self._num_blocks

    @property
    def complete(self) -> bool:
        """Whether every rank is done or failed."""
        return not self._pending

    def merged(self) -> tuple[bool, ...]:
        """Hit per block: the AND over ranks.

        Raises:
            IntegrityError: asked before completion, when a rank may still be writing into the blocks.
        """
        if self._pending:
            msg = f"hits merged while ranks {sorted(self._pending)} are still at work"
            raise IntegrityError(msg)
        return self.agreed()

    def agreed(self) -> tuple[bool, ...]:
        """The hits that are certain by now: every rank reported them whole, so none writes into them any more."""
        return tuple(all(cell == _HIT for cell in column) for column in zip(*self._rows, strict=True))

    def usable_prefix(self) -> int:
        """Length of the run of hits from the first block on. Raises like `merged`."""
        return run_length(self.merged())

    def _row(self, rank: Rank) -> bytearray:
        if not 0 <= rank < len(self._rows):
            msg = f"rank {rank} of {len(self._rows)} reports on a prefetch"
            raise ProtocolError(msg)
        return self._rows[rank]
