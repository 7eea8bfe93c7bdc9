"""``kvtier status [FILE|NAME]``: what `kvtier up` runs on this machine, asked of the processes themselves.

Exit status: 0 everything is ready, 1 something is not, 2 bad arguments or an unreadable file, 3 nothing runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvtier_operator.errors import MachineError, SpecError
from kvtier_operator.local.console import say
from kvtier_operator.local.probes import get
from kvtier_operator.local.report import (
    ClusterReport,
    EngineReport,
    ProcessReport,
    ProcessState,
    SegmentReport,
    StoreReport,
    render,
)
from kvtier_operator.local.state import STATE_DIR, STATE_FILE, ClusterState, read_state
from kvtier_operator.manifest import load
from kvtier_operator.observed import Component

EXIT_READY, EXIT_NOT_READY, EXIT_USAGE, EXIT_NOTHING = 0, 1, 2, 3
_ASKED_AT_ONCE = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``kvtier status``."""
    options = _parser().parse_args(argv)
    try:
        names = [_name(options.target)] if options.target else sorted(_names(options.state_dir))
    except SpecError as error:
        say(f"kvtier status: {error}", sys.stderr)
        return EXIT_USAGE
    states, problems = _read(options.state_dir, names)
    for problem in problems:
        say(f"kvtier status: {problem}", sys.stderr)
    reports = [report_of(state) for state in states if state.runs]
    if not reports and problems:
        return EXIT_USAGE
    if not reports:
        say(f"kvtier status: {_why_nothing(options.target, options.state_dir, states)}", sys.stderr)
        return EXIT_NOTHING
    if options.json:
        text = json.dumps([dataclasses.asdict(report) for report in reports], indent=2)
    else:
        text = "\n\n".join(map(render, reports))
    say(text)
    if problems:
        return EXIT_USAGE
    return EXIT_NOT_READY if any(report.complaints for report in reports) else EXIT_READY


def _read(state_dir: Path, names: Sequence[str]) -> tuple[list[ClusterState], list[str]]:
    """What is known of these clusters, and of which files nothing can be known."""
    states: list[ClusterState] = []
    problems: list[str] = []
    for name in names:
        try:
            state = read_state(state_dir / name / STATE_FILE)
        except MachineError as error:
            problems += error.problems
        else:
            states += [state] if state else []
    return states, problems


def report_of(state: ClusterState) -> ClusterReport:
    """Ask every process of a cluster."""
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        processes = tuple(pool.map(_process, state.processes))
        engines = tuple(pool.map(_engine, _of(state, Component.ENGINE)))
    serving = next((process.state for process in processes if process.serving), None)
    return ClusterReport(
        name=state.cluster,
        pid=state.pid,
        processes=processes,
        store=_store(serving) if serving else None,
        engines=tuple(engine for engine in engines if engine),
    )


def _of(state: ClusterState, component: Component) -> Iterator[ProcessState]:
    return (process for process in state.processes if process.component == component and process.pid)


def _process(process: ProcessState) -> ProcessReport:
    reply = get(process.probe_url) if process.pid and process.probe_url else None
    if reply is None:
        return ProcessReport(process, ready=False)
    if process.component != Component.MASTER:
        return ProcessReport(process, ready=reply.ok)
    facts = reply.facts
    role = str(facts.get("role") or "no answer")
    return ProcessReport(process, ready=reply.ok, role=role, serving=facts.get("service_ready") is True)


def _engine(process: ProcessState) -> EngineReport | None:
    samples = _samples(process)
    if not samples:
        return None
    cached: dict[str, int] = {}
    for sample in samples:
        if sample.name == "prompt_tokens_cached_total":
            tier = sample.labels.get("tier", "")
            cached[tier] = cached.get(tier, 0) + int(sample.value)
    totals = {name: _sum(samples, name) for name in ("requests_total", "prompt_tokens_total")}
    return EngineReport(process.name, totals["requests_total"], totals["prompt_tokens_total"], cached)


def _store(master: ProcessState) -> StoreReport:
    samples = _samples(master)
    capacity = _by_segment(samples, "segment_total_capacity_bytes")
    used = _by_segment(samples, "segment_allocated_bytes")
    segments = (SegmentReport(name, size, used.get(name, 0)) for name, size in sorted(capacity.items()))
    return StoreReport(tuple(segments), _sum(samples, "master_key_count"))


def _samples(process: ProcessState) -> Sequence[Sample]:
    reply = get(f"{process.url}/metrics")
    if not reply.ok:
        return ()
    try:
        return [sample for family in text_string_to_metric_families(reply.text) for sample in family.samples]
    except ValueError:
        return ()  # no text of Prometheus: nothing to tell


def _sum(samples: Sequence[Sample], name: str) -> int:
    return int(sum(sample.value for sample in samples if sample.name == name))


def _by_segment(samples: Sequence[Sample], name: str) -> Mapping[str, int]:
    return {sample.labels.get("segment", ""): int(sample.value) for sample in samples if sample.name == name}


def _name(target: str) -> str:
    path = Path(target)
    is_file = os.path.isfile(path)  # noqa: PTH113 - false, too, for what is too long to be one
    return load(path).name if is_file or path.suffix in {".yaml", ".yml", ".json"} else target


def _names(state_dir: Path) -> Iterator[str]:
    return (path.parent.name for path in state_dir.glob(f"*/{STATE_FILE}"))


def _why_nothing(target: str, state_dir: Path, states: Sequence[ClusterState]) -> str:
    if states:
        ended = ", ".join(f"{state.cluster} (pid {state.pid})" for state in states)
        return f"nothing runs: `kvtier up` of {ended} was killed, and its processes ended with it"
    what = f"{_name(target)} does not run" if target else "nothing runs"
    return f"{what}: {state_dir} has no running cluster; start one with `kvtier up FILE`, or name its --state-dir"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier status",
        description="Show what `kvtier up` runs on this machine.",
        epilog="Exit status: 0 everything is ready, 1 something is not, 2 bad arguments, 3 nothing runs.",
    )
    parser.add_argument("target", metavar="FILE|NAME", nargs="?", default="", help="one cluster; default: all that run")
    parser.add_argument(
        "--state-dir", "--state_dir", type=Path, default=STATE_DIR, help="as of kvtier up (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
