"""Names of the labels, annotations and the finalizer on objects of the operator. Pure.

Builders set them, the informer selects and reads them, people search by them. They are part of the API: never renamed.
"""

from __future__ import annotations

from typing import Final

from kvtier_operator.api import GROUP

MANAGER: Final = "kvtier-operator"
"""Field manager of children, and value of `MANAGED_BY`."""
STATUS_MANAGER: Final = "kvtier-operator-status"
"""Field manager of the status, so that neither takes fields of the other."""

NAME: Final = "app.kubernetes.io/name"
INSTANCE: Final = "app.kubernetes.io/instance"
COMPONENT: Final = "app.kubernetes.io/component"
PART_OF: Final = "app.kubernetes.io/part-of"
MANAGED_BY: Final = "app.kubernetes.io/managed-by"

CLUSTER: Final = f"{GROUP}/cluster"
ROLE: Final = f"{GROUP}/role"
POOL: Final = f"{GROUP}/pool"
REVISION: Final = f"{GROUP}/revision"
LANE: Final = f"{GROUP}/lane"
MASTER_ROLE: Final = f"{GROUP}/master-role"
"""On the pod of the leading master; the leader Service selects it."""
LEADER: Final = "leader"
"""Value of `MASTER_ROLE`."""

POD_INDEX: Final = "apps.kubernetes.io/pod-index"
"""Ordinal of a StatefulSet's pod; Kubernetes sets it."""

APPLIED_HASH: Final = f"{GROUP}/applied-hash"
PORT_BLOCK: Final = f"{GROUP}/port-block"
DRAIN_JOB: Final = f"{GROUP}/drain-job"
DRAIN_SINCE: Final = f"{GROUP}/drain-since"
APPROVE: Final = f"{GROUP}/approve"

FINALIZER: Final = f"{GROUP}/drain"
