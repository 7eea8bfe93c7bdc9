"""What the ranks of one model say to each other during a forward: sums and the gathering of logits.

A port of its own, so that one rank pays nothing and tests can run ranks as threads.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
from torch import distributed


class Collective(Protocol):
    """Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by the sum over all ranks, in place. Same shape everywhere."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Concatenate along the last dimension on rank 0; None on other ranks. Same shape everywhere."""


class SingleRank:
    """The collective of a model that is not cut."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Nothing to add."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor itself."""
        return tensor


class TorchCollective:
    """Collectives of torch.distributed: gloo on CPU, nccl on CUDA."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See `Collective`."""
        distributed.all_reduce(tensor, group=self._group)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `Collective`."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        distributed.gather(tensor.contiguous(), parts, group=self._group, group_dst=0)
        return None if parts is None else torch.cat(parts, dim=-1)


def join_ranks(rank: int, size: int, address: str, device: torch.device, timeout_s: float = 600.0) -> Collective:
    """Meet the other ranks at ``address`` (``host:port``, rank 0 listens there). One rank alone meets nobody.

    Raises:
        RuntimeError: the ranks did not all come within ``timeout_s`` (torch's own error).
    """
    if size == 1:
        return SingleRank()
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    group = distributed.group.WORLD
    assert group is not None
    return TorchCollective(group)


def leave_ranks() -> None:
    """Undo `join_ranks`; harmless when nobody was met."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
