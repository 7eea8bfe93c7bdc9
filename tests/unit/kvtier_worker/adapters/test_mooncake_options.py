"""From settings to options, and the checks before a client is set up."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.adapters.mooncake_store import MooncakeOptions, MooncakeStore, options_from_settings
from kvtier_worker.adapters.mooncake_store.checks import master_violation, option_violations, shm_violation
from kvtier_worker.adapters.mooncake_store.options import rank_ports
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import Rank
from kvtier_worker.errors import ConfigError, StoreUnavailable
from kvtier_worker.machine.ports import hold_port
from kvtier_worker.mooncake_client import library
from kvtier_worker.mooncake_client.environment import apply_environment, client_environment
from kvtier_worker.testing.processes import free_port

OPTIONS = MooncakeOptions(master="127.0.0.1:50051", local_hostname="127.0.0.1:12345")
SETTINGS = WorkerSettings(store_master_server_address="m:50051", store_local_hostname="10.0.0.7:20000", tp_size=3)


def sysfs(root: Path, **states: str) -> Path:
    for device, state in states.items():
        port = root / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"4: {state}\n")
        (port / "link_layer").write_text("Ethernet\n")
    return root


def test_options_follow_the_settings_of_the_rank() -> None:
    settings = dataclasses.replace(
        SETTINGS, store_call_timeout=2500, store_replica_num=2, store_shm_client="127.0.0.1:9", store_protocol="rdma"
    )
    options = options_from_settings(settings, Rank(2), {"MC_STORE_CLUSTER_ID": "blue"})

    assert options.local_hostname == "10.0.0.7:20002"
    assert (options.master, options.protocol, options.replica_num) == ("m:50051", "rdma", 2)
    assert (options.call_timeout_s, options.breaker.costly_call_s) == (2.5, 2.5)
    assert (options.shm_client, options.cluster_id) == ("127.0.0.1:9", "blue")


def test_a_rank_beyond_the_last_port_is_refused() -> None:
    settings = dataclasses.replace(SETTINGS, store_local_hostname="h:65534")

    with pytest.raises(ConfigError, match=r"store_local_hostname=h:65534.*above 65535"):
        options_from_settings(settings, Rank(2), {})


@given(first=st.integers(1, 60000), share=st.integers(2, 50), ranks=st.integers(1, 16))
def test_ranks_never_share_a_port(first: int, share: int, ranks: int) -> None:
    environment = {"MC_MIN_RPC_PORT": str(first), "MC_MAX_RPC_PORT": str(first + share * ranks - 1)}
    blocks = [rank_ports(environment, rank, ranks) for rank in range(ranks)]
    ports = [port for block in blocks if block for port in range(block[0], block[1] + 1)]

    assert len(ports) == len(set(ports)) == share * ranks
    assert min(ports) == first


@pytest.mark.parametrize(
    ("first", "last"), [("20000", ""), ("", "20000"), ("20000", "20004"), ("x", "y"), ("0", "9"), ("65530", "65540")]
)
def test_a_port_range_that_is_too_small_or_broken_is_refused(first: str, last: str) -> None:
    with pytest.raises(ConfigError, match="MC_MIN_RPC_PORT"):
        options_from_settings(SETTINGS, Rank(0), {"MC_MIN_RPC_PORT": first, "MC_MAX_RPC_PORT": last})


def test_without_a_port_range_mooncake_chooses() -> None:
    assert options_from_settings(SETTINGS, Rank(0), {}).rpc_ports is None


def test_timeouts_and_ports_reach_the_client_by_its_environment() -> None:
    variables = client_environment(call_timeout_s=2.2, protocol="tcp", rpc_ports=(20000, 20003), cluster_id="c")

    assert variables == {
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
        "MC_RPC_TIMEOUT_MS": "2200",
        "MC_MIN_RPC_PORT": "20000",
        "MC_MAX_RPC_PORT": "20003",
        "MC_FORCE_TCP": "1",
        "MC_STORE_CLUSTER_ID": "c",
    }
    assert "MC_FORCE_TCP" not in client_environment(call_timeout_s=1, protocol="rdma")


def test_the_users_log_level_stays() -> None:
    environment = {"MC_LOG_LEVEL": "INFO", "MC_RPC_TIMEOUT_MS": "9"}
    apply_environment({"MC_RPC_TIMEOUT_MS": "5000"}, environment)

    assert environment["MC_LOG_LEVEL"] == "INFO"
    assert environment["MC_RPC_TIMEOUT_MS"] == "5000"


def test_all_violations_come_at_once(tmp_path: Path) -> None:
    options = dataclasses.replace(
        OPTIONS, master="", local_hostname="0.0.0.0:1", protocol="rdma", replica_num=0, rpc_ports=(5, 5)
    )
    text = "\n".join(option_violations(options, tmp_path))

    for word in ("master address", "0.0.0.0", "no active RDMA device", "replica_num 0", "needs 2 ports"):
        assert word in text


def test_rdma_needs_an_active_device(tmp_path: Path) -> None:
    rdma = dataclasses.replace(OPTIONS, protocol="rdma")

    assert "found: none" in option_violations(rdma, tmp_path / "nothing")[0]
    down = sysfs(tmp_path / "down", mlx5_0="DOWN")
    assert "mlx5_0:1 DOWN" in option_violations(rdma, down)[0]
    up = sysfs(tmp_path / "up", mlx5_0="DOWN", mlx5_1="ACTIVE")
    assert option_violations(rdma, up) == ()
    named = dataclasses.replace(rdma, rdma_devices="mlx5_1, mlx5_0,mlx5_9")
    assert [text.split("'")[1] for text in option_violations(named, up)] == ["mlx5_0", "mlx5_9"]


def test_devices_under_tcp_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert option_violations(dataclasses.replace(OPTIONS, rdma_devices="mlx5_0")) == ()
    assert "ignored under tcp" in caplog.text


def test_etcd_needs_a_cluster_id() -> None:
    options = dataclasses.replace(OPTIONS, master="etcd://a:1;b:2")

    assert "MC_STORE_CLUSTER_ID" in option_violations(options)[0]
    assert option_violations(dataclasses.replace(options, cluster_id="c")) == ()


def test_one_living_etcd_member_is_enough() -> None:
    options = dataclasses.replace(OPTIONS, master="etcd://a:1;b:2;c:3", cluster_id="c")

    assert master_violation(options, lambda host, _port, _timeout: host == "c") == ""
    assert "no etcd member" in master_violation(options, lambda *_: False)


def test_a_dead_master_is_named_with_its_fix() -> None:
    address = f"127.0.0.1:{free_port()}"

    with pytest.raises(StoreUnavailable, match=f"no mooncake_master answers at {address}; start one or"):
        MooncakeStore.connect(dataclasses.replace(OPTIONS, master=address))


def test_a_mooncake_client_that_is_not_there_is_named() -> None:
    assert "no mooncake_client answers at h:1" in shm_violation("h:1", lambda *_: False)


def test_a_mooncake_client_of_another_machine_shares_no_memory() -> None:
    assert "network namespace" in shm_violation(f"h:{free_port()}", lambda *_: True)


def test_a_taken_label_names_its_holder() -> None:
    port = free_port()
    with hold_port("127.0.0.1", port), hold_port("127.0.0.1", free_port()) as master:
        options = MooncakeOptions(master=f"127.0.0.1:{master.getsockname()[1]}", local_hostname=f"127.0.0.1:{port}")
        with pytest.raises(StoreUnavailable, match=rf"127.0.0.1:{port} cannot be bound .*held by pid {os.getpid()} "):
            MooncakeStore.connect(options)


def test_a_label_on_an_address_of_another_machine_is_refused() -> None:
    with hold_port("127.0.0.1", free_port()) as master:
        options = MooncakeOptions(master=f"127.0.0.1:{master.getsockname()[1]}", local_hostname="192.0.2.1:4000")
        with pytest.raises(StoreUnavailable, match=r"192.0.2.1:4000 cannot be bound"):
            MooncakeStore.connect(options)


def test_a_wheel_without_the_calls_we_need_is_refused() -> None:
    with pytest.raises(StoreUnavailable, match="lacks teleport; install mooncake-transfer-engine-non-cuda=="):
        library.load_mooncake(("setup", "teleport"))


def test_a_broken_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", fail)
    monkeypatch.setattr(library, "missing_libraries", lambda: ("libibverbs.so.1",))

    with pytest.raises(StoreUnavailable, match="apt-get install -y --no-install-recommends libibverbs1"):
        library.load_mooncake(())
