"""Assemble RESULTS.md from results/*.json: one table a bench, the machine, the versions and the command above it.

What stands between ``<!-- notes:NAME -->`` and ``<!-- end -->`` in RESULTS.md is written by hand (why a number falls
short) and is kept.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TARGET = FOLDER / "RESULTS.md"
HEAD = """# Measured

Assembled by `bench/summary.py` from `bench/results/*.json`; `make bench` measures again. All numbers of a line are from
one run, so its **ratio** means something on another machine too; the seconds do not. The bound of a phase is its matrix
products and attention timed alone in the same run, plus the raw `batch_get_into` of its bytes for a store hit.
"""
NOTES = re.compile(r"<!-- notes:(\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
MARKS = {True: "met", False: "**missed**", None: ""}


def number(value: float | None) -> str:
    """Four significant digits."""
    return "" if value is None else f"{value:.4g}"


def section(name: str, report: dict[str, Any], notes: str) -> str:
    """One bench."""
    machine = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    versions = ", ".join(f"{key} {value}" for key, value in report["versions"].items())
    lines = [f"\n## {name}\n", f"`{report['command']}`  \n{machine}  \n{versions}\n"]
    lines.append("| metric | ours | reference | ratio | target | |")
    lines.append("|---|---|---|---|---|---|")
    for row in report["results"]:
        cells = (
            row["metric"],
            *(number(row[key]) for key in ("ours", "reference", "ratio")),
            row["target"],
            MARKS[row["ok"]],
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(f"\n<!-- notes:{name} -->\n{notes}<!-- end -->")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write RESULTS.md."""
    old = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
    notes = dict(NOTES.findall(old))
    reports = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((FOLDER / "results").glob("*.json"))}
    parts = [HEAD, *(section(name, report, notes.get(name, "")) for name, report in reports.items())]
    if not reports:
        parts.append("\nNothing measured yet.\n")
    TARGET.write_text("".join(parts), encoding="utf-8")
    print(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
