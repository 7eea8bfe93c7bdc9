"""What the API server refuses, and objects that the operator cannot understand: told, waited for, and let go."""

from __future__ import annotations

import pytest
from kvtier_operator.testing.installation import small_cluster
from kvtier_operator.testing.operator_process import OperatorProcess
from kvtier_operator.testing.tenant import Tenant
from kvtier_operator.testing.waiting import wait_for

pytestmark = pytest.mark.apiserver


def test_what_cannot_be_understood_can_be_deleted(tenant: Tenant, operator: OperatorProcess) -> None:
    assert operator.running
    for name in ("invalid", "damaged"):
        tenant.apply(small_cluster(name, deletion={"policy": "Drain"}))
        tenant.wait_for_child(f"Service/{name}-api")
    wrong = small_cluster("invalid", deletion={"policy": "Drain"})
    wrong["spec"]["roles"][0]["settings"] = {"no_such_setting": 1}
    tenant.apply(wrong)
    wait_for("SpecValid=False", lambda: tenant.is_false("invalid", "SpecValid", "no_such_setting"))
    ledger = tenant.read("configmaps/damaged-ports")
    assert ledger is not None
    broken = {"data": dict.fromkeys(ledger["data"], "{broken")}
    tenant.control_plane.api.patch(tenant.path("configmaps/damaged-ports"), broken)
    wait_for("PortsAllocated=False", lambda: tenant.is_false("damaged", "PortsAllocated", "LedgerDamaged"))

    tenant.kubectl("delete", "kvc", "invalid", "damaged", "--timeout=30s")


def test_a_full_quota_is_told_and_waited_for(tenant: Tenant, operator: OperatorProcess) -> None:
    assert operator.running
    spec = {"hard": {"count/statefulsets.apps": "0"}}
    tenant.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tight"}, "spec": spec})
    wait_for("the quota", lambda: bool((tenant.read("resourcequotas/tight") or {}).get("status", {}).get("hard")))
    tenant.apply(small_cluster("small"))
    wait_for("its words", lambda: tenant.is_false("small", "Ready", "ApplyRefused", "exceeded quota: tight"))
    assert [item for item in tenant.items("events") if item["reason"] == "ApplyRefused"]
    tenant.kubectl("delete", "resourcequota", "tight")
    wait_for("the set", lambda: bool(tenant.items("sts")))
    wait_for("other words", lambda: not tenant.is_false("small", "Ready", "ApplyRefused"))
