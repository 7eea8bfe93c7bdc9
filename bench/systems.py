"""The systems under test as processes on this machine: ours in each placement of the store, and the peers.

All of them serve the same folder of float32 weights with the same number of threads and blocks of 128 tokens.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from client import Client
from kvtier_operator.local.supervisor import LocalCluster
from kvtier_operator.local.up import prepare
from kvtier_operator.manifest import load
from kvtier_operator.resources.engine import engine_name
from kvtier_operator.resources.processes import LOOPBACK
from peers import vllm

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "bench" / ".work"
MODEL_ID = "smollm2"
BLOCK_SIZE = 128
DEVICE_BYTES = 1 << 30
HOST_BLOCKS_FACTOR = 1.5
PEERS = ("vllm", "vllm+mooncake", "vllm+mooncake-standalone", "vllm+lmcache")
OURS = ("ours-shm", "ours-tcp", "ours-off")


@dataclass(frozen=True, slots=True)
class System:
    """One running system.

    Attributes:
        name: one of `OURS` or `PEERS`.
        cluster: its processes.
        engine: name of the process that serves.
        client: asks it.
    """

    name: str
    cluster: LocalCluster
    engine: str
    client: Client

    @property
    def ours(self) -> bool:
        """Whether it is kvtier."""
        return self.name in OURS

    @property
    def has_store(self) -> bool:
        """Whether anything is left once the engine forgot."""
        return self.name not in {"vllm", "ours-off"}

    @property
    def survives_restart(self) -> bool:
        """Whether the store's bytes lie outside the engine's process."""
        return self.has_store and self.name != "vllm+mooncake"

    def forget(self, *tiers: str) -> None:
        """Drop these tiers of the engine; a peer has only one that can be dropped, whatever it is called."""
        if self.ours:
            self.client.post("/admin/cache/drop", {"tiers": list(tiers)})
        else:
            self.client.post("/reset_prefix_cache")

    def restart_engine(self) -> None:
        """Stop and start the engine; the store stays."""
        self.cluster.restart(self.engine)

    def freeze(self) -> None:
        """Stop a peer's engine where it is, so that its spinning threads cost the others nothing. Ours do not spin."""
        self._signal_engine(signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let a frozen peer run for a while."""
        self.thaw()
        try:
            yield
        finally:
            self.freeze()

    def thaw(self) -> None:
        """Let a frozen peer go on."""
        self._signal_engine(signal.SIGCONT)

    def _signal_engine(self, number: signal.Signals) -> None:
        pid = self.cluster.pid(self.engine)
        if not self.ours and pid is not None:
            os.killpg(pid, number)


def model_folder() -> Path:
    """The demo model in Hugging Face form."""
    command = [sys.executable, "-m", "kvtier_worker.model.prepare"]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Path(printed.split()[-1])


@contextmanager
def running(name: str, model: Path, threads: int, say: Callable[[str], None]) -> Iterator[System]:
    """Start a system, stop it at the end."""
    WORK.mkdir(parents=True, exist_ok=True)
    system = _ours(name, model, threads, say) if name in OURS else _peer(name, model, threads, say)
    with system.cluster:
        try:
            yield system
        finally:
            system.thaw()  # or it would never see that it is to stop


def _ours(name: str, model: Path, threads: int, say: Callable[[str], None]) -> System:
    port, start = vllm.free_port(), 24000 + 400 * OURS.index(name)
    manifest = WORK / f"{name}.yaml"
    manifest.write_text(yaml.safe_dump(manifest_of(name, model, threads, port, start)))
    cluster = load(manifest)
    local = prepare(cluster, manifest, WORK / name, say)
    return System(name, local, engine_name("engine", 0), Client(LOOPBACK, port, MODEL_ID))


def manifest_of(name: str, model: Path, threads: int, port: int, start: int) -> dict[str, object]:
    """The `KVCacheCluster` of one of `OURS`."""
    tiers: dict[str, object] = {"device": {"size": str(DEVICE_BYTES)}}
    spec: dict[str, object] = {
        "transport": {
            "protocol": "tcp",
            "sharedMemory": name == "ours-shm",
            "ports": {"range": {"start": start, "size": 100}},
        },
        "model": {"source": {"uri": f"file://{model}"}, "identity": {"id": MODEL_ID}},
    }
    if name != "ours-off":
        spec["store"] = {"pools": [{"name": "dram", "segmentSize": "2Gi"}]}
        tiers |= {"host": {"blocksFactor": str(HOST_BLOCKS_FACTOR)}, "store": {"enabled": True}}
    settings = {"block_size": BLOCK_SIZE, "dtype": "float32", "cpu_threads": threads, "max_model_len": 8192}
    spec["roles"] = [{"name": "engine", "type": "Fused", "port": port, "tiers": tiers, "settings": settings}]
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheCluster",
        "metadata": {"name": name},
        "spec": spec,
    }


def _peer(name: str, model: Path, threads: int, say: Callable[[str], None]) -> System:
    work = WORK / name.replace("+", "-")
    match name:
        case "vllm":
            specs, port = vllm.plain(model, threads, work)
        case "vllm+mooncake":
            specs, port = vllm.with_mooncake(model, threads, work, standalone=False)
        case "vllm+mooncake-standalone":
            specs, port = vllm.with_mooncake(model, threads, work, standalone=True)
        case "vllm+lmcache":
            specs, port = vllm.with_lmcache(model, threads, work)
        case _:
            raise ValueError(f"unknown system {name!r}; known: {OURS + PEERS}")
    cluster = LocalCluster(specs, work / "logs", say)
    return System(name, cluster, vllm.ENGINE, Client(LOOPBACK, port, vllm.MODEL_NAME))
