"""The shared port ledger of clusters on the host network, kept by the operator on a real API server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import combinations

import pytest
import yaml
from kvtier_operator.names import HOST_LEDGER
from kvtier_operator.planning.ledger import Ledger
from kvtier_operator.planning.ledger_data import read_ledger
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.installation import (
    OPERATOR,
    OPERATOR_NAMESPACE,
    stored_cluster,
)
from kvtier_operator.testing.operator_process import OperatorProcess
from kvtier_operator.testing.tenant import Tenant
from kvtier_operator.testing.waiting import wait_for

pytestmark = pytest.mark.apiserver


@pytest.fixture
def running(installed: ControlPlane, namespace: str) -> Iterator[ControlPlane]:
    installed.kubectl("delete", "configmap", HOST_LEDGER, "-n", OPERATOR_NAMESPACE, "--ignore-not-found")
    flags = (f"--operator_namespace={OPERATOR_NAMESPACE}", f"--namespace={namespace}")
    with OperatorProcess(installed.kubeconfig_of(OPERATOR), *flags):
        yield installed


def on_host(name: str, port: int) -> str:
    manifest = stored_cluster(name)
    manifest["spec"]["transport"] = {"hostNetwork": True, "ports": {"range": {"start": 23000, "size": 400}}}
    manifest["spec"]["roles"][0]["port"] = port
    return yaml.safe_dump(manifest)


def ledger(running: ControlPlane) -> Ledger:
    items = running.kubectl("get", "configmap", "-n", OPERATOR_NAMESPACE, "-o", "json")
    found = [one for one in json.loads(items)["items"] if one["metadata"]["name"] == HOST_LEDGER]
    return read_ledger(found[0].get("data") or {}, found[0]["metadata"]["resourceVersion"]) if found else Ledger()


def test_clusters_on_the_host_network_share_a_ledger_that_is_made_again_when_it_is_lost(
    running: ControlPlane, namespace: str
) -> None:
    for name, port in (("one", 8101), ("two", 8102)):
        running.kubectl("apply", "-n", namespace, "-f", "-", stdin=on_host(name, port))
    first = wait_for("both have ports", lambda: found if len((found := ledger(running)).clusters) == 2 else None)
    blocks = [block for block, _ in first.claims()]
    assert not [pair for pair in combinations(blocks, 2) if pair[0].meets(pair[1])]
    wait_for("sets of both", lambda: len(running.kubectl("get", "sts", "-n", namespace, "-o", "name").split()) >= 2)
    running.kubectl("apply", "-n", namespace, "-f", "-", stdin=on_host("three", 8101))
    wait_for(
        "the conflict is told",
        lambda: Tenant(running, namespace).condition("three", "PortsAllocated").get("reason") == "PortTaken",
    )
    taken = Tenant(running, namespace).condition("three", "PortsAllocated")
    assert taken["status"] == "False"
    assert f"{namespace}.one." in taken["message"]
    running.kubectl("delete", "kvc", "three", "-n", namespace, "--wait=true")
    running.kubectl("delete", "configmap", HOST_LEDGER, "-n", OPERATOR_NAMESPACE)
    running.kubectl("annotate", "kvc", "one", "two", "-n", namespace, "touched=1")

    def made_again() -> bool:
        again = ledger(running)
        return {key: entry.block for key, entry in again.entries.items()} == {
            key: entry.block for key, entry in first.entries.items()
        }

    wait_for("the ledger is made again", made_again)
    running.kubectl("delete", "kvc", "two", "-n", namespace)
    # The garbage collector hears of a new definition half a minute late; it would do just this.
    running.kubectl("delete", "sts,pod", "-n", namespace, "-l", "kvtier.dev/cluster=two")

    def released() -> bool:
        running.kubectl("annotate", "kvc", "one", "-n", namespace, f"touched={time.monotonic()}", "--overwrite")
        found = ledger(running)
        return all(
            (entry.released_at is not None) == key.cluster.startswith(f"{namespace}.two.")
            for key, entry in found.entries.items()
        )

    wait_for("what the deleted cluster had is released", released)
