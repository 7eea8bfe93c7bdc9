"""The operator's errors.

OperatorError
├── SpecError          a KVCacheCluster is invalid; lists every violation
├── MachineError       this machine cannot run the cluster now: program missing, port busy, no model; lists all
├── ProcessFailed      a process of the cluster ended or never became ready
└── Interrupted        the user asked to stop while the cluster was starting
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
