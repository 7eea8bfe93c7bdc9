"""Everything that a pass decides, put together: plan, builders, status. Pure; called by the loop of passes.

KVCacheCluster + Observed ──plan──▶ actions
                              └──▶ Progress ──status──▶ the object's status
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.errors import LedgerError, SpecError
from kvtier_operator.observed import Manifest, Observed
from kvtier_operator.planning.actions import Plan
from kvtier_operator.planning.plan import Builders, plan
from kvtier_operator.planning.revision import revision_of
from kvtier_operator.resources.objects.children import children
from kvtier_operator.status import damaged_ledger_status, invalid_status, status_of

BUILDERS: Final = Builders(revision_of, children, status_of)


def reconcile(cluster: KVCacheCluster, observed: Observed) -> Plan:
    """What to do now about one cluster, and the status that it should have."""
    return plan(cluster, observed, BUILDERS)


def refuse(body: Manifest, error: SpecError | LedgerError, now: float) -> Mapping[str, Any]:
    """The status of an object whose spec is invalid or whose ports are not known; its children are left alone.

    Args:
        body: the object as the API server has it.
        error: everything that is wrong with it.
        now: seconds since the epoch.
    """
    if isinstance(error, LedgerError):
        return damaged_ledger_status(body, error, now)
    return invalid_status(body, error, now)
