"""How a plan judges a single pod. Pure."""

from __future__ import annotations

from kvtier_operator.observed import Observed, ObservedPod
from kvtier_operator.planning.actions import Emit

LONG_WAIT_S = 60.0
"""After so long somebody should be told what a pod waits for."""


def is_broken(pod: ObservedPod) -> bool:
    """True if taking it away costs nothing: it has failed, or never ran."""
    return not pod.ready and not pod.deleting and bool(pod.failure or not pod.ip)


def blocker(pod: ObservedPod) -> str:
    """Why a pod is not ready, as a clause that begins with its name."""
    if pod.deleting:
        return f"{pod.name} is terminating"
    reason = pod.failure or pod.waiting
    return f"{pod.name} is not ready" + (f" ({reason})" if reason else "")


def waiting_events(observed: Observed) -> tuple[Emit, ...]:
    """An event when pods have been waiting for a minute; told in the second minute only, then it is known."""
    waiting = [
        pod
        for pod in observed.pods
        if not pod.ready and not pod.deleting and LONG_WAIT_S <= pod.waiting_s < 2 * LONG_WAIT_S
    ]
    if not waiting:
        return ()
    first, *others = sorted(waiting, key=lambda pod: pod.name)
    more = f", and {len(others)} more," if others else ""
    return (Emit("WaitingForCapacity", f"{blocker(first)}{more} for {LONG_WAIT_S:.0f} s", warning=True),)
