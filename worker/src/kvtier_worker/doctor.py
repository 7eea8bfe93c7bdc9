"""``kvtier doctor``: what this machine offers, what is missing, and what to do about it.

Works without torch or mooncake. Exit 0 when everything required is there, 1 when not, 2 for bad flags.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from kvtier_worker.machine.facts import collect
from kvtier_worker.machine.findings import Finding, Level, judge

_USAGE = """usage: kvtier doctor [--json]

Checks Python packages, the Mooncake wheel and its system libraries, memory limits, huge pages, RDMA devices, GPUs
and the default ports, and says what to do. Exit 1 when something required is missing.

  --json  Print a JSON object instead of the table."""
_EXIT_MISSING = 1
_EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        sys.stdout.write(_USAGE + "\n")
        return 0
    unknown = [word for word in words if word != "--json"]
    if unknown:
        sys.stderr.write(f"kvtier doctor: unknown flag {unknown[0]}; only --json exists\n")
        return _EXIT_USAGE
    findings = judge(collect(os.environ))
    sys.stdout.write((as_json(findings) if words else as_table(findings)) + "\n")
    return _EXIT_MISSING if worst(findings) is Level.FAIL else 0


def worst(findings: Sequence[Finding]) -> Level:
    """The gravest level."""
    levels = {finding.level for finding in findings}
    return next((level for level in (Level.FAIL, Level.WARN) if level in levels), Level.OK)


def as_json(findings: Sequence[Finding]) -> str:
    """``{"level": …, "findings": [{"level", "subject", "found", "fix"}]}``."""
    return json.dumps({"level": worst(findings), "findings": [dataclasses.asdict(one) for one in findings]}, indent=2)


def as_table(findings: Sequence[Finding]) -> str:
    """One line a finding, its fix on the next one, a summary at the end."""
    width = max(len(finding.subject) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.level:4}  {finding.subject:{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':4}  {'':{width}}  → {finding.fix}")
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    lines.append("")
    lines.append(f"{counts[Level.OK]} OK, {counts[Level.WARN]} warnings, {counts[Level.FAIL]} missing")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
