"""The bound of each phase, timed in the same run: nothing can be faster without less arithmetic or fewer bytes.

Matrix products and attention alone (`model_bound.Bound`), and for a store hit also the raw ``batch_get_into`` of the
prompt's blocks over each placement of the store.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import torch
from kvtier_worker.core.ids import BlockType, DType
from kvtier_worker.model.config import load_config
from kvtier_worker.model.factory import kv_layout
from kvtier_worker.testing.mooncake import running_master, running_store_node
from model_bound import Bound, Phase
from store_g2h import Case, Place, fill, place
from systems import BLOCK_SIZE

DECODE_CONTEXT = 96
TOGETHER = 16


class Bounds:
    """Everything that is timed is built once; use as a context manager.

    Args:
        model: folder.
        prompt_tokens: length of the prompt of the TTFT phases.
        threads: compute threads.
    """

    def __init__(self, model: Path, prompt_tokens: int, threads: int) -> None:
        torch.set_num_threads(threads)
        config = load_config(model)
        blocks = (prompt_tokens - 1) // BLOCK_SIZE
        cached = blocks * BLOCK_SIZE
        self._phases = {
            "cold": Bound(config, Phase("cold", prompt_tokens, 0, 1, None)),
            "device": Bound(config, Phase("device", prompt_tokens - cached, cached, 1, None)),
            "decode 1": Bound(config, Phase("decode 1", 1, prompt_tokens, 1, None)),
            "decode 16": Bound(config, Phase("decode 16", 1, DECODE_CONTEXT, TOGETHER, None)),
        }
        layout = kv_layout(config, 1, BLOCK_SIZE, DType.FLOAT32)
        self._case = Case(layout.objects[BlockType.KV].object_bytes, blocks)
        self._stack = ExitStack()
        self._places: dict[str, Place] = {}

    def __enter__(self) -> Self:
        nbytes = self._case.nbytes * self._case.count
        master = self._stack.enter_context(running_master(lease_ttl_ms=600_000))
        node = self._stack.enter_context(running_store_node(master.address, segment="1GB", shm=True))
        for name, shm in (("tcp", ""), ("shm", node.shm_address)):
            self._places[name] = self._stack.enter_context(place(name, master.address, shm, nbytes))
            fill(self._places[name], self._case)
        for phase in self._phases.values():
            phase.measure()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self) -> Mapping[str, float]:
        """Seconds by phase: ``cold``, ``device``, ``decode 1``, ``decode 16``, ``store tcp``, ``store shm``."""
        found = {name: phase.measure().total_s for name, phase in self._phases.items()}
        reads = {name: self._raw_read(where) for name, where in self._places.items()}
        return found | {f"store {name}": found["device"] + seconds for name, seconds in reads.items()}

    def _raw_read(self, where: Place) -> float:
        count, nbytes = self._case.count, self._case.nbytes
        keys = [f"{where.name}/{self._case.name}/{index}" for index in range(count)]
        addresses = [where.address + index * nbytes for index in range(count)]
        with where.client.use() as raw:
            started = time.perf_counter()
            sizes = raw.batch_get_into(keys, addresses, [nbytes] * count)
            seconds = time.perf_counter() - started
        if list(sizes) != [nbytes] * count:
            raise RuntimeError(f"raw read over {where.name}: {sizes}")
        return seconds
