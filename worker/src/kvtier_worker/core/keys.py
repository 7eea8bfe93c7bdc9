"""Block hash chain, schema hash and store keys (K2-K6). Pure; the golden vectors are in the unit tests.

The chain is XXH3-128 over little-endian int32 token ids, every block after the first prefixed by the digest of its
parent. Digest bytes are the native ``{low64, high64}`` pair, i.e. the reverse of the canonical big-endian digest.
Store keys are text: the two digests are hex, the free-form parts carry their byte length in front, so a ``:`` inside
a model id cannot collide with another key.
"""

from __future__ import annotations

import posixpath
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import BlockHash, BlockType, Rank
from kvtier_worker.core.layout import DomainLayout

KEY_NAMESPACE = "xllm-kv-v3"
DEFAULT_HASH_SEED = 1024
TARGET_KEY_COMPONENT = "main"


def digest128(data: bytes, seed: int = DEFAULT_HASH_SEED) -> bytes:
    """XXH3-128 of ``data`` as 16 bytes ``{low64, high64}``, both little endian."""
    return xxhash.xxh3_128_digest(data, seed)[::-1]


def _token_bytes(tokens: Sequence[int]) -> bytes:
    packed = array("i", tokens)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()


class HashChain:
    """Hashes of the full blocks of a growing token sequence, computed lazily and once.

    Args:
        block_size: tokens in a block.
        seed: ``--xxh3_128bits_seed``.
        extra_key: bytes mixed into every block (tenant salt, LoRA id); empty = plain text chain.
    """

    __slots__ = ("_block_size", "_extra_key", "_hashes", "_seed")

    def __init__(self, block_size: int, seed: int = DEFAULT_HASH_SEED, extra_key: bytes = b"") -> None:
        self._block_size = block_size
        self._seed = seed
        self._extra_key = extra_key
        self._hashes: list[BlockHash] = []

    def extend(self, tokens: Sequence[int], num_blocks: int) -> Sequence[BlockHash]:
        """Return the hashes of the first ``num_blocks`` full blocks of ``tokens``, computing what is new.

        ``tokens`` must start with the tokens of every earlier call. Only full blocks have a hash.

        Raises:
            ValueError: ``tokens`` are fewer than that.
            OverflowError: a token id does not fit 32 bits.
        """
        size = self._block_size
        if num_blocks * size > len(tokens):
            msg = f"{num_blocks} blocks of {size} tokens asked of {len(tokens)} tokens"
            raise ValueError(msg)
        first = len(self._hashes)
        if num_blocks > first:
            data = _token_bytes(tokens[first * size : num_blocks * size])
            step = len(data) // (num_blocks - first)
            parent = self._hashes[-1] if first else b""
            for start in range(0, len(data), step):
                parent = self._digest(parent + data[start : start + step])
                self._hashes.append(BlockHash(parent))
        return self._hashes[:num_blocks]

    def _digest(self, data: bytes) -> bytes:
        digest = digest128(data, self._seed)
        return digest128(digest + self._extra_key, self._seed) if self._extra_key else digest


def schema_string(domain: DomainLayout, *, tp_size: int, mla: bool = False) -> str:
    """The text whose digest is the schema hash (K5): roles, dtypes and shapes of one block, never the host's size.

    Each tensor's shape is ``layers x per-block dims``, as in a host tensor ``[host_blocks, layers, …]`` less its first
    dimension.
    """
    parts = ["parallel=mla" if mla else f"tp={tp_size}"]
    for block_type in sorted(domain.objects):
        layout = domain.objects[block_type]
        text = f"|type={int(block_type)}"
        for tensor in sorted(layout.tensors, key=lambda spec: spec.role):
            dims = "".join(f"{dim}x" for dim in (layout.num_layers, *tensor.shape))
            text += f",role={int(tensor.role)},dtype={int(tensor.dtype)},shape={dims}"
        parts.append(text)
    return "".join(parts)


def schema_hash(domain: DomainLayout, *, tp_size: int, mla: bool = False, seed: int = DEFAULT_HASH_SEED) -> bytes:
    """16-byte digest of `schema_string`."""
    return digest128(schema_string(domain, tp_size=tp_size, mla=mla).encode(), seed)


def _prefixed(text: str) -> str:
    return f"{len(text.encode())}:{text}"


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Builds the store keys of one domain on one rank (K3).

    Attributes:
        model_id: the target model's namespace, also for draft domains (K4).
        key_component: `DomainLayout.key_component`.
        schema: `schema_hash` of the domain.
        tp_size: number of tensor-parallel ranks.
        tp_rank: this rank.
        mla: latent caches are replicated: one object for all ranks (K9).
    """

    model_id: str
    key_component: str
    schema: bytes
    tp_size: int
    tp_rank: Rank
    mla: bool = False

    def key(self, block_type: BlockType, block_hash: BlockHash) -> str:
        """The store key of one object."""
        return self.prefix(block_type) + block_hash.hex()

    def prefix(self, block_type: BlockType) -> str:
        """Everything of the key before the block hash."""
        head = f"{KEY_NAMESPACE}:{_prefixed(self.model_id)}:{_prefixed(self.key_component)}:"
        parallel = f"mla:{int(block_type)}:" if self.mla else f"{self.tp_size}:{int(block_type)}:{self.tp_rank}:"
        return f"{head}{parallel}{self.schema.hex()}:"


def draft_key_component(algorithm: str, draft_model: str, seed: int = DEFAULT_HASH_SEED) -> str:
    """Key component of a draft domain (K2); ``draft_model`` empty means embedded in the target's checkpoint.

    The name is the last component of the path as given, the digest is over the canonical path, so a symlink and its
    target share the digest. The only function here that looks at the file system, and only to follow symlinks.
    """
    algorithm = algorithm.lower()
    if not draft_model:
        return f"spec_draft::{algorithm}::embedded"
    lexical = posixpath.normpath(draft_model)
    name = posixpath.basename(lexical) or "checkpoint"
    try:
        canonical = Path(draft_model).resolve().as_posix()
    except (OSError, RuntimeError):  # a loop of symlinks
        canonical = lexical
    return f"spec_draft::{algorithm}::{name}::{digest128(canonical.encode(), seed).hex()}"


def default_model_id(model_path: str) -> str:
    """``--model_id`` when it is not given: the last component of the model path (K4).

    ``.`` means the working directory by its name: two models started as ``.`` must not share a key space.
    """
    return posixpath.basename(posixpath.abspath(model_path))


def effective_model_id(settings: WorkerSettings) -> str:
    """The namespace of store keys, and the model's name in the API and the log: as given, else the default."""
    return settings.model_id or default_model_id(settings.model)
