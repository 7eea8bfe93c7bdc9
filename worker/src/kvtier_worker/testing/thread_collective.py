"""A collective between ranks that are threads of one process: same calls, same results, no network."""

from __future__ import annotations

import threading

import torch

from kvtier_worker.model.collective import Collective

TIMEOUT_S = 60.0
"""A rank that is alone in a collective for this long gets an exception instead of waiting for ever."""


class _Exchange:
    """What the ranks lay down for one another."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size)

    def collect(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order. Nobody may change its own until `leave`.

        Raises:
            threading.BrokenBarrierError: some rank did not come.
        """
        self.parts[rank] = part
        self.barrier.wait(TIMEOUT_S)
        return [tensor for tensor in self.parts if tensor is not None]

    def leave(self) -> None:
        """Wait until every rank has read what it needs."""
        self.barrier.wait(TIMEOUT_S)


class ThreadCollective:
    """One rank's end. See `Collective`."""

    def __init__(self, rank: int, size: int, exchange: _Exchange) -> None:
        self.rank = rank
        self.size = size
        self._exchange = exchange

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See `Collective`. The sum is taken in rank order, so every rank has the same bits."""
        parts = self._exchange.collect(self.rank, tensor)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        self._exchange.leave()
        tensor.copy_(total)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `Collective`."""
        parts = self._exchange.collect(self.rank, tensor)
        whole = torch.cat(parts, dim=-1) if self.rank == 0 else None
        self._exchange.leave()
        return whole


def thread_collectives(size: int) -> list[Collective]:
    """The ends of ``size`` ranks; each is to be used by a thread of its own."""
    exchange = _Exchange(size)
    return [ThreadCollective(rank, size, exchange) for rank in range(size)]
