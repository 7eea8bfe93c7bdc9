"""How the operator reaches the API server: the service account of its pod, else a kubeconfig. IO, by kopf."""

from __future__ import annotations

from typing import Any

import kopf

from kvtier_operator.errors import MachineError

_HOW = "set KUBECONFIG to a file that `kubectl get ns` works with, or run the operator in a pod with a service account"


def login(**_: Any) -> kopf.ConnectionInfo:
    """Read the credentials anew, since tokens of service accounts change.

    Raises:
        MachineError: there are none, or the kubeconfig cannot be used.
    """
    settings = kopf.OperatorSettings()
    try:
        found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    except (OSError, KeyError, TypeError, AttributeError, ValueError, kopf.LoginError) as error:
        raise MachineError([f"the kubeconfig cannot be used ({error!r}): {_HOW}"]) from error
    if found is None:
        raise MachineError([f"no Kubernetes API is known: {_HOW}"])
    if not found.server:
        raise MachineError([f"the kubeconfig's current context names no server: {_HOW}"])
    known = (found.token, found.username, found.certificate_path, found.certificate_data)
    if found.server.startswith("https:") and not any(known):
        what = "has neither token nor certificate (commands that fetch one are not run)"
        raise MachineError([f"the user of the kubeconfig's current context {what}: {_HOW}"])
    return found
