"""Names of a cluster's children, and where their pods are found. Pure.

They are part of the API: people type them, pods dial them, and a renamed child would be another one.
"""

from __future__ import annotations

from typing import Final

HOST_LEDGER: Final = "kvtier-host-ports"
"""ConfigMap, in the operator's namespace, with the port blocks of all clusters on the host network."""


def etcd_set(cluster: str) -> str:
    """StatefulSet and headless Service of the managed etcd."""
    return f"{cluster}-etcd"


def master_set(cluster: str) -> str:
    """StatefulSet and headless Service of the masters."""
    return f"{cluster}-master"


def leader_service(cluster: str) -> str:
    """Service of the master that leads."""
    return f"{cluster}-leader"


def store_set(cluster: str, pool: str) -> str:
    """StatefulSet and headless Service of a pool."""
    return f"{cluster}-store-{pool}"


def engine_set(cluster: str, role: str, revision: str) -> str:
    """StatefulSet of one role in one revision, and the ConfigMap of its slots."""
    return f"{cluster}-{role}-{revision}"


def engine_service(cluster: str, role: str) -> str:
    """Headless Service of a role's engines, whatever their revision."""
    return f"{cluster}-{role}"


def router_deployment(cluster: str) -> str:
    """Deployment and Service of the router."""
    return f"{cluster}-router"


def api_service(cluster: str) -> str:
    """Service of the OpenAI API."""
    return f"{cluster}-api"


def ledger_config(cluster: str) -> str:
    """ConfigMap with the port blocks of a cluster on the pod network."""
    return f"{cluster}-ports"


def pod_name(workload: str, slot: int) -> str:
    """A StatefulSet's pod."""
    return f"{workload}-{slot}"


def pod_host(pod: str, service: str, namespace: str) -> str:
    """Name at which others reach a StatefulSet's pod, through every restart.

    The cluster's domain is left out, since it differs; every pod's resolver adds it.
    """
    return f"{pod}.{service_host(service, namespace)}"


def service_host(service: str, namespace: str) -> str:
    """Name at which others reach a Service; without the cluster's domain, as `pod_host`."""
    return f"{service}.{namespace}.svc"


def network_policy(cluster: str, component: str) -> str:
    """NetworkPolicy of a component's pods."""
    return f"{cluster}-{component}"


def monitor(cluster: str) -> str:
    """ServiceMonitor and PrometheusRule."""
    return cluster
