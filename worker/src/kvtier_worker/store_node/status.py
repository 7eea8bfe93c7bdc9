"""What a storage node tells about itself: its state, and the numbers of /metrics.

Written by one thread, read by many.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, generate_latest


class NodeState(StrEnum):
    """From start to end, in this order; DEGRADED and READY alternate."""

    WAITING = "waiting_for_master"
    MOUNTING = "mounting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    UNMOUNTING = "unmounting"


class NodeStatus:
    """State and metrics of one node."""

    def __init__(self, segment_bytes: int, clock: Callable[[], float]) -> None:
        started = clock()
        self._state = NodeState.WAITING
        self.registry = CollectorRegistry()
        self._state_metric = Enum(
            "kvtier_store_node_state",
            "What the node is doing",
            states=[state.value for state in NodeState],
            registry=self.registry,
        )
        Gauge("kvtier_store_node_segment_bytes", "Memory given to the store", registry=self.registry).set(segment_bytes)
        uptime = Gauge("kvtier_store_node_uptime_seconds", "Seconds since the start", registry=self.registry)
        uptime.set_function(lambda: clock() - started)
        self.canary_seconds = Histogram(
            "kvtier_store_node_canary_seconds", "Time of a test read", registry=self.registry
        )
        self.canary_failures = Counter(
            "kvtier_store_node_canary_failures", "Test reads that failed, by reason", ["reason"], registry=self.registry
        )
        self.state = NodeState.WAITING

    @property
    def state(self) -> NodeState:
        """What the node is doing."""
        return self._state

    @state.setter
    def state(self, state: NodeState) -> None:
        self._state = state
        self._state_metric.state(state.value)

    @property
    def is_ready(self) -> bool:
        """Whether objects can be written to and read from this node."""
        return self._state is NodeState.READY

    def exposition(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)
