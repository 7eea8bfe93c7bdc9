"""Where weights come from: safetensors of a model folder, or a seed. Reads only the slice that is asked for.

Every read opens its file anew: pages of a memory-mapped file count as resident until the mapping goes, and a model
must not take its weights twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from kvtier_worker.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
EVERYTHING = slice(None)
DUMMY_SCALE = 0.05


class TensorSource(Protocol):
    """Named tensors of a checkpoint."""

    def violations(self, expected: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
        """What keeps this source from having every tensor of ``expected`` (name to shape); empty = it has them."""

    def read(
        self, name: str, shape: tuple[int, ...], rows: slice = EVERYTHING, columns: slice = EVERYTHING
    ) -> torch.Tensor:
        """The part ``[rows, columns]`` of tensor ``name``, which is of ``shape``; vectors have rows only.

        In CPU memory of its own, in the checkpoint's dtype. The name must have passed `violations`.
        """


class SafetensorsSource:
    """The ``*.safetensors`` of a folder: one file, or shards with an index.

    Raises:
        ConfigError: no such files, or a damaged one.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._files = self._index()

    def _index(self) -> Mapping[str, Path]:
        index = self._folder / INDEX_FILE
        if index.is_file():
            try:
                names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (OSError, ValueError, KeyError) as error:
                raise ConfigError([f"{index} is not an index of safetensors: {error!r}"]) from error
            missing = sorted({file for file in names.values() if not (self._folder / file).is_file()})
            if missing:
                raise ConfigError([f"{index} names files that are not there: {', '.join(missing)}"])
            return {name: self._folder / file for name, file in names.items()}
        found: dict[str, Path] = {}
        for path in sorted(self._folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    found.update(dict.fromkeys(file.keys(), path))
            except (OSError, SafetensorError) as error:
                raise ConfigError([f"{path} cannot be read: {error}"]) from error
        if not found:
            raise ConfigError([f"{self._folder} has no *.safetensors; convert the weights or use --load_format=dummy"])
        return found

    def violations(self, expected: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
        """See `TensorSource`."""
        found: list[str] = []
        for path in sorted({self._files[name] for name in expected if name in self._files}):
            with safe_open(path, framework="pt") as file:
                for name, shape in expected.items():
                    if self._files.get(name) != path:
                        continue
                    actual = tuple(file.get_slice(name).get_shape())
                    if actual != shape:
                        found.append(f"{path}: tensor {name} has shape {actual}, but config.json asks for {shape}")
        found.extend(
            f"{self._folder}: tensor {name} is missing from the checkpoint"
            for name in expected
            if name not in self._files
        )
        return tuple(found)

    def read(
        self, name: str, shape: tuple[int, ...], rows: slice = EVERYTHING, columns: slice = EVERYTHING
    ) -> torch.Tensor:
        """See `TensorSource`."""
        with safe_open(self._files[name], framework="pt") as file:
            part = file.get_slice(name)
            tensor: torch.Tensor = part[rows] if len(shape) == 1 else part[rows, columns]
            return tensor.clone()


class DummySource:
    """Random weights that depend on seed, name and shape only, so every cut over ranks belongs to one model.

    Matrices are normal with a deviation that keeps activations of order one; vectors are near one (norms) or small
    (biases).
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def violations(self, expected: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
        """Nothing: it has whatever is asked for."""
        del expected
        return ()

    def read(
        self, name: str, shape: tuple[int, ...], rows: slice = EVERYTHING, columns: slice = EVERYTHING
    ) -> torch.Tensor:
        """See `TensorSource`."""
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode(), self._seed) >> 1)
        whole = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            whole = whole.mul_(DUMMY_SCALE) if name.endswith(".bias") else whole.mul_(DUMMY_SCALE).add_(1.0)
            return whole[rows].clone()
        whole.mul_(1.0 / math.sqrt(shape[1]))
        return whole[rows, columns].clone()
