"""Logging of the operator: one line per change, the event first, then ``key=value`` fields, on stderr.

2026-01-02T10:04:31Z applied cluster=llm/qwen object=StatefulSet/qwen-master why="the spec changed"
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_LINE = "%(asctime)s %(message)s"
_PROBLEM = "%(asctime)s %(levelname)s %(message)s"
_TIME = "%Y-%m-%dT%H:%M:%SZ"


class _LevelWhenItMatters(logging.Formatter):
    """Names the level from WARNING on only: most lines are INFO."""

    def __init__(self) -> None:
        super().__init__(_LINE, _TIME)
        self.converter = time.gmtime
        self._problem = logging.Formatter(_PROBLEM, _TIME)
        self._problem.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        return self._problem.format(record) if record.levelno >= logging.WARNING else super().format(record)


def configure_logging(level: int = logging.INFO) -> None:
    """Send the root logger's lines to stderr. Called once, by the main function."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LevelWhenItMatters())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf tells of every event that it has handed over; what matters of it comes as a warning.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # What it says of every single failed request, the lease and the lists say once.
    logging.getLogger("kopf._cogs.clients").setLevel(logging.CRITICAL)
    # It runs beside the main thread and complains that it gets no signals there.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)


def event(logger: logging.Logger, name: str, /, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log ``name`` and its fields as one line."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", " ".join((name, *(f"{key}={_quoted(value)}" for key, value in fields.items()))))


def _quoted(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not any(char in text for char in " \"'=")
    return text if plain else json.dumps(text, ensure_ascii=False)
