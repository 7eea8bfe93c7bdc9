"""The operator's errors.

OperatorError
├── SpecError          a KVCacheCluster is invalid; lists every violation
├── MachineError       this machine cannot run the cluster now: program missing, port busy, no model; lists all
├── ProcessFailed      a process of the cluster ended or never became ready
├── Interrupted        the user asked to stop while the cluster was starting
├── LedgerError        the record of port blocks is damaged; lists everything
├── NotLeader          another replica of the operator acts
├── ForeignObject      an object of somebody else has the name of one of ours
│   └── ForeignLedger      it stands where the port ledger should: there can be no ports
├── MasterSilent       a master did not answer (in `controller.masters`)
├── DrainUnsupported   the running master has no drain jobs (in `controller.masters`)
└── ApiError           the Kubernetes API did not do what it was asked
    ├── ApiNotFound        there is no such object or kind
    ├── ApiConflict        the object has changed, or is another one
    ├── ApiInvalid         the object will never be accepted as it is
    ├── ApiDenied          our account may not do this
    ├── NamespaceEnding    the namespace is being deleted
    └── ApiUnavailable     too busy, or no answer: try again later
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class OperatorError(Exception):
    """Base of all our errors."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing wrong with a manifest.

    Attributes:
        path: the field, as in ``spec.roles[0].tiers.host.blocksFactor``.
        value: what stands there, as the user wrote it.
        fix: what to write instead, and why.
    """

    path: str
    value: object
    fix: str

    def __str__(self) -> str:
        """Render as one line: field, value, fix."""
        return f"{self.path} = {self.value!r}: {self.fix}"


class SpecError(OperatorError):
    """A manifest is invalid.

    Attributes:
        violations: everything that is wrong, in the order of the manifest.
    """

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(str(violation) for violation in self.violations))


class MachineError(OperatorError):
    """The manifest is right but this machine cannot run it now.

    Attributes:
        problems: one sentence each, with what to do.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class ProcessFailed(OperatorError):
    """A process ended by itself or did not become ready in time.

    Attributes:
        name: of the process.
        log_tail: the last lines that it wrote.
    """

    def __init__(self, name: str, reason: str, log_tail: Sequence[str]) -> None:
        self.name = name
        self.log_tail = tuple(log_tail)
        super().__init__(f"{name} {reason}")


class Interrupted(OperatorError):
    """Asked to stop before the cluster was ready."""


class LedgerError(OperatorError):
    """The record of port blocks is damaged. Nothing is allocated until it is mended, lest two pods get one port.

    Attributes:
        problems: one sentence each: entry, value, what is wrong with it.
    """

    def __init__(self, problems: Sequence[str], fix: str) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join((*self.problems, fix)))


class NotLeader(OperatorError):
    """Another replica of the operator acts, or this one may not any more: nothing was written."""


class ForeignObject(OperatorError):
    """An object of somebody else has the name of one of ours. It is left alone."""


class ForeignLedger(ForeignObject):
    """The object in the place of the port ledger is not ours, so that there can be no ports."""


class ApiError(OperatorError):
    """The Kubernetes API did not do what it was asked.

    Attributes:
        status: HTTP status; 0 = no answer.
        message: in the server's words.
        retry_after_s: how long the server asks to wait; 0 = it did not say.
    """

    def __init__(self, what: str, status: int, message: str, retry_after_s: float = 0.0) -> None:
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        super().__init__(f"{what}: {status or 'no answer'} {message}".strip())


class ApiNotFound(ApiError):
    """There is no such object or kind."""


class ApiConflict(ApiError):
    """The object is not the one that we meant any more: other version, other uid, or fields of somebody else."""


class ApiInvalid(ApiError):
    """The server will not accept this object, however often it is sent."""

    @property
    def immutable(self) -> bool:
        """A field changed that may never change, e.g. of a StatefulSet."""
        return any(words in self.message for words in ("immutable", "updates to statefulset spec"))


class ApiDenied(ApiError):
    """Our account may not do this, or is not known."""


class NamespaceEnding(ApiError):
    """The namespace is being deleted: nothing new can be made in it."""


class ApiUnavailable(ApiError):
    """The server has no time, or does not answer: to be tried again later."""
