"""What is known of a cluster on this machine, as records, and how `kvtier status` shows it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

TIERS = ("device", "host", "store")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process.

    Attributes:
        component: what it is for, as in the label of a pod.
        pid: 0 = not running now.
        restarts: how often it was started again after it had ended by itself.
        url: of its HTTP port; empty = it has none.
        probe_url: answers 200 when it is ready; empty = unknown.
        ports: that it binds, with what each is for.
    """

    name: str
    component: str
    pid: int
    restarts: int
    url: str
    probe_url: str
    ports: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One process.

    Attributes:
        role: what a master says of itself: ``leader``, ``standby``, ``leader_warmup``…; empty for others.
        serving: a master that answers clients.
    """

    state: ProcessState
    ready: bool
    role: str = ""
    serving: bool = False


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """Memory that one storage node gives to the store, in bytes."""

    name: str
    capacity: int
    used: int


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The store, as its serving master knows it."""

    segments: tuple[SegmentReport, ...]
    objects: int


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine answered since its start.

    Attributes:
        requests: that ended.
        prompt_tokens: of requests whose first step succeeded.
        cached: of these, taken from each tier.
    """

    name: str
    requests: int
    prompt_tokens: int
    cached: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """One running cluster.

    Attributes:
        pid: of its `kvtier up`.
        store: None when it has none, or no master serves.
    """

    name: str
    pid: int
    processes: tuple[ProcessReport, ...]
    store: StoreReport | None
    engines: tuple[EngineReport, ...]

    @property
    def has_masters(self) -> bool:
        """Whether it needs one that serves."""
        return any(process.role for process in self.processes)

    @property
    def complaints(self) -> tuple[str, ...]:
        """What is not as it should be, one sentence each."""
        found = [f"{one.state.name} is not ready" for one in self.processes if not one.ready]
        if self.has_masters and not any(one.serving for one in self.processes):
            found.append("no master serves: engines go on without the store")
        return tuple(found)


def render(report: ClusterReport) -> str:
    """Tables for people."""
    parts = [f"{report.name}: kvtier up runs it, pid {report.pid}", _table(_process_rows(report.processes))]
    if report.store:
        parts += ["", _headline(report.store), _table(_segment_rows(report.store.segments))]
    if report.engines:
        parts += ["", "share of prompt tokens by where they came from, since each engine's start"]
        parts.append(_table(_engine_rows(report.engines)))
    if report.complaints:
        parts += ["", *report.complaints]
    return "\n".join(parts)


def _process_rows(processes: Sequence[ProcessReport]) -> Iterator[tuple[str, ...]]:
    yield ("process", "ready", "pid", "restarts", "at", "role")
    for one in processes:
        state = one.state
        role = f"{one.role}{', serving' if one.serving else ''}"
        ready = "yes" if one.ready else "no"
        yield (state.name, ready, str(state.pid or "-"), str(state.restarts), state.url or "-", role)


def _headline(store: StoreReport) -> str:
    capacity = sum(segment.capacity for segment in store.segments)
    used = sum(segment.used for segment in store.segments)
    return (
        f"store: {_counted(len(store.segments), 'segment')}, {_bytes(used)} of {_bytes(capacity)} used, "
        f"{_counted(store.objects, 'object')}"
    )


def _segment_rows(segments: Sequence[SegmentReport]) -> Iterator[tuple[str, ...]]:
    yield ("segment", "capacity", "used")
    for one in segments:
        yield (one.name, _bytes(one.capacity), _bytes(one.used))


def _engine_rows(engines: Sequence[EngineReport]) -> Iterator[tuple[str, ...]]:
    yield ("engine", "requests", "prompt tokens", *TIERS, "computed")
    for one in engines:
        cached = [one.cached.get(tier, 0) for tier in TIERS]
        counts = (*cached, one.prompt_tokens - sum(cached))
        shares = (f"{count / one.prompt_tokens:.0%}" if one.prompt_tokens else "-" for count in counts)
        yield (one.name, f"{one.requests:,}", f"{one.prompt_tokens:,}", *shares)


def _table(rows: Iterator[tuple[str, ...]]) -> str:
    lines = list(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _bytes(number: float) -> str:
    unit = 0
    while number >= _STEP and unit < len(_UNITS) - 1:
        number, unit = number / _STEP, unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{number:.0f} B"
