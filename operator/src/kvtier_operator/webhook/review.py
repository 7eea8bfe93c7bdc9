"""AdmissionReview ``admission.k8s.io/v1``, read and answered. Pure; called by `server`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api import KIND
from kvtier_operator.webhook.rules import Verdict

REVIEW_API = "admission.k8s.io/v1"
_UNPROCESSABLE = 422


@dataclass(frozen=True, slots=True)
class Request:
    """What the API server asks.

    Attributes:
        uid: of the request; the answer repeats it.
        document: the object as it shall be.
        before: the object as it is; None = it is new.
    """

    uid: str
    document: Mapping[str, Any]
    before: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        """Namespace and name of the object."""
        match self.document:
            case {"metadata": {"namespace": str(namespace), "name": str(name)}}:
                return f"{namespace}/{name}"
            case _:
                return "without a name"


def read_review(body: object) -> Request | None:
    """Read a request; None if it does not ask about a KVCacheCluster."""
    match body:
        case {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {"uid": str(uid), "object": {"kind": "KVCacheCluster"} as document, **others},
        }:
            before = others.get("oldObject")
            return Request(uid, document, before if isinstance(before, Mapping) else None)
        case _:
            return None


def answer(request: Request, verdict: Verdict) -> dict[str, Any]:
    """The whole answer."""
    response: dict[str, Any] = {"uid": request.uid, "allowed": not verdict.violations}
    if verdict.warnings:
        response["warnings"] = list(verdict.warnings)
    if verdict.violations:
        lines = [f"{KIND} {request.name} is invalid:", *(f"* {one}" for one in verdict.violations)]
        response["status"] = {"code": _UNPROCESSABLE, "reason": "Invalid", "message": "\n".join(lines)}
    return {"apiVersion": REVIEW_API, "kind": "AdmissionReview", "response": response}
