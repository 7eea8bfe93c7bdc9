"""The peers as processes: vLLM's CPU build with each connector that works on CPU. Built by `bench/peers/setup.sh`.

Each function gives the processes of one system in start order; the engine is the last. What was needed to make them
run at their best on CPU is written beside the setting.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path

from kvtier_operator.resources.processes import LOOPBACK, HttpProbe, ProcessSpec, TcpProbe

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-vllm"
PYTHON = str(VENV / "bin" / "python")
MODEL_NAME = "smollm2"
ENGINE = "vllm"
SEGMENT_BYTES = 2 << 30
KV_GIB = 2
BLOCK_SIZE = 128
MAX_SEQS = 32
MASTER_ENV = {"GLOG_minloglevel": "1"}


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def installed() -> bool:
    """Whether the peers' environment is there."""
    return Path(PYTHON).exists()


def preload() -> str:
    """Libraries that vLLM recommends to preload on CPU, as far as this machine has them."""
    candidates = [
        *VENV.glob("lib/libiomp5.so"),
        *Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc_minimal.so.4"),
    ]
    return ":".join(map(str, candidates))


def engine(model: Path, threads: int, connector: Mapping[str, object] | None, work: Path) -> tuple[ProcessSpec, int]:
    """vLLM's OpenAI server and its port."""
    port = free_port()
    argv = [
        # `vllm serve` of this wheel looks for a distribution named vllm and dies; the module does not.
        *(PYTHON, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", MODEL_NAME, "--dtype", "float32"),
        *("--host", LOOPBACK, "--port", str(port), "--block-size", str(BLOCK_SIZE)),
        *("--max-model-len", "8192", "--max-num-seqs", str(MAX_SEQS)),
        "--enable-prompt-tokens-details",
    ]
    if connector:
        argv += ["--kv-transfer-config", json.dumps(connector)]
    env = {
        "PATH": f"{VENV / 'bin'}:/usr/bin:/bin",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        # Two threads for everybody; its own binding would leave a core to the front end.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(work.parent / "vllm-cache"),  # compiled once, for all variants
        "VLLM_USE_AOT_COMPILE": "0",  # what it saves it cannot load again, and compiles at every start
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",  # its block hashes must survive a restart
        "LD_PRELOAD": preload(),
        "MOONCAKE_CONFIG_PATH": str(work / "mooncake.json"),
        "MC_FORCE_TCP": "1",
        "LMCACHE_LOG_LEVEL": "WARNING",
    }
    spec = ProcessSpec(
        name=ENGINE,
        argv=tuple(argv),
        env=env,
        probes=(HttpProbe(f"http://{LOOPBACK}:{port}/v1/models"),),
        ports={port: "vLLM's API"},
        start_timeout_s=600,  # the first start compiles
        stop_timeout_s=30,
    )
    return spec, port


def mooncake_master() -> tuple[ProcessSpec, int]:
    """A master and its RPC port."""
    rpc, admin = free_port(), free_port()
    spec = ProcessSpec(
        name="master",
        argv=(
            str(VENV / "bin" / "mooncake_master"),
            *(f"--rpc_address={LOOPBACK}", f"--rpc_port={rpc}"),
            *(f"--metrics_host={LOOPBACK}", f"--metrics_port={admin}", "--logtostderr"),
            # The connector reads after the default lease ran out when the machine is busy, and then fails the request.
            "--default_kv_lease_ttl=30000",
            # The bench freezes an engine while others are timed; its segment must outlast that.
            "--client_ttl=600",
        ),
        env=MASTER_ENV,
        probes=(TcpProbe(rpc),),
        ports={rpc: "RPC", admin: "metrics"},
        start_timeout_s=30,
        stop_timeout_s=5,
    )
    return spec, rpc


def mooncake_client(master: int) -> ProcessSpec:
    """The wheel's storage process, which holds the segment of `mode: standalone-store`."""
    port, label, http = free_port(), free_port(), free_port()
    return ProcessSpec(
        name="store",
        argv=(
            str(VENV / "bin" / "mooncake_client"),
            *(f"--host={LOOPBACK}:{label}", f"--port={port}", f"--global_segment_size={SEGMENT_BYTES}"),
            *(f"--master_server_address={LOOPBACK}:{master}", "--metadata_server=P2PHANDSHAKE"),
            *("--protocol=tcp", "--logtostderr", f"--http_port={http}"),
        ),
        env=MASTER_ENV | {"MC_FORCE_TCP": "1"},
        probes=(TcpProbe(port),),
        ports={port: "shared-memory clients", http: "health"},
        start_timeout_s=30,
        stop_timeout_s=5,
    )


def plain(model: Path, threads: int, work: Path) -> tuple[list[ProcessSpec], int]:
    """vLLM with its prefix cache only."""
    spec, port = engine(model, threads, None, work)
    return [spec], port


def with_mooncake(model: Path, threads: int, work: Path, *, standalone: bool) -> tuple[list[ProcessSpec], int]:
    """vLLM + MooncakeStoreConnector; the segment in the engine's process (lost with it) or in one of its own."""
    work.mkdir(parents=True, exist_ok=True)
    master, rpc = mooncake_master()
    config = {
        "mode": "standalone-store" if standalone else "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"{LOOPBACK}:{rpc}",
        "global_segment_size": 0 if standalone else SEGMENT_BYTES,
        "local_buffer_size": 1 << 30,
        "protocol": "tcp",
        "device_name": "",
    }
    (work / "mooncake.json").write_text(json.dumps(config))
    connector = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # its default fails the request
    }
    spec, port = engine(model, threads, connector, work)
    return [master, *([mooncake_client(rpc)] if standalone else []), spec], port


def with_lmcache(model: Path, threads: int, work: Path) -> tuple[list[ProcessSpec], int]:
    """vLLM + LMCacheMPConnector and LMCache's server."""
    port, http = free_port(), free_port()
    server = ProcessSpec(
        name="lmcache",
        argv=(
            *(str(VENV / "bin" / "lmcache"), "server", "--host", LOOPBACK, "--port", str(port)),
            *("--http-host", LOOPBACK, "--http-port", str(http), "--chunk-size", str(BLOCK_SIZE)),
            # Its default, lmcache_driven, has no handler on CPU.
            *("--supported-transfer-mode", "engine_driven", "--l1-size-gb", str(SEGMENT_BYTES >> 30)),
            *("--eviction-policy", "LRU", "--disable-observability"),
        ),
        env={
            "PATH": f"{VENV / 'bin'}:/usr/bin:/bin",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_LOG_LEVEL": "WARNING",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": str(threads),
        },
        probes=(TcpProbe(http),),
        ports={port: "LMCache", http: "its API"},
        start_timeout_s=120,
        stop_timeout_s=15,
    )
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": f"tcp://{LOOPBACK}", "lmcache.mp.port": port},
    }
    spec, engine_port = engine(model, threads, connector, work)
    return [server, spec], engine_port
