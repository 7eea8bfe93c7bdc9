"""The port to the Kubernetes API: what the controller needs of it, as a Protocol. `kube_client` implements it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtier_operator.kinds import Kind
from kvtier_operator.observed import Manifest


@dataclass(frozen=True, slots=True)
class Listed:
    """What a list says of one object when only its metadata is asked for.

    Attributes:
        version: its resourceVersion.
    """

    namespace: str
    name: str
    uid: str
    version: int
    labels: Mapping[str, str] = field(default_factory=dict)


class Cluster(Protocol):
    """The Kubernetes API. Every call is one request that ends in bounded time; nothing is repeated.

    Each raises `ApiError`, as its subclasses say; a call that changes something is made only by the leader.
    """

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """The object, or None when there is none."""

    def list_metadata(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[Listed]:
        """All objects with these labels; of all namespaces if ``namespace`` is empty. Several requests."""

    async def serves(self, kind: Kind) -> bool:
        """True when the API server knows the kind."""

    async def apply(self, manifest: Manifest, *, force: bool) -> Manifest:
        """Server-side apply of the whole intent.

        Args:
            manifest: a ``metadata.uid`` in it is a precondition: the object exists and has this uid.
            force: the object may exist, and fields that others own are taken; without it the object must be new, and an
                existing one is an `ApiConflict` and stays as it was.

        Returns:
            The object as it now stands.
        """

    async def apply_status(self, manifest: Manifest) -> Manifest:
        """Server-side apply of ``status``, under a field manager of its own."""

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        """Merge patch. ``metadata.uid`` or ``metadata.resourceVersion`` in it are preconditions."""

    async def create(self, kind: Kind, namespace: str, manifest: Manifest) -> Manifest:
        """Make an object that does not exist; `ApiConflict` if it does."""

    async def replace(self, kind: Kind, namespace: str, name: str, manifest: Manifest) -> Manifest:
        """Write the whole object if it still has the manifest's resourceVersion."""

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> Manifest | None:
        """Delete the object if it still has this uid; its children go in the background.

        Returns:
            The object if it lives on for a while (graceful deletion, finalizers), else None.
        """
