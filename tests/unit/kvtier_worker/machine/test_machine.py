"""Ranges, pages, ports, sizes of this machine, and what the doctor says about other ones."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import os
import threading

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker import doctor
from kvtier_worker.errors import StoreUnavailable
from kvtier_worker.machine.facts import collect
from kvtier_worker.machine.findings import Facts, Finding, Level, judge
from kvtier_worker.machine.libraries import install_line, missing_libraries
from kvtier_worker.machine.memory import Span, allocate_pages, physical_memory_bytes, populate, return_free_pages
from kvtier_worker.machine.ports import answers, hold_port, is_unspecified, port_holder
from kvtier_worker.machine.ranges import MemoryRanges
from kvtier_worker.machine.rdma import RdmaPort
from kvtier_worker.testing.processes import free_port

GOOD = Facts(
    python=(3, 12, 1),
    cores=8,
    memory_bytes=64 << 30,
    memlock_bytes=None,
    open_files=65536,
    shm_bytes=1 << 30,
    huge_pages=0,
    wants_huge_pages=False,
    missing_libraries=(),
    packages=dict.fromkeys(("torch", "safetensors", "tokenizers", "fastapi", "uvicorn", "zmq", "mooncake"), "1.0"),
    programs=dict.fromkeys(("mooncake_master", "mooncake_client", "etcd"), "/bin/x"),
    rdma=(),
    gpus=(),
    port_holders={8010: "", 9300: ""},
    ephemeral_ports=(32768, 60999),
    reserved_ports="",
)


def complaints(**changes: object) -> list[Finding]:
    return [one for one in judge(dataclasses.replace(GOOD, **changes)) if one.level is not Level.OK]  # type: ignore[arg-type]


def test_a_good_machine_has_no_complaints() -> None:
    assert complaints() == []


@pytest.mark.parametrize(
    ("changes", "level", "subject", "fix"),
    [
        ({"python": (3, 10, 0)}, "FAIL", "python", "3.11"),
        ({"packages": {**GOOD.packages, "torch": ""}}, "FAIL", "torch", "pip install"),
        ({"packages": {**GOOD.packages, "mooncake": ""}}, "FAIL", "mooncake wheel", "pip install mooncake"),
        ({"missing_libraries": ("libibverbs.so.1",)}, "FAIL", "libibverbs.so.1", "apt-get install"),
        ({"programs": {**GOOD.programs, "mooncake_master": ""}}, "FAIL", "mooncake_master", "pip install"),
        ({"programs": {**GOOD.programs, "etcd": ""}}, "WARN", "etcd", "etcd-server"),
        ({"memlock_bytes": 8 << 20}, "WARN", "memlock limit", "ulimit -l unlimited"),
        ({"open_files": 1024}, "WARN", "open files", "ulimit -n"),
        ({"shm_bytes": 0}, "WARN", "/dev/shm", "--shm-size"),
        ({"wants_huge_pages": True}, "FAIL", "huge pages", "vm.nr_hugepages"),
        ({"rdma": (RdmaPort("mlx5_0", 1, "DOWN", "Ethernet"),)}, "WARN", "RDMA mlx5_0:1", "bring the link up"),
        ({"port_holders": {8010: "pid 7 (nginx)"}}, "WARN", "port 8010", "stop it"),
        ({"port_holders": {50051: ""}}, "WARN", "ephemeral ports", "ip_local_reserved_ports=50051"),
        (
            {"gpus": ("H200",), "packages": {**GOOD.packages, "torch": "2.9+cpu"}},
            "WARN",
            "torch for CUDA",
            "CUDA index",
        ),
    ],
)
def test_each_lack_is_named_with_its_fix(changes: dict[str, object], level: str, subject: str, fix: str) -> None:
    (finding,) = complaints(**changes)

    assert (finding.level, finding.subject) == (level, subject)
    assert fix in finding.fix


@pytest.mark.parametrize("reserved", ["50051", "8000,50000-50100", "50051-50052"])
def test_reserved_ports_are_safe(reserved: str) -> None:
    assert complaints(port_holders={50051: ""}, reserved_ports=reserved) == []


def test_the_table_and_the_json_say_the_same() -> None:
    findings = judge(dataclasses.replace(GOOD, memlock_bytes=1, missing_libraries=("libnuma.so.1",)))
    table, data = doctor.as_table(findings), json.loads(doctor.as_json(findings))

    assert data["level"] == "FAIL"
    for one in data["findings"]:
        assert one["subject"] in table
        assert one["fix"] in table
    assert table.endswith(f"{len(findings) - 2} OK, 1 warnings, 1 missing")


def test_this_machine_can_be_looked_at() -> None:
    facts = collect({"MC_STORE_USE_HUGEPAGE": "1"})

    assert facts.wants_huge_pages
    assert facts.memory_bytes > 1 << 28
    assert {finding.subject for finding in judge(facts)} >= {"python", "memory", "mooncake wheel"}


def test_the_doctor_refuses_unknown_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--jason"]) == 2
    assert "--jason" in capsys.readouterr().err


def test_the_doctor_exits_by_its_worst_finding(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main(["--json"])

    assert code == (1 if json.loads(capsys.readouterr().out)["level"] == "FAIL" else 0)


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 60)), max_size=20), st.integers(0, 460), st.integers(0, 70)
)
def test_ranges_contain_what_one_of_them_contains(wanted: list[tuple[int, int]], address: int, nbytes: int) -> None:
    ranges = MemoryRanges()
    accepted: list[tuple[int, int]] = []
    for start, size in wanted:
        try:
            new = ranges.admits(start, size)
        except StoreUnavailable:
            assert any(start < other + length and other < start + size for other, length in accepted)
            continue
        if new:
            ranges.add(start, size)
            accepted.append((start, size))
        else:
            assert (start, size) in accepted

    assert list(ranges) == sorted(accepted)
    inside = any(start <= address and address + nbytes <= start + size for start, size in accepted)
    assert ranges.contains(address, nbytes) or not (inside and nbytes)
    assert not ranges.contains(address, nbytes) or inside


@pytest.mark.parametrize(("address", "nbytes"), [(0, 10), (-4, 10), (10, 0), (10, -1), ((1 << 64) - 4, 8)])
def test_what_is_no_memory_is_refused(address: int, nbytes: int) -> None:
    with pytest.raises(StoreUnavailable, match="not a range of memory"):
        MemoryRanges().admits(address, nbytes)


def test_pages_are_zeroed_aligned_and_writable() -> None:
    pages = allocate_pages(10_000)

    assert pages.address % 4096 == 0
    assert pages.nbytes == 12_288
    assert ctypes.string_at(pages.address, pages.nbytes) == bytes(12_288)
    ctypes.memset(pages.address, 1, pages.nbytes)


def test_memory_that_cannot_be_locked_is_usable_and_says_why() -> None:
    pages = allocate_pages(64 << 20)
    ctypes.memset(pages.address, 1, pages.nbytes)

    assert pages.problem == "" or "ulimit -l unlimited" in pages.problem


def test_too_much_memory_is_an_error_and_not_a_crash() -> None:
    with pytest.raises((OSError, OverflowError)):
        allocate_pages(1 << 60)


def test_memory_of_the_machine_is_plausible() -> None:
    assert 1 << 28 < physical_memory_bytes() < 1 << 50


def test_a_held_port_answers_and_names_us() -> None:
    port = free_port()
    assert not answers("127.0.0.1", port, 0.5)
    with hold_port("127.0.0.1", port):
        assert answers("127.0.0.1", port, 0.5)
        assert port_holder(port).startswith(f"pid {os.getpid()} (")
        with pytest.raises(OSError, match="in use"):
            hold_port("127.0.0.1", port)
    assert port_holder(port) == "another process"


@pytest.mark.parametrize(
    ("host", "expected"), [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("::1", False), ("node-1", False)]
)
def test_unspecified_addresses_are_known(host: str, *, expected: bool) -> None:
    assert is_unspecified(host) is expected


def test_missing_libraries_are_found_by_loading_them() -> None:
    assert missing_libraries(("libc.so.6", "libnothing.so.9")) == ("libnothing.so.9",)
    assert install_line(["libibverbs.so.1", "libcurl.so.4"]).endswith("libibverbs1 libcurl4")


def test_populating_makes_pages_resident_and_changes_no_byte() -> None:
    nbytes = 8 << 20
    memory = mmap.mmap(-1, nbytes)
    view = ctypes.c_char.from_buffer(memory)
    memory[5000:5004] = b"kept"
    before = resident_bytes()
    populated = threading.Thread(target=populate, args=([Span(ctypes.addressof(view) + 100, nbytes - 100)],))
    populated.start()
    populated.join()
    assert memory[5000:5004] == b"kept"
    assert memory[nbytes - 1] == 0
    assert resident_bytes() - before > nbytes * 0.9
    del view


def test_pages_of_the_heap_that_nobody_uses_are_given_back() -> None:
    blocks = [b"x" * 50_000 for _ in range(1000)]
    pin = b"y" * 50_000
    before = resident_bytes()
    del blocks
    return_free_pages()
    assert before - resident_bytes() > 40 << 20
    assert pin[-1:] == b"y"


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss
