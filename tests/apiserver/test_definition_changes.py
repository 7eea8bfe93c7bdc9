"""The definition of KVCacheCluster is missing, goes, comes back and changes under an operator that runs."""

from __future__ import annotations

import json

import pytest
from kvtier_operator.testing.installation import CRD_NAME, install_definition, small_cluster
from kvtier_operator.testing.operator_process import OperatorProcess
from kvtier_operator.testing.tenant import Tenant
from kvtier_operator.testing.waiting import wait_for

pytestmark = pytest.mark.apiserver


def test_without_the_definition_the_operator_says_so_and_waits_for_it(
    tenant: Tenant, operator: OperatorProcess
) -> None:
    operator.stop()
    tenant.control_plane.kubectl("delete", "crd", CRD_NAME, "--timeout=60s")
    try:
        operator.start(wait=False)
        wait_for("its words", lambda: "kubectl apply -f crds/" in operator.log())
        assert operator.status("/readyz") == 503
        assert operator.running
    finally:
        install_definition(tenant.control_plane)
    wait_for("that it is ready", lambda: operator.status("/readyz") == 200)
    tenant.apply(small_cluster("small"))
    tenant.wait_for_child("Service/small-api")


def test_a_definition_that_goes_and_comes_back_under_a_running_operator_is_served_again(
    tenant: Tenant, operator: OperatorProcess
) -> None:
    tenant.apply(small_cluster("goes"))
    tenant.wait_for_child("Service/goes-api")
    tenant.control_plane.kubectl("delete", "crd", CRD_NAME, "--timeout=60s")
    try:
        wait_for("that it is not ready", lambda: operator.status("/readyz") == 503)
    finally:
        install_definition(tenant.control_plane)
    wait_for("that it is ready", lambda: operator.status("/readyz") == 200)
    tenant.apply(small_cluster("comes"))
    tenant.wait_for_child("Service/comes-api")
    assert operator.running


def test_an_upgrade_of_the_definition_writes_nothing_and_stops_nothing(
    tenant: Tenant, operator: OperatorProcess
) -> None:
    assert operator.running
    tenant.apply(small_cluster("small"))
    tenant.wait_for_child("Service/small-api")
    tenant.settle()
    before = tenant.writes()
    column = {"name": "UID", "type": "string", "jsonPath": ".metadata.uid", "priority": 1}
    patch = [{"op": "add", "path": "/spec/versions/0/additionalPrinterColumns/-", "value": column}]
    tenant.control_plane.kubectl("patch", "crd", CRD_NAME, "--type=json", "-p", json.dumps(patch))
    try:
        wait_for("the new column", lambda: "UID" in tenant.kubectl("get", "kvc", "-o", "wide"))
        tenant.apply(small_cluster("later"))
        tenant.wait_for_child("Service/later-api")
        tenant.settle()
        assert not [write for write in tenant.writes()[len(before) :] if "small" in write]
    finally:
        install_definition(tenant.control_plane)
