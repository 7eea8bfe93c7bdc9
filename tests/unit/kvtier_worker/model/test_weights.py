from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from kvtier_worker.errors import ConfigError
from kvtier_worker.model.config import ModelConfig
from kvtier_worker.model.loader import Loader, expected_tensors
from kvtier_worker.model.shard import Shard
from kvtier_worker.model.weights import INDEX_FILE, DummySource, SafetensorsSource
from safetensors.torch import save_file

CPU = torch.device("cpu")


def checkpoint(config: ModelConfig) -> dict[str, torch.Tensor]:
    source = DummySource(9)
    return {name: source.read(name, shape) for name, shape in expected_tensors(config).items()}


def test_a_dummy_slice_is_the_slice_of_the_dummy_whole() -> None:
    source = DummySource(1)
    whole = source.read("a.weight", (12, 10))
    part = source.read("a.weight", (12, 10), slice(3, 7), slice(2, 9))
    assert torch.equal(part, whole[3:7, 2:9])
    assert not torch.equal(whole, DummySource(2).read("a.weight", (12, 10)))
    assert not torch.equal(whole, source.read("b.weight", (12, 10)))


def test_a_slice_read_from_a_file_owns_no_more_than_itself(tmp_path: Path) -> None:
    save_file({"a": torch.arange(120.0).view(12, 10), "b": torch.arange(5.0)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    part = source.read("a", (12, 10), slice(3, 7), slice(2, 9))
    assert torch.equal(part, torch.arange(120.0).view(12, 10)[3:7, 2:9])
    assert part.untyped_storage().nbytes() == 4 * 7 * 4
    assert torch.equal(source.read("b", (5,), slice(1, 3)), torch.tensor([1.0, 2.0]))


def test_shards_are_found_through_their_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "y.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
    source = SafetensorsSource(tmp_path)
    assert source.violations({"a": (2,), "b": (3,)}) == ()
    assert torch.equal(source.read("b", (3,)), torch.zeros(3))


def test_an_index_that_names_missing_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ConfigError, match=r"gone\.safetensors"):
        SafetensorsSource(tmp_path)
    (tmp_path / INDEX_FILE).write_text("{}")
    with pytest.raises(ConfigError, match="not an index"):
        SafetensorsSource(tmp_path)


def test_a_folder_without_weights_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_format=dummy"):
        SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ConfigError, match="cannot be read"):
        SafetensorsSource(tmp_path)


def test_every_missing_or_misshapen_tensor_is_named(tmp_path: Path, tiny_config: ModelConfig) -> None:
    tensors = checkpoint(tiny_config)
    del tensors["model.norm.weight"]
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        Loader(Shard(tiny_config), SafetensorsSource(tmp_path), CPU, torch.float32)
    found = caught.value.violations
    assert len(found) == 3
    for part in ("model.norm.weight", "layers.1.mlp.up_proj.weight", "(3, 4)"):
        assert any(part in message for message in found), part


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_parts_of_all_ranks_are_the_whole(tiny_config: ModelConfig, size: int) -> None:
    shards = [Shard(tiny_config, rank, size) for rank in range(size)]
    for whole, parts in (
        (tiny_config.intermediate_size, [shard.mlp for shard in shards]),
        (tiny_config.vocab_size, [shard.vocab for shard in shards]),
    ):
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(whole))
    assert all(shard.vocab.stop - shard.vocab.start <= shard.vocab_per_rank for shard in shards)


def test_a_vocabulary_part_may_be_empty(tiny_config: ModelConfig) -> None:
    last = Shard(tiny_config, 99, 100)
    assert last.vocab.stop - last.vocab.start == 0
