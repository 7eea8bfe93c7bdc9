"""The operator that a user of kopf would write first: handlers for create, update and resume, and a timer that repairs.

It applies the same objects as `kvtier operator`, by server-side apply too, and reports how many in the status. Run by
`bench/operator_scale.py` with ``kopf run``; its numbers are the reference there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kopf
import yaml
from kvtier_operator.api import API_VERSION, KIND, PLURAL, parse
from kvtier_operator.controller.credentials import login
from kvtier_operator.controller.dry_run import render
from kvtier_operator.controller.kube_client import KubeClient

REPAIR_EVERY_S = 60.0
"""As often as examples of such operators repair what was changed by hand."""

_client = KubeClient(login)


@kopf.on.startup()
async def connect(**_: Any) -> None:
    """Open the session that all handlers share."""
    await _client.__aenter__()


@kopf.on.create(PLURAL)
@kopf.on.update(PLURAL)
@kopf.on.resume(PLURAL)
@kopf.timer(PLURAL, interval=REPAIR_EVERY_S)
async def reconcile(body: kopf.Body, **_: Any) -> None:
    """Apply every object, whatever there is already, and say how far the status is."""
    document: Mapping[str, Any] = dict(body)
    applied = 0
    for manifest in yaml.safe_load_all(render(parse(document))):
        if manifest["kind"] not in {"ServiceMonitor", "PodMonitor", "PrometheusRule"}:
            await _client.apply(manifest, force=True)
            applied += 1
    metadata = {"name": document["metadata"]["name"], "namespace": document["metadata"]["namespace"]}
    status = {"observedGeneration": document["metadata"]["generation"], "phase": "Pending"}
    await _client.apply_status({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status})
