"""Which part of each weight belongs to one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_worker.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of ``size``: attention is cut by heads, the MLP by columns, the vocabulary by rows.

    Intermediate size and vocabulary need not divide: ranks then differ by one column, and the last vocabulary part
    is short.
    """

    config: ModelConfig
    rank: int = 0
    size: int = 1

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self.config.num_heads // self.size

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of this rank."""
        return self.config.num_kv_heads // self.size

    def head_rows(self, num_heads: int) -> slice:
        """This rank's rows of a projection onto ``num_heads`` heads (of the whole model)."""
        width = num_heads // self.size * self.config.head_dim
        return slice(self.rank * width, (self.rank + 1) * width)

    @property
    def mlp(self) -> slice:
        """This rank's columns of the MLP."""
        total = self.config.intermediate_size
        return slice(self.rank * total // self.size, (self.rank + 1) * total // self.size)

    @property
    def vocab_per_rank(self) -> int:
        """Rows of the vocabulary matrices on every rank, padding included."""
        return -(-self.config.vocab_size // self.size)

    @property
    def vocab(self) -> slice:
        """This rank's rows of the vocabulary; may be short or empty on the last ranks."""
        total, width = self.config.vocab_size, self.vocab_per_rank
        return slice(min(self.rank * width, total), min((self.rank + 1) * width, total))
