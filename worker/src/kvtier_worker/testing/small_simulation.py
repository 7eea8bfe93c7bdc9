"""The simulation and the prompt that tests of one behaviour of the engine thread start from."""

from __future__ import annotations

from dataclasses import replace

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.testing.simulation import Simulation
from kvtier_worker.testing.workers import FakeWorkerGroup

PROMPT = list(range(100, 130))
"""Seven full blocks of `SETTINGS` and two tokens."""
SETTINGS = WorkerSettings(model="models/tiny", block_size=4, enable_kvcache_store=True)


def simulation(*, workers: FakeWorkerGroup | None = None, **flags: object) -> Simulation:
    """An engine with all three tiers that has not turned yet.

    Args:
        workers: None = one rank that fails at nothing.
        flags: settings other than `SETTINGS`.
    """
    return Simulation(replace(SETTINGS, **flags), workers or FakeWorkerGroup())  # type: ignore[arg-type]
