"""Logging of every process: one line per state change, the event first, then ``key=value`` fields, on stderr.

    12:04:31.207 engine   serving url=http://127.0.0.1:8010 model=smollm2 device_blocks=512

Values with spaces are quoted, so that a line can be cut into fields again. Per-step lines are DEBUG.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

_LINE = "%(asctime)s.%(msecs)03d {process} %(message)s"
_PROBLEM = "%(asctime)s.%(msecs)03d {process} %(levelname)s %(message)s"
_TIME = "%H:%M:%S"
_USUAL = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
"""What every record has; the rest came as ``extra`` and is shown as fields."""


class _LevelWhenItMatters(logging.Formatter):
    """Shows the level only from WARNING on: most lines are INFO, and a word on every line hides the few others."""

    def __init__(self, process: str) -> None:
        super().__init__(_LINE.format(process=process), _TIME)
        self._problem = logging.Formatter(_PROBLEM.format(process=process), _TIME)

    def format(self, record: logging.LogRecord) -> str:
        line = self._problem.format(record) if record.levelno >= logging.WARNING else super().format(record)
        fields = {key: value for key, value in vars(record).items() if key not in _USUAL}
        return line if not fields else f"{line} {_joined(fields)}"


def configure_logging(process: str, level: int = logging.INFO) -> None:
    """Send the root logger's lines to stderr. Called once, by a process's main.

    Args:
        process: who speaks, e.g. ``engine`` or ``rank 0``; part of every line.
        level: least level that is written.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LevelWhenItMatters(f"{process:8}"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def event(logger: logging.Logger, name: str, /, *, level: int = logging.INFO, **fields: object) -> None:
    """Log ``name`` and its fields as one line."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", f"{name} {_joined(fields)}" if fields else name)


def _joined(fields: Mapping[str, object]) -> str:
    return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _quoted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    plain = text and text.isprintable() and not any(char in text for char in " \"'=")
    return text if plain else repr(text)
