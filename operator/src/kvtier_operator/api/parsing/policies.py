"""Images and policies. Pure; called by `document`."""

from __future__ import annotations

from kvtier_operator.api.choices import DeletionPolicy, Monitoring, PullPolicy, RolloutPolicy
from kvtier_operator.api.parsing.pods import read_labels
from kvtier_operator.api.pods import Images
from kvtier_operator.api.policies import NetworkPolicies, Observability, Rollout
from kvtier_operator.api.reading import Reader


def read_images(reader: Reader) -> Images:
    """Images of the pods."""
    return Images(
        default=reader.text("default"),
        engine=reader.text("engine"),
        mooncake=reader.text("mooncake"),
        router=reader.text("router"),
        etcd=reader.text("etcd"),
        pull_policy=reader.choice("pullPolicy", PullPolicy).value,
        pull_secrets=tuple(secret.text("name") for secret in reader.children("pullSecrets")),
    )


def read_rollout(reader: Reader) -> Rollout:
    """How a new revision replaces the old one."""
    return Rollout(policy=reader.choice("policy", RolloutPolicy), max_surge=reader.integer("maxSurge"))


def read_network_policies(security: Reader) -> NetworkPolicies:
    """Who may reach the pods."""
    reader = security.child("networkPolicy")
    return NetworkPolicies(enabled=reader.boolean("enabled"), allow_from=read_labels(reader, "allowFrom"))


def read_observability(reader: Reader) -> Observability:
    """Objects of the Prometheus operator."""
    return Observability(
        service_monitor=reader.choice("serviceMonitor", Monitoring),
        alerts=reader.choice("alerts", Monitoring),
        labels=read_labels(reader, "labels"),
    )


def read_deletion(reader: Reader) -> DeletionPolicy:
    """How a deleted cluster goes."""
    return reader.choice("policy", DeletionPolicy)
