"""Command lines and configuration files of a throw-away control plane. Pure; used by `control_plane`.

Everything listens on loopback only. The controller manager and the scheduler serve nothing: what they do shows in the
API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier_operator.testing.pki import Pki

HOST = "127.0.0.1"
SERVICE_RANGE = "10.96.0.0/16"
SERVER_NAMES = ("DNS:localhost", "DNS:kubernetes.default.svc", f"IP:{HOST}", "IP:10.96.0.1")

# The defaults (20 a second) make a thousand objects take minutes.
_GENEROUS = ("--kube-api-qps=300", "--kube-api-burst=600")
_UNSERVED = ("--leader-elect=false", "--secure-port=0")

AUDIT_LOG = "audit.log"
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
        {"level": "None"},
    ],
}
"""Every write and nothing else: tests count the writes of a user."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback ports of one control plane."""

    etcd: int
    etcd_peers: int
    api: int


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who can ask the API server, with a token.

    Attributes:
        name: as RBAC knows it; ``system:serviceaccount:NAMESPACE:NAME`` acts as that service account.
        groups: of RBAC; ``system:masters`` may do everything.
    """

    name: str
    groups: tuple[str, ...] = ()


def etcd_command(program: Path, data: Path, ports: Ports) -> list[str]:
    """Etcd of one member that never waits for the disk."""
    clients, peers = f"http://{HOST}:{ports.etcd}", f"http://{HOST}:{ports.etcd_peers}"
    return [
        str(program),
        f"--data-dir={data}",
        "--unsafe-no-fsync",
        "--log-level=warn",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
    ]


def apiserver_command(program: Path, folder: Path, pki: Pki, ports: Ports) -> list[str]:
    """The API server with RBAC, tokens from ``folder/tokens.csv`` and an audit log of writes."""
    return [
        str(program),
        f"--etcd-servers=http://{HOST}:{ports.etcd}",
        f"--bind-address={HOST}",
        f"--advertise-address={HOST}",
        f"--secure-port={ports.api}",
        # Endpoints of the service "kubernetes" may not be loopback addresses.
        "--endpoint-reconciler-type=none",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        f"--tls-cert-file={pki.server}",
        f"--tls-private-key-file={pki.server_key}",
        f"--client-ca-file={pki.ca}",
        f"--service-account-key-file={pki.service_account_key}",
        f"--service-account-signing-key-file={pki.service_account_key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--audit-policy-file={folder / 'audit-policy.json'}",
        f"--audit-log-path={folder / AUDIT_LOG}",
    ]


def controller_manager_command(program: Path, kubeconfig: Path, pki: Pki) -> list[str]:
    """The built-in controllers, all as one user: credentials for each would only delay the start."""
    return [
        str(program),
        f"--kubeconfig={kubeconfig}",
        f"--service-account-private-key-file={pki.service_account_key}",
        f"--root-ca-file={pki.ca}",
        *_UNSERVED,
        *_GENEROUS,
    ]


def scheduler_command(program: Path, kubeconfig: Path) -> list[str]:
    """The scheduler."""
    return [str(program), f"--kubeconfig={kubeconfig}", *_UNSERVED, *_GENEROUS]


def kubeconfig(server: str, ca_data: str, token: str) -> str:
    """A kubeconfig; JSON, which is YAML too.

    Args:
        server: URL.
        ca_data: the certificate in base64.
        token: of the user.
    """
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "kvtier", "cluster": {"server": server, "certificate-authority-data": ca_data}}],
            "users": [{"name": "kvtier", "user": {"token": token}}],
            "contexts": [
                {"name": "kvtier", "context": {"cluster": "kvtier", "user": "kvtier", "namespace": "default"}}
            ],
            "current-context": "kvtier",
        },
        indent=1,
    )


def token_file(users: Sequence[User], tokens: Mapping[str, str]) -> str:
    """Lines of ``--token-auth-file``."""
    return "".join(f'{tokens[user.name]},{user.name},{user.name},"{",".join(user.groups)}"\n' for user in users)
