"""Block hashes, schema hashes and store keys: golden vectors, and the properties that keep key spaces apart."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import BlockHash, BlockType, CacheRole, DType, Rank, TensorRole
from kvtier_worker.core.keys import (
    HashChain,
    KeySpace,
    default_model_id,
    digest128,
    draft_key_component,
    effective_model_id,
    schema_hash,
    schema_string,
)
from kvtier_worker.core.layout import DomainLayout, ObjectLayout, TensorSpec

HASH = BlockHash(bytes(range(16)))
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=60)


def domain(
    *, layers: int = 4, block_size: int = 128, heads: int = 8, dim: int = 128, dtype: DType = DType.BFLOAT16
) -> DomainLayout:
    shape = (block_size, heads, dim)
    tensors = (TensorSpec(TensorRole.KEY, dtype, shape), TensorSpec(TensorRole.VALUE, dtype, shape))
    return DomainLayout(CacheRole.TARGET, "main", {BlockType.KV: ObjectLayout(layers, tensors)})


def space(**changes: Any) -> KeySpace:
    base = KeySpace("model", "main", schema_hash(domain(), tp_size=2), tp_size=2, tp_rank=Rank(0))
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("block_size", "tokens", "expected"),
    [
        (4, range(1, 9), ["b0c6037e37a15e2de8d8689c759e965f", "94600a4a64fa896e3c6f4572bb0437f0"]),
        (128, range(256), ["a6c0e2fc92c32b1c1ccff29b710ca0d2", "f981264b143b2d5f81fd86ed5d58d2a1"]),
    ],
)
def test_hash_chain_gives_the_golden_vectors(block_size: int, tokens: range, expected: list[str]) -> None:
    assert [block.hex() for block in HashChain(block_size).extend(tokens, 2)] == expected


def test_schema_of_two_ranks_gives_the_golden_string_and_hash() -> None:
    assert (
        schema_string(domain(), tp_size=2)
        == "tp=2|type=0,role=0,dtype=15,shape=4x128x8x128x,role=1,dtype=15,shape=4x128x8x128x"
    )
    assert schema_hash(domain(), tp_size=2).hex() == "e087f57f084dc09a9d16081b5a786512"


def test_schema_lists_types_and_roles_in_the_order_of_their_numbers() -> None:
    window = ObjectLayout(2, (TensorSpec(TensorRole.SWA, DType.FLOAT16, (8, 4)),))
    index_first = ObjectLayout(
        1, (TensorSpec(TensorRole.INDEX, DType.INT8, (8,)), TensorSpec(TensorRole.KEY, DType.FLOAT32, (8, 2)))
    )
    mixed = DomainLayout(CacheRole.TARGET, "main", {BlockType.SWA: window, BlockType.KV: index_first})
    assert schema_string(mixed, tp_size=1, mla=True) == (
        "parallel=mla|type=0,role=0,dtype=6,shape=1x8x2x,role=2,dtype=1,shape=1x8x|type=1,role=14,dtype=5,shape=2x8x4x"
    )


@given(tokens=TOKENS, block_size=st.integers(1, 8), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_hashes_do_not_depend_on_how_the_sequence_grew(tokens: list[int], block_size: int, cuts: list[int]) -> None:
    full = len(tokens) // block_size
    grown = HashChain(block_size)
    for cut in sorted(cuts):
        blocks = min(cut, full)
        grown.extend(tokens[: blocks * block_size], blocks)
    assert grown.extend(tokens, full) == HashChain(block_size).extend(tokens, full)


@given(tokens=st.lists(st.integers(0, 99), min_size=8, max_size=40), where=st.integers(0, 39), block_size=st.just(4))
def test_a_changed_token_changes_its_block_and_all_behind_it(tokens: list[int], where: int, block_size: int) -> None:
    where %= len(tokens) // block_size * block_size
    changed = [*tokens[:where], tokens[where] + 1, *tokens[where + 1 :]]
    full = len(tokens) // block_size
    pairs = zip(HashChain(block_size).extend(tokens, full), HashChain(block_size).extend(changed, full), strict=True)
    assert [ours == theirs for ours, theirs in pairs] == [index < where // block_size for index in range(full)]


def test_equal_blocks_at_different_positions_have_different_hashes() -> None:
    assert len(set(HashChain(2).extend([7, 7] * 5, 5))) == 5


def test_seed_and_extra_key_each_open_another_chain() -> None:
    tokens = list(range(8))
    chains = [HashChain(4), HashChain(4, seed=1), HashChain(4, extra_key=b"tenant"), HashChain(4, extra_key=b"other")]
    first, second = zip(*(chain.extend(tokens, 2) for chain in chains), strict=True)
    assert len(set(first)) == len(set(second)) == 4


def test_a_partial_block_has_no_hash() -> None:
    with pytest.raises(ValueError, match="2 blocks of 4 tokens asked of 7"):
        HashChain(4).extend(range(7), 2)


def test_the_returned_hashes_are_the_callers_own() -> None:
    chain = HashChain(2)
    handed_out = list(chain.extend([1, 2, 3, 4], 2))
    returned = chain.extend([1, 2, 3, 4], 2)
    assert isinstance(returned, list)
    returned.clear()
    assert chain.extend([1, 2, 3, 4], 2) == handed_out


def test_a_token_beyond_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        HashChain(1).extend([2**31], 1)


def test_digest_bytes_are_the_reverse_of_the_canonical_digest() -> None:
    assert digest128(b"kvtier", 7) == xxhash.xxh3_128_digest(b"kvtier", 7)[::-1]
    low, high = struct.unpack("<QQ", digest128(b"kvtier", 7))
    assert high << 64 | low == xxhash.xxh3_128_intdigest(b"kvtier", 7)


def test_key_of_a_rank_names_everything_in_order() -> None:
    schema = bytes(16)
    key = KeySpace("a:b", "main", schema, tp_size=4, tp_rank=Rank(3)).key(BlockType.KV, HASH)
    assert key == f"xllm-kv-v3:3:a:b:4:main:4:0:3:{'00' * 16}:000102030405060708090a0b0c0d0e0f"


def test_key_under_mla_is_one_for_all_ranks_and_sizes() -> None:
    keys = {
        space(mla=True, tp_size=size, tp_rank=Rank(rank), schema=schema_hash(domain(), tp_size=size, mla=True)).key(
            BlockType.KV, HASH
        )
        for size in (1, 8)
        for rank in range(size)
    }
    assert len(keys) == 1
    assert ":mla:0:" in keys.pop()


def test_lengths_in_keys_count_bytes_and_not_characters() -> None:
    assert KeySpace("é", "main", bytes(16), 1, Rank(0)).prefix(BlockType.KV).startswith("xllm-kv-v3:2:é:4:main:")


TEXT = st.text(alphabet=":0123456789amlin-v/é", max_size=12)


@given(
    one=st.tuples(TEXT, TEXT, st.integers(1, 12), st.integers(0, 11), st.sampled_from(BlockType), st.booleans()),
    two=st.tuples(TEXT, TEXT, st.integers(1, 12), st.integers(0, 11), st.sampled_from(BlockType), st.booleans()),
)
def test_different_identities_never_share_a_key(
    one: tuple[str, str, int, int, BlockType, bool], two: tuple[str, str, int, int, BlockType, bool]
) -> None:
    def key(identity: tuple[str, str, int, int, BlockType, bool]) -> str:
        model, component, size, rank, block_type, mla = identity
        return KeySpace(model, component, bytes(16), size, Rank(rank), mla).key(block_type, HASH)

    def same(identity: tuple[str, str, int, int, BlockType, bool]) -> tuple[object, ...]:
        model, component, size, rank, block_type, mla = identity
        return (model, component, block_type, mla) if mla else (model, component, block_type, mla, size, rank)

    assert (key(one) == key(two)) == (same(one) == same(two))


@pytest.mark.parametrize(
    "other",
    [
        domain(layers=5),
        domain(block_size=64),
        domain(heads=4),
        domain(dim=64),
        domain(dtype=DType.FLOAT16),
    ],
    ids=["layers", "block size", "heads", "head dim", "dtype"],
)
def test_another_layout_is_another_key_space(other: DomainLayout) -> None:
    assert schema_hash(other, tp_size=2) != schema_hash(domain(), tp_size=2)


def test_tensor_parallel_size_and_seed_are_other_key_spaces() -> None:
    hashes = {
        schema_hash(domain(), tp_size=2),
        schema_hash(domain(), tp_size=1),
        schema_hash(domain(), tp_size=2, mla=True),
        schema_hash(domain(), tp_size=2, seed=7),
    }
    assert len(hashes) == 4


def test_target_keys_do_not_depend_on_a_draft() -> None:
    draft = draft_key_component("MTP", "")
    assert space().key(BlockType.KV, HASH) != space(key_component=draft).key(BlockType.KV, HASH)
    assert space(model_id="b", key_component=draft).key(BlockType.KV, HASH) != space(key_component=draft).key(
        BlockType.KV, HASH
    )


def test_draft_inside_the_checkpoint_is_called_embedded() -> None:
    assert draft_key_component("MTP", "") == "spec_draft::mtp::embedded"


def test_separate_draft_carries_algorithm_name_and_digest_of_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "draft-7b"
    folder.mkdir()
    expected = digest128(str(folder.resolve()).encode()).hex()
    assert draft_key_component("Eagle3", f"{folder}/") == f"spec_draft::eagle3::draft-7b::{expected}"
    assert draft_key_component("Eagle3", f"{tmp_path}/x/../draft-7b") == f"spec_draft::eagle3::draft-7b::{expected}"


def test_symlink_and_target_share_the_digest_of_a_draft(tmp_path: Path) -> None:
    (tmp_path / "v1" / "draft").mkdir(parents=True)
    (tmp_path / "current").symlink_to(tmp_path / "v1")
    direct = draft_key_component("mtp", str(tmp_path / "v1" / "draft"))
    linked = draft_key_component("mtp", str(tmp_path / "current" / "draft"))
    renamed = tmp_path / "latest"
    renamed.symlink_to(tmp_path / "v1" / "draft")
    assert linked == direct
    assert draft_key_component("mtp", str(renamed)).split("::")[3] == direct.split("::")[3]


def test_a_loop_of_symlinks_still_has_a_key(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert draft_key_component("mtp", str(tmp_path / "a")).startswith("spec_draft::mtp::a::")


def test_the_root_folder_as_draft_is_called_checkpoint() -> None:
    assert draft_key_component("mtp", "/").startswith("spec_draft::mtp::checkpoint::")


def test_model_id_defaults_to_the_last_component_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_model_id("/models/SmolLM2-135M/") == "SmolLM2-135M"
    folder = tmp_path / "qwen"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert default_model_id(".") == "qwen"


def test_a_given_model_id_wins_over_the_folders_name() -> None:
    assert effective_model_id(WorkerSettings(model="/models/qwen/", model_id="qwen-v2")) == "qwen-v2"
    assert effective_model_id(WorkerSettings(model="/models/qwen/")) == "qwen"
