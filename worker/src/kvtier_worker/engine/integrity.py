"""Ground truth of leases, recounted from who holds them, against what each pool believes (N2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtier_worker.core.pool import BlockPool
from kvtier_worker.engine.admission import Admission
from kvtier_worker.engine.block_manager import TieredBlockManager
from kvtier_worker.engine.frontend import PoolReport
from kvtier_worker.engine.requests import LiveRequest
from kvtier_worker.engine.writeback import WritebackJobs
from kvtier_worker.errors import IntegrityError


def device_leases(live: Iterable[LiveRequest], writebacks: WritebackJobs | None) -> Counter[int]:
    """Leases per device block that requests and write-back jobs account for."""
    held: Counter[int] = Counter()
    for request in live:
        held.update(request.held.table)
    if writebacks is not None:
        held.update(entry.item.device_block for entry in writebacks.queued())
        for job in writebacks.jobs.values():
            if job.copying:
                held.update(entry.item.device_block for entry in job.entries)
    return held


def host_leases(live: Iterable[LiveRequest], writebacks: WritebackJobs | None, admission: Admission) -> Counter[int]:
    """Leases per host slot that requests, prefetch jobs and write-back jobs account for."""
    held: Counter[int] = Counter()
    for request in live:
        held.update(request.held.pins.values())
        held.update(request.held.restoring)
        held.update(request.held.reserved.values())
    for fetch in admission.jobs.values():
        held.update(item.host_slot for item in fetch.need.plan.items)
    if writebacks is not None:
        held.update(entry.item.host_slot for entry in writebacks.queued())
        for job in writebacks.jobs.values():
            held.update(entry.item.host_slot for entry in job.entries)
    return held


def check_pools(
    blocks: TieredBlockManager,
    live: Iterable[LiveRequest],
    writebacks: WritebackJobs | None,
    admission: Admission,
) -> tuple[PoolReport, ...]:
    """One report per pool; a fault names the slot and both counts."""
    requests = list(live)
    reports = [_report("device", blocks.device, device_leases(requests, writebacks))]
    if blocks.host is not None:
        reports.append(_report("host", blocks.host.pool, host_leases(requests, writebacks, admission)))
    return tuple(reports)


def _report(name: str, pool: BlockPool, expected: Counter[int]) -> PoolReport:
    faults: list[str] = []
    try:
        pool.check_integrity()
    except IntegrityError as error:
        faults.append(str(error))
    faults += [
        f"slot {slot} has {pool.leases(slot)} leases, {expected[slot]} are accounted for"
        for slot in range(pool.num_slots)
        if pool.leases(slot) != expected[slot]
    ]
    counts = pool.counts()
    return PoolReport(name, not faults, counts.usable, counts.free, counts.leased, counts.cached, tuple(faults))
