"""Whether a KVCacheCluster may come in, and what its owner should know. Pure; called by `server`.

Everything that is wrong comes in one answer. What one object can be held against alone is in `spec_rules`, which every
pass repeats; what depends on other clusters, the port ledger repeats (condition PortsAllocated).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.errors import SpecError, Violation
from kvtier_operator.planning.wants import ports_needed
from kvtier_operator.spec_rules import accept
from kvtier_operator.webhook.changes import change_warnings
from kvtier_operator.webhook.host_ports import host_port_violations, host_port_warnings

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong, and what is right but worth a word. Without violations the object comes in."""

    violations: tuple[Violation, ...] = ()
    warnings: tuple[str, ...] = ()


def judge(document: Document, before: Document | None, others: Iterable[KVCacheCluster]) -> Verdict:
    """Judge a new object or a change.

    An object whose spec stays as it is comes in whatever the rules say by now: its labels and finalizers must remain
    changeable, or it could never be deleted.

    Args:
        document: as it shall be.
        before: as it is; None = it is new.
        others: valid clusters on the host network, this one not among them.
    """
    if before is not None and before.get("spec") == document.get("spec"):
        return Verdict()
    try:
        cluster = accept(document)
    except SpecError as error:
        return Verdict(error.violations)
    others = tuple(others)
    found = (*_range(cluster), *host_port_violations(cluster, others))
    warnings = (*change_warnings(_read(before), cluster), *host_port_warnings(cluster, others))
    return Verdict(found, warnings)


def _range(cluster: KVCacheCluster) -> Iterator[Violation]:
    ports, needed = cluster.transport.ports, ports_needed(cluster)
    if needed > ports.size:
        fix = f"the pods need {needed} ports, engines twice since a rollout runs two revisions; write at least that"
        yield Violation("spec.transport.ports.range.size", ports.size, fix)


def _read(before: Document | None) -> KVCacheCluster | None:
    """The former object, if there was a valid one."""
    try:
        return None if before is None else accept(before)
    except SpecError:
        return None
