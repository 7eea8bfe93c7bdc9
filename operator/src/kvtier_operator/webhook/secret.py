"""Certificates as a Secret, and the API server's trust in them as a ValidatingWebhookConfiguration. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator import labels
from kvtier_operator.api import GROUP, PLURAL, VERSION
from kvtier_operator.kinds import Kind
from kvtier_operator.observed import Manifest
from kvtier_operator.webhook.certificates import Certificates

SECRET_KIND: Final = Kind("Secret", "v1", "secrets")
CONFIGURATION_KIND: Final = Kind(
    "ValidatingWebhookConfiguration", "admissionregistration.k8s.io/v1", "validatingwebhookconfigurations"
)
SECRET_NAME: Final = "kvtier-operator-webhook"  # noqa: S105 - a name
SERVICE_NAME: Final = "kvtier-operator-webhook"
CONFIGURATION_NAME: Final = "kvtier-operator"
WEBHOOK_NAME: Final = f"{PLURAL}.{GROUP}"
WEBHOOK_PATH: Final = "/validate"

_FIELDS = {"authority": "ca.crt", "certificate": "tls.crt", "key": "tls.key"}


@dataclass(frozen=True, slots=True)
class StoredCertificates:
    """What a Secret has.

    Attributes:
        found: None when something is missing or is no text.
        ours: we made the Secret; others bring their own certificates in one, which is never written.
        version: resourceVersion that a write must name.
    """

    found: Certificates | None
    ours: bool
    version: str


def read_secret(secret: Manifest) -> StoredCertificates:
    """Read a Secret of ours or of somebody who brings certificates."""
    meta, data = secret["metadata"], secret.get("data") or {}
    ours = (meta.get("labels") or {}).get(labels.MANAGED_BY) == labels.MANAGER
    texts = {name: _decoded(data.get(key)) for name, key in _FIELDS.items()}
    found = Certificates(**texts) if all(texts.values()) else None
    return StoredCertificates(found, ours, str(meta.get("resourceVersion", "")))


def secret_of(namespace: str, certificates: Certificates, version: str = "") -> Manifest:
    """The Secret with our certificates; ``version`` is a precondition, empty = it is new."""
    meta: dict[str, Any] = {
        "name": SECRET_NAME,
        "namespace": namespace,
        "labels": {labels.NAME: "kvtier", labels.PART_OF: "kvtier", labels.MANAGED_BY: labels.MANAGER},
    }
    if version:
        meta["resourceVersion"] = version
    texts = {key: getattr(certificates, name) for name, key in _FIELDS.items()}
    data = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    return {
        "apiVersion": SECRET_KIND.api,
        "kind": SECRET_KIND.name,
        "type": "kubernetes.io/tls",
        "metadata": meta,
        "data": data,
    }


def trusted_by(configuration: Manifest) -> str:
    """Authorities, PEM, that the API server trusts for our webhook; empty = none yet."""
    client = _our_webhook(configuration).get("clientConfig") or {}
    return _decoded(client.get("caBundle"))


def with_trust(configuration: Manifest, bundle: str) -> Manifest:
    """The configuration with other authorities for our webhook; the rest stays as it is."""
    encoded = base64.b64encode(bundle.encode()).decode()
    webhooks = [
        {**one, "clientConfig": {**(one.get("clientConfig") or {}), "caBundle": encoded}}
        if one.get("name") == WEBHOOK_NAME
        else one
        for one in configuration.get("webhooks") or ()
    ]
    return {**configuration, "webhooks": webhooks}


def configuration_for(url: str, bundle: str) -> Manifest:
    """A configuration for an operator that runs outside of the cluster, where there is no Service."""
    webhook = {
        "name": WEBHOOK_NAME,
        "clientConfig": {"url": url, "caBundle": base64.b64encode(bundle.encode()).decode()},
        "rules": [
            {
                "apiGroups": [GROUP],
                "apiVersions": [VERSION],
                "resources": [PLURAL],
                "operations": ["CREATE", "UPDATE"],
                "scope": "Namespaced",
            }
        ],
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "timeoutSeconds": 5,
        "admissionReviewVersions": ["v1"],
    }
    return {
        "apiVersion": CONFIGURATION_KIND.api,
        "kind": CONFIGURATION_KIND.name,
        "metadata": {"name": CONFIGURATION_NAME, "labels": {labels.MANAGED_BY: labels.MANAGER}},
        "webhooks": [webhook],
    }


def has_our_webhook(configuration: Manifest) -> bool:
    """True when there is something to keep trusted."""
    return bool(_our_webhook(configuration))


def leads_to(configuration: Manifest, url: str) -> bool:
    """True when the API server asks at this URL."""
    return bool((_our_webhook(configuration).get("clientConfig") or {}).get("url") == url)


def _our_webhook(configuration: Manifest) -> Mapping[str, Any]:
    webhooks: Iterable[Mapping[str, Any]] = configuration.get("webhooks") or ()
    return next((one for one in webhooks if one.get("name") == WEBHOOK_NAME), {})


def _decoded(text: object) -> str:
    try:
        return base64.b64decode(text, validate=True).decode() if isinstance(text, str) else ""
    except (binascii.Error, UnicodeDecodeError):
        return ""
