"""The worker's errors.

    KVTierError
    ├── ConfigError         the user's settings cannot work; lists every violation; exit code 2
    ├── StoreUnavailable    the store cannot be reached at start (at run time it is a miss, never an error)
    ├── TransferFailed      a copy failed or was aborted; the step that needed it must not compute
    ├── ProtocolError       a message between our own processes makes no sense
    ├── WorkerDied          a worker process is gone
    ├── PoolExhausted       not enough free and evictable slots; the caller waits or does without
    └── IntegrityError      accounting does not add up: a bug of ours
A store miss or a partial put is a result, not an exception.
"""

from __future__ import annotations

from collections.abc import Sequence


class KVTierError(Exception):
    """Base of all our errors."""


class ConfigError(KVTierError):
    """One or more settings are invalid.

    Attributes:
        violations: one sentence each: the field, its value, the fix.
    """

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(self.violations))


class StoreUnavailable(KVTierError):
    """The store cannot be set up."""


class TransferFailed(KVTierError):
    """A copy between tiers failed or was aborted."""


class ProtocolError(KVTierError):
    """A message that our own protocol does not allow."""


class WorkerDied(KVTierError):
    """A worker process ended while the engine still needs it."""


class PoolExhausted(KVTierError):
    """Fewer slots are free or evictable than were asked for."""


class IntegrityError(KVTierError):
    """Block accounting does not add up."""
