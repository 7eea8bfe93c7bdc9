"""Operators that come, go, sleep and take turns, and an API server, namespaces and rights that do the same."""

from __future__ import annotations

import time

import pytest
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.installation import OPERATOR, OPERATOR_NAMESPACE, small_cluster
from kvtier_operator.testing.operator_process import OperatorProcess
from kvtier_operator.testing.tenant import Tenant
from kvtier_operator.testing.waiting import wait_for

STRANGER = "stranger"
"""A user of the control plane without any rights of its own."""

pytestmark = pytest.mark.apiserver


@pytest.fixture
def second_operator(installed: ControlPlane, operator: OperatorProcess) -> OperatorProcess:
    """One more, not started yet; the first leads."""
    wait_for("a leader", lambda: operator.leads)
    where = f"--operator_namespace={OPERATOR_NAMESPACE}"
    return OperatorProcess(installed.kubeconfig_of(OPERATOR), where, identity="two")


def test_of_two_operators_one_acts_and_the_other_takes_over(
    tenant: Tenant, operator: OperatorProcess, second_operator: OperatorProcess
) -> None:
    with second_operator:
        time.sleep(2.5)
        assert not second_operator.leads
        tenant.apply(small_cluster("small"))
        tenant.wait_for_child("Service/small-api")
        tenant.settle()
        assert second_operator.metric("kvtier_operator_applies_total") == 0
        assert second_operator.metric("kvtier_operator_clusters") >= 1
        before = tenant.writes()

        assert operator.stop() == 0
        wait_for("that the second leads soon after a clean end", lambda: second_operator.leads, 6)
        operator.start()
        assert not operator.leads
        second_operator.kill()
        wait_for("that the first leads again after a crash", lambda: operator.leads)
        time.sleep(1)
        assert tenant.writes() == before
        tenant.kubectl("delete", "svc", "small-api")
        tenant.wait_for_child("Service/small-api")


def test_a_restart_of_the_api_server_changes_nothing_and_hides_nothing(
    tenant: Tenant, operator: OperatorProcess
) -> None:
    """The new process of the server has forgotten what watches missed; lists show it."""
    tenant.apply(small_cluster("small"))
    tenant.wait_for_child("Service/small-api")
    tenant.settle()
    before = tenant.versions()
    tenant.control_plane.stop_apiserver()
    time.sleep(4)
    tenant.control_plane.start_apiserver()
    tenant.control_plane.api.delete(tenant.path("services/small-api"))
    tenant.wait_for_child("Service/small-api")
    wait_for("that it leads", lambda: operator.leads)
    tenant.settle()
    assert tenant.changed_since(before) == {"Service/small-api"}
    assert operator.status("/healthz") == 200


def test_an_operator_that_slept_through_a_deletion_sees_it_when_it_wakes(
    tenant: Tenant, operator: OperatorProcess
) -> None:
    tenant.apply(small_cluster("small"))
    tenant.wait_for_child("Service/small-api")
    tenant.settle()
    operator.kill()
    tenant.kubectl("delete", "svc", "small-api")
    before = tenant.versions()
    operator.start()
    tenant.wait_for_child("Service/small-api")
    tenant.settle()
    assert tenant.changed_since(before) == {"Service/small-api"}


def test_a_namespace_that_is_deleted_takes_its_cluster_along_and_nobody_else_notices(
    tenant: Tenant, operator: OperatorProcess
) -> None:
    tenant.apply(small_cluster("stays"))
    tenant.wait_for_child("Service/stays-api")
    with tenant.control_plane.namespace("doomed") as name:
        doomed = Tenant(tenant.control_plane, name)
        doomed.apply(small_cluster("goes"))
        doomed.wait_for_child("Service/goes-api")
        tenant.settle()
        before = tenant.writes()
        tenant.control_plane.kubectl("delete", "namespace", name, "--wait=false")
        wait_for("the end of the namespace", lambda: tenant.read(f"/api/v1/namespaces/{name}") is None)
    wait_for(
        "that the operator forgets it",
        lambda: not operator.metric("kvtier_operator_cluster_condition", name="goes", type="SpecValid"),
    )
    assert tenant.writes() == before
    assert operator.running


def test_an_operator_of_one_namespace_needs_rights_only_there(tenant: Tenant) -> None:
    control_plane, here = tenant.control_plane, tenant.namespace
    for where, role in ((here, "clusterrole"), (OPERATOR_NAMESPACE, "clusterrole"), (OPERATOR_NAMESPACE, "role")):
        binding = f"{STRANGER}-{role}"
        control_plane.kubectl("delete", "rolebinding", binding, "-n", where, "--ignore-not-found")
        control_plane.kubectl(
            "create", "rolebinding", binding, "-n", where, f"--{role}={OPERATOR}", f"--user={STRANGER}"
        )
    flags = (f"--namespace={here}", f"--operator_namespace={OPERATOR_NAMESPACE}")
    with (
        control_plane.namespace("other") as name,
        OperatorProcess(control_plane.kubeconfig_of(STRANGER), *flags, identity="one") as operator,
    ):
        other = Tenant(control_plane, name)
        other.apply(small_cluster("theirs"))
        tenant.apply(small_cluster("ours"))
        tenant.wait_for_child("Service/ours-api")
        wait_for("a status", lambda: tenant.condition("ours", "Ready"))
        assert other.children() == {}
        assert operator.metric("kvtier_operator_clusters") == 1
        assert operator.metric("kvtier_operator_api_requests_total", code="403") == 0
