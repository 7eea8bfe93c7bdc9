"""A Kubernetes API that fails when it is told to: wraps any `cluster.Cluster`, also a real one."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from kvtier_operator.cluster import Cluster, Listed
from kvtier_operator.errors import ApiConflict, ApiUnavailable
from kvtier_operator.kinds import Kind
from kvtier_operator.observed import Manifest


class Fault(Enum):
    """What goes wrong with a write."""

    NONE = auto()
    CONFLICT = auto()
    BUSY = auto()
    """429 with Retry-After."""
    BROKEN = auto()
    """500."""
    LOST_BEFORE = auto()
    """No answer; nothing was done."""
    LOST_AFTER = auto()
    """No answer, although it was done."""
    CRASH_AFTER = auto()
    """This process dies right after the write."""


class Crash(BaseException):
    """The process would be dead now."""


@dataclass(slots=True)
class FaultyCluster:
    """Implements `Cluster`; each write takes the next fault, then none.

    Attributes:
        inner: does the work.
        faults: to come.
        writes: how many were tried.
        before: called before each write.
    """

    inner: Cluster
    faults: deque[Fault] = field(default_factory=deque)
    writes: int = 0
    before: Callable[[str], None] = lambda _verb: None

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """See `Cluster.get`."""
        return await self.inner.get(kind, namespace, name)

    def list_metadata(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[Listed]:
        """See `Cluster.list_metadata`."""
        return self.inner.list_metadata(kind, namespace, selector)

    async def serves(self, kind: Kind) -> bool:
        """See `Cluster.serves`."""
        return await self.inner.serves(kind)

    async def apply(self, manifest: Manifest, *, force: bool) -> Manifest:
        """See `Cluster.apply`."""
        fault = self._next("apply")
        return self._after(fault, await self.inner.apply(manifest, force=force))

    async def apply_status(self, manifest: Manifest) -> Manifest:
        """See `Cluster.apply_status`."""
        fault = self._next("apply_status")
        return self._after(fault, await self.inner.apply_status(manifest))

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        """See `Cluster.merge`."""
        fault = self._next("merge")
        return self._after(fault, await self.inner.merge(kind, namespace, name, patch))

    async def create(self, kind: Kind, namespace: str, manifest: Manifest) -> Manifest:
        """See `Cluster.create`."""
        fault = self._next("create")
        return self._after(fault, await self.inner.create(kind, namespace, manifest))

    async def replace(self, kind: Kind, namespace: str, name: str, manifest: Manifest) -> Manifest:
        """See `Cluster.replace`."""
        fault = self._next("replace")
        return self._after(fault, await self.inner.replace(kind, namespace, name, manifest))

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> Manifest | None:
        """See `Cluster.delete`."""
        fault = self._next("delete")
        answer = await self.inner.delete(kind, namespace, name, uid)
        self._after(fault, answer or {})
        return answer

    def _next(self, verb: str) -> Fault:
        self.writes += 1
        self.before(verb)
        fault = self.faults.popleft() if self.faults else Fault.NONE
        if fault is Fault.CONFLICT:
            raise ApiConflict(verb, 409, "injected")
        if fault is Fault.BUSY:
            raise ApiUnavailable(verb, 429, "injected", retry_after_s=1.0)
        if fault is Fault.BROKEN:
            raise ApiUnavailable(verb, 500, "injected")
        if fault is Fault.LOST_BEFORE:
            raise ApiUnavailable(verb, 0, "injected")
        return fault

    def _after(self, fault: Fault, answer: Manifest) -> Manifest:
        if fault is Fault.LOST_AFTER:
            raise ApiUnavailable("write", 0, "injected")
        if fault is Fault.CRASH_AFTER:
            raise Crash
        return answer
