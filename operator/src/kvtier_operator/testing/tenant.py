"""What a user of one namespace does and sees, and what the operator wrote there. IO; for tests."""

from __future__ import annotations

import json
import time
from http import HTTPStatus
from typing import Any

import yaml

from kvtier_operator.testing.api_client import RequestFailed
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.installation import OPERATOR
from kvtier_operator.testing.waiting import PATIENCE_S, wait_for

KINDS = "sts,deploy,svc,cm,sa,pdb,netpol"
OURS = "app.kubernetes.io/managed-by=kvtier-operator"
QUIET_S = 1.5
_POLL_S = 0.3


class Tenant:
    """Works in one namespace with a cluster's definition installed.

    Args:
        control_plane: where.
        namespace: that exists.
        kinds: of our objects, as ``kubectl`` takes them.
    """

    def __init__(self, control_plane: ControlPlane, namespace: str, kinds: str = KINDS) -> None:
        self.control_plane = control_plane
        self.namespace = namespace
        self._kinds = kinds

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """What ``kubectl`` prints in this namespace."""
        return self.control_plane.kubectl(*arguments, "-n", self.namespace, stdin=stdin)

    def apply(self, *manifests: dict[str, Any]) -> None:
        """As ``kubectl apply`` does."""
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(manifests))

    def items(self, kinds: str, *options: str) -> list[dict[str, Any]]:
        """All objects of these kinds."""
        listed: list[dict[str, Any]] = json.loads(self.kubectl("get", kinds, *options, "-o", "json"))["items"]
        return listed

    def read(self, path: str) -> dict[str, Any] | None:
        """One object; None = there is none.

        Args:
            path: below the core API of the namespace, e.g. ``services/small-api``; or whole, from ``/``.
        """
        try:
            return self.control_plane.api.get(self.path(path))
        except RequestFailed as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    def path(self, path: str) -> str:
        """Whole path of an object of the core API in the namespace."""
        return path if path.startswith("/") else f"/api/v1/namespaces/{self.namespace}/{path}"

    # clusters

    def cluster(self, name: str) -> dict[str, Any]:
        """A KVCacheCluster; empty = there is none."""
        return self.read(f"/apis/kvtier.dev/v1alpha1/namespaces/{self.namespace}/kvcacheclusters/{name}") or {}

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """One condition of a cluster; empty = not told."""
        return _condition(self.cluster(name), kind)

    def is_true(self, name: str, kind: str) -> bool:
        """Whether a condition is true of the spec that stands now."""
        body = self.cluster(name)
        found = _condition(body, kind)
        current = found.get("observedGeneration") == body.get("metadata", {}).get("generation")
        return bool(current and found["status"] == "True")

    def is_false(self, name: str, kind: str, *words: str) -> bool:
        """Whether a condition is false, with all these words in its reason and message."""
        found = self.condition(name, kind)
        return found.get("status") == "False" and all(word in found["reason"] + found["message"] for word in words)

    # children

    def children(self) -> dict[str, dict[str, Any]]:
        """Our objects by KIND/NAME."""
        return {f"{item['kind']}/{item['metadata']['name']}": item for item in self.items(self._kinds, "-l", OURS)}

    def wait_for_child(self, name: str, patience_s: float = PATIENCE_S) -> None:
        """Until there is one of our objects by its KIND/NAME."""
        wait_for(name, lambda: name in self.children(), patience_s)

    def versions(self) -> dict[str, str]:
        """Resource versions of our objects by KIND/NAME."""
        return {name: item["metadata"]["resourceVersion"] for name, item in self.children().items()}

    def changed_since(self, before: dict[str, str]) -> set[str]:
        """Which of our objects are new or other than in those ``versions``."""
        return {name for name, version in self.versions().items() if version != before.get(name)}

    # the operator

    def writes(self) -> list[str]:
        """What the operator wrote in this namespace so far."""
        return [
            f"{write.verb} {write.resource}/{write.name} {write.code}"
            for write in self.control_plane.writes(OPERATOR)
            if write.namespace == self.namespace
        ]

    def settle(self) -> None:
        """Wait until the operator writes no more, and the controllers of Kubernetes change no child.

        Raises:
            AssertionError: that did not happen in time.
        """
        seen, since = (self.writes(), self.versions()), time.monotonic()
        deadline = since + PATIENCE_S
        while time.monotonic() - since < QUIET_S:
            time.sleep(_POLL_S)
            if (now := (self.writes(), self.versions())) != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() > deadline:
                msg = f"the operator does not stop writing: {seen[0][-10:]}"
                raise AssertionError(msg)


def _condition(body: dict[str, Any], kind: str) -> dict[str, Any]:
    conditions = body.get("status", {}).get("conditions", [])
    found: dict[str, Any] = next((item for item in conditions if item["type"] == kind), {})
    return found
