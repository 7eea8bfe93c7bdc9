"""The custom resource definition of KVCacheCluster. Pure."""

from __future__ import annotations

from typing import Any

from kvtier_operator.api.records import GROUP, KIND, PLURAL, VERSION
from kvtier_operator.api.schema.openapi import render
from kvtier_operator.api.schema.spec import DOCUMENT, SPEC
from kvtier_operator.api.schema.status import STATUS

_DATE = "date"


def custom_resource_definition() -> dict[str, Any]:
    """The whole object, as it stands in ``crds/``."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "labels": {"app.kubernetes.io/part-of": "kvtier"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["kvc"],
                "categories": ["all", "kvtier"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": _columns(),
                    "schema": {"openAPIV3Schema": _document()},
                }
            ],
        },
    }


def _document() -> dict[str, Any]:
    schema = {name: value for name, value in render(DOCUMENT).items() if name != "default"}
    properties: dict[str, Any] = {name: {"type": "string"} for name in ("apiVersion", "kind")}
    properties |= {
        "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
        "spec": render(SPEC),
        "status": render(STATUS),
    }
    return schema | {"properties": properties, "required": ["spec"]}


def _columns() -> list[dict[str, Any]]:
    return [
        _column("Phase", ".status.phase", "The conditions in one word"),
        _column("Engines", ".status.engines", "Engines that serve of those wanted"),
        _column("Leader", ".status.leader.pod", "The master that leads"),
        _column("Store", ".status.store.ready", "Storage nodes that serve of those wanted"),
        _column("Model", ".status.model.effectiveID", "Namespace of the store's keys"),
        _column("Age", ".metadata.creationTimestamp", "Since it was made", kind=_DATE),
        _column("Revision", ".status.revisions.current", "Revision of the engines", wide=True),
        _column("Masters", ".status.masters.up", "Masters that answer", wide=True),
        _column("Paused", ".spec.paused", "No child is changed", wide=True),
        _column(
            "Message", '.status.conditions[?(@.type=="Ready")].message', "Why it is ready or what is missing", wide=True
        ),
    ]


def _column(name: str, path: str, text: str, *, kind: str = "string", wide: bool = False) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": text}
    return column | ({"priority": 1} if wide else {})
