"""What `kvtier status` shows."""

import dataclasses

from kvtier_operator.local.report import (
    ClusterReport,
    EngineReport,
    ProcessReport,
    ProcessState,
    SegmentReport,
    StoreReport,
    render,
)


def process(name: str, component: str, *, pid: int = 7, restarts: int = 0) -> ProcessState:
    return ProcessState(name, component, pid, restarts, f"http://{name}", f"http://{name}/health", {})


REPORT = ClusterReport(
    name="ha",
    pid=4711,
    processes=(
        ProcessReport(process("etcd-0", "etcd"), ready=True),
        ProcessReport(process("master-0", "master", restarts=1), ready=True, role="standby"),
        ProcessReport(process("master-1", "master", pid=12), ready=True, role="leader", serving=True),
        ProcessReport(process("engine-0", "engine"), ready=True),
    ),
    store=StoreReport((SegmentReport("a:1", 512 << 20, 3 << 20), SegmentReport("b:1", 512 << 20, 0)), 1234),
    engines=(EngineReport("engine-0", 12, 1000, {"device": 310, "host": 220, "store": 180}),),
)


def test_tables_show_processes_leader_segments_and_shares_by_tier() -> None:
    assert render(REPORT).splitlines() == [
        "ha: kvtier up runs it, pid 4711",
        "process   ready  pid  restarts  at               role",
        "etcd-0    yes    7    0         http://etcd-0",
        "master-0  yes    7    1         http://master-0  standby",
        "master-1  yes    12   0         http://master-1  leader, serving",
        "engine-0  yes    7    0         http://engine-0",
        "",
        "store: 2 segments, 3.0 MiB of 1.0 GiB used, 1,234 objects",
        "segment  capacity   used",
        "a:1      512.0 MiB  3.0 MiB",
        "b:1      512.0 MiB  0 B",
        "",
        "share of prompt tokens by where they came from, since each engine's start",
        "engine    requests  prompt tokens  device  host  store  computed",
        "engine-0  12        1,000          31%     22%   18%    29%",
    ]
    assert REPORT.complaints == ()


def test_one_of_a_kind_is_no_plural() -> None:
    report = dataclasses.replace(REPORT, store=StoreReport((SegmentReport("a:1", 2 << 40, 2048),), 1))
    assert "store: 1 segment, 2.0 KiB of 2.0 TiB used, 1 object" in render(report).splitlines()


def test_an_engine_without_prompts_has_no_shares() -> None:
    idle = dataclasses.replace(REPORT, engines=(EngineReport("engine-0", 0, 0),))
    assert render(idle).splitlines()[-1].split() == ["engine-0", "0", "0", "-", "-", "-", "-"]


def test_what_is_not_ready_and_the_lack_of_a_leader_are_said_at_the_end() -> None:
    masters = (ProcessReport(process("master-0", "master", pid=0), ready=False, role="no answer"),)
    report = dataclasses.replace(REPORT, processes=masters, store=None)
    assert render(report).splitlines()[-2:] == [
        "master-0 is not ready",
        "no master serves: engines go on without the store",
    ]


def test_a_cluster_without_masters_misses_none() -> None:
    report = dataclasses.replace(REPORT, processes=(ProcessReport(process("engine-0", "engine"), ready=True),))
    assert report.complaints == ()
