"""The store behind several masters and etcd: discovery, cluster id, failover, leaving."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from kvtier_worker.testing.mooncake import running_etcd, running_ha_master, running_store_node
from kvtier_worker.testing.processes import free_port, port_answers

pytestmark = [pytest.mark.mooncake, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(120)]

CLUSTER = "kvtier-test"


def client(masters: str, cluster_id: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "kvtier_worker.testing.ha_client", masters, cluster_id]
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")


def test_objects_survive_the_leader_and_nobody_takes_half_a_minute_to_leave() -> None:
    with running_etcd() as etcd, running_ha_master(etcd.endpoint, CLUSTER) as leader:
        leader.wait_serving(30.0)
        masters = f"etcd://127.0.0.1:{free_port()};{etcd.endpoint}"
        environment = {"MC_STORE_CLUSTER_ID": CLUSTER}
        with (
            running_ha_master(etcd.endpoint, CLUSTER) as standby,
            running_store_node(masters, environment=environment) as node,
            client(masters, CLUSTER) as reader,
            client(masters, "another") as stranger,
        ):
            assert not port_answers(standby.rpc_port)
            refusal = line(stranger)
            assert "no leader of cluster 'another'" in refusal
            assert "compare MC_STORE_CLUSTER_ID" in refusal
            assert line(reader) == "stored"

            leader.kill()
            tell(reader)
            outcome, _, state = line(reader).split()
            assert (outcome, state) == ("hit", "closed")
            word, seconds = line(reader).split()
            assert word == "closed"
            assert float(seconds) < 5
            assert reader.wait(5) == 0

            started = time.monotonic()
            assert node.stop(20.0) == 0, node.log_tail()
            assert time.monotonic() - started < 10
            assert "unmounted" in node.log_tail()
