"""What every bench ends with: ``results/NAME.json`` and the same numbers as a table.

A bench compares two numbers of one run and says which ratio is the aim. ``ok`` is None where there is no aim, only a
number worth keeping.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    "kvtier",
    "mooncake-transfer-engine-non-cuda",
    "msgspec",
    "numpy",
    "pyzmq",
    "torch",
    "transformers",
    "xxhash",
)


@dataclass(frozen=True, slots=True)
class Result:
    """One line of a report.

    Attributes:
        metric: what was measured, with its unit and conditions.
        ours: our number.
        reference: what it is held against, measured in the same run or stated by the bench; None = nothing.
        ratio: ours / reference; None without a reference.
        target: the aim in words, e.g. ``<= 1.10``; empty = none.
        ok: whether the aim is met; None without one.
    """

    metric: str
    ours: float
    reference: float | None
    ratio: float | None
    target: str
    ok: bool | None


def compare(
    metric: str,
    ours: float,
    reference: float | None = None,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Result:
    """A result whose aim, if any, bounds ours / reference; without a reference it bounds ours."""
    ratio = ours / reference if reference else None
    value = ours if reference is None else ratio
    bounds = [(">=", at_least), ("<=", at_most)]
    target = ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
    if not target or value is None:
        return Result(metric, ours, reference, ratio, target, None)
    within = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    return Result(metric, ours, reference, ratio, target, within)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "load": round(os.getloadavg()[0], 2),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """Python and the packages that matter for speed, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_report(name: str, results: Sequence[Result], command: str) -> Path:
    """Write ``results/NAME.json``, print the table, return the path.

    Args:
        name: of the bench.
        results: in the order to show.
        command: what to type to measure again.
    """
    report = {
        "machine": machine(),
        "versions": versions(),
        "command": command,
        "results": [asdict(result) for result in results],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    print(f"\n{path}")
    return path


def table(results: Sequence[Result]) -> str:
    """The results as aligned text."""
    marks = {True: "ok", False: "MISSED", None: ""}
    rows = [("metric", "ours", "reference", "ratio", "target", "")]
    rows += [
        (r.metric, _number(r.ours), _number(r.reference), _number(r.ratio), r.target, marks[r.ok]) for r in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _field(path: str, name: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
