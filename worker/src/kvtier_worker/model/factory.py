"""From settings to a running model: what the worker process calls.

config = load_config(settings.model)
device, dtype = resolve_device(settings), resolve_dtype(settings, config, device)
collective = join_ranks(rank, settings.tp_size, address, device)
decoder = load_decoder(settings, config, collective)         # weights are resident from here on
layout = kv_layout(config, settings.tp_size, settings.block_size, cache_dtype(settings, config, device))
cache = ...                                                  # of shape cache_shape(layout, num_blocks)
runner = build_runner(decoder, layout, cache)
"""

from __future__ import annotations

import torch

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import BlockType, CacheRole, DType, TensorRole
from kvtier_worker.core.keys import TARGET_KEY_COMPONENT
from kvtier_worker.core.layout import DomainLayout, ObjectLayout, TensorSpec
from kvtier_worker.errors import ConfigError
from kvtier_worker.model.collective import Collective, join_ranks, leave_ranks
from kvtier_worker.model.config import ModelConfig, load_config
from kvtier_worker.model.decoder import Decoder
from kvtier_worker.model.loader import Loader
from kvtier_worker.model.runner import PagedRunner
from kvtier_worker.model.shard import Shard
from kvtier_worker.model.weights import DummySource, SafetensorsSource, TensorSource

__all__ = [
    "build_runner",
    "cache_dtype",
    "cache_shape",
    "join_ranks",
    "kv_layout",
    "leave_ranks",
    "load_config",
    "load_decoder",
    "resolve_device",
    "resolve_dtype",
    "torch_dtype",
]

_TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
_NAMED = {"float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of one of our element types."""
    return _TORCH[dtype]


def resolve_device(settings: WorkerSettings, rank: int = 0) -> torch.device:
    """The device of ``rank``: with CUDA, device number ``rank``.

    Raises:
        ConfigError: ``--device=cuda`` without (enough) CUDA devices.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if settings.device == "cpu" or (settings.device == "auto" and available == 0):
        return torch.device("cpu")
    if rank >= available:
        asked = f"--device is {settings.device!r} and --tp_size {settings.tp_size}"
        raise ConfigError([f"{asked}, but there are {available} CUDA devices; lower --tp_size or use --device=cpu"])
    return torch.device("cuda", rank)


def resolve_dtype(settings: WorkerSettings, config: ModelConfig, device: torch.device) -> DType:
    """Element type of weights: ``--dtype``; auto is float32 on CPU, else the checkpoint's (bfloat16 for float16)."""
    if settings.dtype in _NAMED:
        return _NAMED[settings.dtype]
    if device.type == "cpu":
        return DType.FLOAT32
    return DType.BFLOAT16 if config.checkpoint_dtype is DType.FLOAT16 else config.checkpoint_dtype


def cache_dtype(settings: WorkerSettings, config: ModelConfig, device: torch.device) -> DType:
    """Element type of the cache: ``--kv_cache_dtype``; auto is that of the weights."""
    return _NAMED.get(settings.kv_cache_dtype) or resolve_dtype(settings, config, device)


def kv_layout(config: ModelConfig, tp_size: int, block_size: int, dtype: DType) -> DomainLayout:
    """Layout of one rank's blocks of the target domain. Heads come before tokens; `attention.py` says why.

    Raises:
        ConfigError: ``tp_size`` does not divide the heads.
    """
    if violations := config.violations(tp_size=tp_size, max_model_len=1):
        raise ConfigError(violations)
    shape = (config.num_kv_heads // tp_size, block_size, config.head_dim)
    tensors = tuple(TensorSpec(role, dtype, shape) for role in (TensorRole.KEY, TensorRole.VALUE))
    objects = {BlockType.KV: ObjectLayout(config.num_layers, tensors)}
    return DomainLayout(CacheRole.TARGET, TARGET_KEY_COMPONENT, objects)


def cache_shape(layout: DomainLayout, num_blocks: int) -> tuple[int, ...]:
    """Shape of the device cache that `build_runner` takes: ``[layers, 2, blocks, kv_heads, block_size, head_dim]``."""
    objects = layout.objects[BlockType.KV]
    return (objects.num_layers, len(objects.tensors), num_blocks, *objects.tensors[0].shape)


def load_decoder(
    settings: WorkerSettings, config: ModelConfig, collective: Collective, device: torch.device | None = None
) -> Decoder:
    """Load this rank's weights and set the process's number of compute threads.

    Args:
        settings: of the engine.
        config: of ``settings.model``.
        collective: the other ranks.
        device: default `resolve_device`.

    Raises:
        ConfigError: settings that do not fit the model, or a checkpoint that does not fit its config.
    """
    if violations := config.violations(tp_size=collective.size, max_model_len=settings.max_model_len):
        raise ConfigError(violations)
    device = device or resolve_device(settings, collective.rank)
    if settings.cpu_threads > 0:
        torch.set_num_threads(settings.cpu_threads)
    source: TensorSource = (
        DummySource(settings.seed) if settings.load_format == "dummy" else SafetensorsSource(settings.model)
    )
    shard = Shard(config, collective.rank, collective.size)
    dtype = torch_dtype(resolve_dtype(settings, config, device))
    with torch.inference_mode():
        weights = Loader(shard, source, device, dtype).load()
        return Decoder(shard, weights, collective, device)


def build_runner(decoder: Decoder, layout: DomainLayout, cache: torch.Tensor) -> PagedRunner:
    """Bind a loaded model to its device cache (see `PagedRunner`)."""
    return PagedRunner(decoder, layout, cache)
