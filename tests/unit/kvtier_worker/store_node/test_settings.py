"""Flags of ``kvtier store``."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtier_worker.errors import ConfigError
from kvtier_worker.store_node import main as store_main
from kvtier_worker.store_node.segment import client_argv
from kvtier_worker.store_node.settings import parse_size, read_settings

GOOD = ("--host=10.0.0.9:7000", "--master_server_address=m:50051")


def violations(*argv: str, environment: dict[str, str] | None = None, sysfs: Path = Path("/nothing")) -> str:
    with pytest.raises(ConfigError) as raised:
        read_settings(argv, environment or {}, sysfs)
    return "\n".join(raised.value.violations)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GB", 4 << 30),
        ("4 gb", 4 << 30),
        ("512MiB", 512 << 20),
        ("1.5G", 3 << 29),
        ("1073741824", 1 << 30),
        ("17B", 17),
        ("64k", 65536),
        ("2TB", 2 << 40),
    ],
)
def test_sizes_read_as_mooncake_reads_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "4XB", "-1GB", "4GB!", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write a number"):
        parse_size(text)


def test_both_spellings_of_flags_work() -> None:
    assert read_settings(GOOD, {}) == read_settings(
        ["--host", "10.0.0.9:7000", "--master_server_address", "m:50051"], {}
    )


def test_every_violation_comes_at_once() -> None:
    text = violations(
        "--host=0.0.0.0:7000",
        "--global_segment_size=1MB",
        "--protocol=rdma",
        "--shm_port=9300",
        "--canary_interval=1",
        "--wrong=1",
    )

    for word in ("0.0.0.0", "16MB", "no active RDMA device", "also --http_port", "canary_interval", "wrong", "master_"):
        assert word in text


@pytest.mark.parametrize("host", ["0.0.0.0:7000", "[::]:7000"])
def test_an_address_that_engines_would_dial_at_themselves_is_refused(host: str) -> None:
    assert "use the address of this machine or pod" in violations(*GOOD, f"--host={host}")


def test_a_host_without_port_is_refused() -> None:
    assert "the port is missing" in violations(*GOOD, "--host=10.0.0.9")


def test_etcd_needs_the_cluster_id() -> None:
    argv = ("--host=10.0.0.9:7000", "--master_server_address=etcd://a:1;b:2")

    assert "MC_STORE_CLUSTER_ID" in violations(*argv)
    assert read_settings(argv, {"MC_STORE_CLUSTER_ID": "c"}).master.discovery


def test_admin_addresses_may_be_several() -> None:
    settings = read_settings([*GOOD, "--master_admin_address=a:1;b:2"], {})

    assert [str(one) for one in settings.admins] == ["a:1", "b:2"]
    assert "--master_admin_address=a" in violations(*GOOD, "--master_admin_address=a")


def test_ports_must_differ() -> None:
    assert "port 9300 is also" in violations("--host=10.0.0.9:9300", GOOD[1])


def test_the_mooncake_client_gets_the_same_settings() -> None:
    argv = client_argv(read_settings([*GOOD, "--global_segment_size=1GB", "--shm_port=7001"], {}))

    assert argv[0].endswith("mooncake_client")
    assert {"--host=10.0.0.9:7000", "--port=7001", f"--global_segment_size={1 << 30}"} <= set(argv)
    assert "--device_names=" in argv


def test_bad_flags_end_with_2_and_start_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert store_main.main(["--host=0.0.0.0:1", "--nonsense=1"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3
    assert all(line.startswith("kvtier store: --") for line in lines)


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert store_main.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("host", "global_segment_size", "shm_port", "master_admin_address", "http_port"):
        assert f"--{name}" in text


def test_a_segment_larger_than_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--global_segment_size=900TB: .* this machine has \d+; give it less"):
        read_settings([*GOOD, "--global_segment_size=900TB"], {})
