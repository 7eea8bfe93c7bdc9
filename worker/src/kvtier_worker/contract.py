"""The contract of a worker pod: every flag of `kvtier engine`, once, with its default, unit and reason.

The operator renders a `WorkerSettings` with `to_argv`, the engine parses it with `from_argv`; property:
``from_argv(to_argv(s)) == s``. Parsing accepts ``--flag=value`` and ``--flag value``, refuses unknown flags with the
nearest known name and reports every violation at once. Pure: looks at no file, no environment, no machine; checks
that need those live in `settings.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class InstanceRole(StrEnum):
    """What an engine does for requests."""

    DEFAULT = "DEFAULT"
    PREFILL = "PREFILL"
    DECODE = "DECODE"


class FlagGroup(StrEnum):
    """Headings of ``kvtier engine --help``, in this order."""

    MODEL = "Model"
    SERVER = "Server"
    CACHE = "KV cache"
    STORE = "Global KV cache (host and store tiers)"
    SCHEDULER = "Scheduler"
    DISTRIBUTED = "Distributed"


def flag(default: Any, group: FlagGroup, text: str, *, choices: tuple[str, ...] = (), env: str = "") -> Any:
    """A dataclass field that is also a command-line flag."""
    metadata = {"group": group, "help": text, "choices": choices, "env": env}
    if isinstance(default, Mapping):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of one engine and its workers. Field names are the flags' names; `0` and empty mean "derive"."""

    # Model
    model: str = flag("", FlagGroup.MODEL, "Folder with config.json, tokenizer.json and *.safetensors (Hugging Face).")
    model_id: str = flag(
        "",
        FlagGroup.MODEL,
        "Namespace of store keys and name in the API; default: last component of --model. Weights are not in keys: change it with every change of weights.",
    )
    load_format: str = flag(
        "auto",
        FlagGroup.MODEL,
        "auto reads safetensors; dummy makes random weights from the config.",
        choices=("auto", "dummy"),
    )
    dtype: str = flag(
        "auto",
        FlagGroup.MODEL,
        "Weights and KV cache: auto takes the checkpoint's on CUDA and float32 on CPU.",
        choices=("auto", "float32", "bfloat16"),
    )
    device: str = flag("auto", FlagGroup.MODEL, "auto takes CUDA when there is one.", choices=("auto", "cpu", "cuda"))
    seed: int = flag(0, FlagGroup.MODEL, "Seed of dummy weights and of requests that bring none.")
    max_model_len: int = flag(0, FlagGroup.MODEL, "Tokens of prompt and output at most; 0 = the model's.")
    cpu_threads: int = flag(
        0, FlagGroup.MODEL, "Compute threads per worker on CPU; 0 = cores divided by ranks, at least 1."
    )

    # Server
    host: str = flag("127.0.0.1", FlagGroup.SERVER, "Address of the HTTP API.")
    port: int = flag(8010, FlagGroup.SERVER, "Port of the HTTP API.")
    admin_port: int = flag(0, FlagGroup.SERVER, "Port of /admin; 0 = the API's port.")
    api_key: str = flag(
        "",
        FlagGroup.SERVER,
        "Bearer key that clients must present; empty = none. Prefer KVTIER_API_KEY.",
        env="KVTIER_API_KEY",
    )
    chat_template: str = flag("", FlagGroup.SERVER, "Jinja file instead of the tokenizer's chat template.")
    max_concurrent_requests: int = flag(
        200, FlagGroup.SERVER, "Requests in the engine at most, waiting ones included; more get 429."
    )
    request_queue_size: int = flag(
        100000, FlagGroup.SERVER, "Sequences that may wait for admission; more are refused before any prefetch starts."
    )
    drain_timeout: int = flag(
        30000, FlagGroup.SERVER, "Milliseconds that SIGTERM and /admin/drain give running requests."
    )

    # KV cache
    block_size: int = flag(128, FlagGroup.CACHE, "Tokens in a block.")
    max_cache_size: int = flag(
        0, FlagGroup.CACHE, "Bytes of the device cache per rank; 0 = from --max_memory_utilization."
    )
    max_memory_utilization: float = flag(
        0.8,
        FlagGroup.CACHE,
        "Fraction of device memory for weights and cache together (CUDA). On CPU the cache then gets 1/8 of that fraction of memory, at most 4 GiB.",
    )
    kv_cache_dtype: str = flag(
        "auto",
        FlagGroup.CACHE,
        "auto = --dtype. Other values are refused with a host tier.",
        choices=("auto", "float32", "bfloat16"),
    )
    enable_prefix_cache: bool = flag(True, FlagGroup.CACHE, "Find blocks of earlier prompts.")
    enable_in_batch_prefix_cache: bool = flag(
        False,
        FlagGroup.CACHE,
        "Let a prompt wait for an equal prefix that is being computed right now instead of computing it too.",
    )
    xxh3_128bits_seed: int = flag(1024, FlagGroup.CACHE, "Seed of every hash; part of every key.")
    device_eviction: str = flag("lru", FlagGroup.CACHE, "Eviction order of device blocks.", choices=("lru", "s3fifo"))
    host_eviction: str = flag(
        "s3fifo", FlagGroup.CACHE, "Eviction order of host blocks; s3fifo resists scans.", choices=("lru", "s3fifo")
    )

    # Store
    enable_kvcache_store: bool = flag(
        False,
        FlagGroup.STORE,
        "Use a Mooncake Store as third tier; needs the prefix cache and --host_blocks_factor > 1.",
    )
    host_blocks_factor: float = flag(0.0, FlagGroup.STORE, "Host blocks = factor x device blocks; <= 1 = no host tier.")
    prefetch_timeout: int = flag(
        0,
        FlagGroup.STORE,
        "Milliseconds after which no further prefetch batch is issued; those in flight are awaited. 0 = never.",
    )
    prefetch_batch_size: int = flag(2, FlagGroup.STORE, "Logical blocks per prefetch batch.")
    layers_wise_copy_batchs: int = flag(
        4, FlagGroup.STORE, "Layer ranges of one restore, so that copy and compute overlap; 0 = one."
    )
    store_protocol: str = flag(
        "tcp", FlagGroup.STORE, "Transport of the store; rdma without a device is refused.", choices=("tcp", "rdma")
    )
    store_rdma_devices: str = flag(
        "", FlagGroup.STORE, "RDMA devices of this engine, comma separated; empty = all active ones."
    )
    store_master_server_address: str = flag(
        "", FlagGroup.STORE, "host:port of the mooncake_master, or etcd://a:2379;b:2379 for leader discovery."
    )
    store_metadata_server: str = flag("P2PHANDSHAKE", FlagGroup.STORE, "Transfer Engine metadata.")
    store_local_hostname: str = flag(
        "", FlagGroup.STORE, "host:base_port of the store clients; worker i owns base_port + i."
    )
    store_shm_client: str = flag(
        "",
        FlagGroup.STORE,
        "host:port of a mooncake_client on this machine: its segment is reached through shared memory instead of TCP.",
    )
    store_call_timeout: int = flag(5000, FlagGroup.STORE, "Milliseconds after which a store call counts as failed.")
    store_replica_num: int = flag(1, FlagGroup.STORE, "Replicas of every object put.")
    enable_store_integrity: bool = flag(
        True, FlagGroup.STORE, "Verify the checksum of every object read from the store."
    )
    enable_control_h2d_block_num: bool = flag(
        False, FlagGroup.STORE, "Limit blocks restored per step to --max_h2d_blocks_per_step."
    )
    max_h2d_blocks_per_step: int = flag(
        64, FlagGroup.STORE, "Restore budget of a step when --enable_control_h2d_block_num."
    )
    enable_restore_cost_gate: bool = flag(
        False, FlagGroup.STORE, "Restore only when measured rates say that it beats computing."
    )
    enable_cache_salt: bool = flag(
        False, FlagGroup.STORE, "Mix the request field cache_salt into block hashes (tenant isolation)."
    )

    # Scheduler
    max_tokens_per_batch: int = flag(10240, FlagGroup.SCHEDULER, "Token budget of a step.")
    max_seqs_per_batch: int = flag(200, FlagGroup.SCHEDULER, "Sequences in a step.")
    enable_chunked_prefill: bool = flag(True, FlagGroup.SCHEDULER, "Let a prompt span several steps.")
    max_tokens_per_chunk_for_prefill: int = flag(
        -1, FlagGroup.SCHEDULER, "Prompt tokens of one sequence per step; -1 = the step's budget."
    )
    priority_strategy: str = flag(
        "fcfs", FlagGroup.SCHEDULER, "Order of waiting requests.", choices=("fcfs", "priority")
    )
    enable_mix_batch: bool = flag(True, FlagGroup.SCHEDULER, "Prefill and decode in one step.")

    # Distributed
    tp_size: int = flag(
        1, FlagGroup.DISTRIBUTED, "Tensor-parallel ranks, one process each; must divide attention and kv heads."
    )
    master_node_addr: str = flag(
        "127.0.0.1:0", FlagGroup.DISTRIBUTED, "Rendezvous of the ranks; port 0 = any free one."
    )
    instance_role: str = flag("DEFAULT", FlagGroup.DISTRIBUTED, "Only DEFAULT for now.", choices=("DEFAULT",))
