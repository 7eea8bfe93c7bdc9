"""``kvtier store``: give memory of this machine to a Mooncake Store, tell its health, leave gracefully.

wait for the master → mount → test read → ready … SIGTERM → not ready → move objects away (if told where the master's
admin port is) → unmount → exit 0. Exit 1 when there is no master or the segment is lost, 2 for bad flags.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from types import FrameType

from kvtier_worker.contract import help_text
from kvtier_worker.errors import ConfigError, StoreUnavailable
from kvtier_worker.log import configure_logging, event
from kvtier_worker.machine.ports import answers
from kvtier_worker.mooncake_client.environment import apply_environment, client_environment
from kvtier_worker.mooncake_client.leaving import end_process
from kvtier_worker.store_node.drain import drain_segment
from kvtier_worker.store_node.http_server import StatusServer
from kvtier_worker.store_node.segment import Segment, hold_label, mount_embedded, mount_shared
from kvtier_worker.store_node.settings import StoreNodeSettings, read_settings
from kvtier_worker.store_node.status import NodeState, NodeStatus
from kvtier_worker.store_node.stop_flag import StopFlag

_LOG = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_USAGE = 2
_PROGRESS_S = 5.0
_RETRY_S = 0.5
_HUNG_S = 60.0
"""A loop that did not turn for this long hangs: longer than any time-out of Mooncake's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        sys.stdout.write(help_text(StoreNodeSettings, usage="kvtier store --host=ip:port [--flag=value ...]") + "\n")
        return 0
    try:
        settings = read_settings(words, os.environ)
    except ConfigError as error:
        for violation in error.violations:
            sys.stderr.write(f"kvtier store: {violation}\n")
        return EXIT_USAGE
    configure_logging("store")
    node = StoreNode(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, node.request_stop)
    try:
        code = node.run()
    except StoreUnavailable as error:
        event(_LOG, "store node failed", level=logging.ERROR, reason=str(error))
        code = EXIT_FAILED
    if settings.master.discovery:
        end_process(code)
    return code


class StoreNode:
    """One node, from start to end. `run` belongs to the main thread."""

    def __init__(self, settings: StoreNodeSettings) -> None:
        self._settings = settings
        self._status = NodeStatus(settings.segment_bytes, time.monotonic)
        self._stop = StopFlag()
        self._turned_at = time.monotonic()

    def request_stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler
        """Ask `run` to leave."""
        self._stop.set()

    def run(self) -> int:
        """Serve until asked to stop or the segment is lost; returns the exit code.

        Raises:
            StoreUnavailable: it could not start.
        """
        settings = self._settings
        timeout_s = settings.call_timeout / 1000
        apply_environment(client_environment(call_timeout_s=timeout_s, protocol=settings.protocol), os.environ)
        label = hold_label(settings)
        server = self._serve_status()
        try:
            segment = self._mount(label)
            if segment is None:
                return 0
            code = self._watch(segment)
            self._leave(segment, is_lost=code != 0)
            return code
        finally:
            label.close()
            server.close()

    def _serve_status(self) -> StatusServer:
        settings = self._settings
        host = settings.http_host or settings.endpoint.host
        try:
            return StatusServer(host, settings.http_port, self._status, self._is_alive)
        except OSError as error:
            raise StoreUnavailable(
                f"--http_port={settings.http_port} cannot be bound on {host} ({error.strerror}); choose a free one"
            ) from error

    def _is_alive(self) -> bool:
        return time.monotonic() - self._turned_at < _HUNG_S + self._settings.canary_interval / 1000

    def _mount(self, label: socket.socket) -> Segment | None:
        """The mounted segment once a test read worked; None when asked to stop before.

        Raises:
            StoreUnavailable: no master in time; the last reason.
        """
        deadline = time.monotonic() + self._settings.master_wait / 1000
        next_line = time.monotonic()
        while not self._stop.is_set():
            self._turned_at = time.monotonic()
            reason = self._master_problem()
            if not reason:
                try:
                    return self._try_mount(label)
                except StoreUnavailable as error:
                    reason = str(error)
            self._status.state = NodeState.WAITING
            now = time.monotonic()
            if now >= deadline:
                raise StoreUnavailable(f"gave up after {self._settings.master_wait} ms: {reason}")
            if now >= next_line:
                event(_LOG, "waiting for the master", left_s=deadline - now, reason=reason)
                next_line = now + _PROGRESS_S
            self._stop.wait(min(_RETRY_S, deadline - now))
        return None

    def _master_problem(self) -> str:
        master = self._settings.master
        if any(answers(one.host, one.port, 1.0) for one in master.endpoints):
            return ""
        return f"nobody answers at {master}; start a mooncake_master or correct --master_server_address"

    def _try_mount(self, label: socket.socket) -> Segment:
        settings = self._settings
        self._status.state = NodeState.MOUNTING
        segment: Segment
        if settings.shm_port:
            segment = mount_shared(settings, label, self._stop.is_set)
        else:
            segment = mount_embedded(settings, label)
        event(_LOG, "mounted", host=settings.host, bytes=settings.segment_bytes, shm_port=settings.shm_port or "off")
        return segment

    def _watch(self, segment: Segment) -> int:
        while True:
            self._turned_at = time.monotonic()
            if ended := segment.ended:
                event(_LOG, "segment lost", level=logging.ERROR, reason=ended)
                return EXIT_FAILED
            self._look(segment)
            if self._stop.wait(self._settings.canary_interval / 1000):
                return 0

    def _look(self, segment: Segment) -> None:
        started = time.monotonic()
        result = segment.look()
        self._status.canary_seconds.observe(time.monotonic() - started)
        before = self._status.state
        self._status.state = NodeState.READY if result.is_good else NodeState.DEGRADED
        if not result.is_good:
            self._status.canary_failures.labels(result.problem).inc()
        if self._status.state is not before:
            level = logging.INFO if result.is_good else logging.WARNING
            event(_LOG, self._status.state.value, level=level, detail=result.detail or "a test object came back right")

    def _leave(self, segment: Segment, *, is_lost: bool) -> None:
        settings = self._settings
        if settings.admins and not is_lost:
            self._status.state = NodeState.DRAINING
            segment.retire_canary()
            result = drain_segment(settings.admins, str(settings.endpoint), settings.drain_timeout / 1000)
            event(_LOG, "drained", moved=result.moved_objects, complete=result.complete, detail=result.text)
        self._status.state = NodeState.UNMOUNTING
        event(_LOG, "left", detail=segment.close())


if __name__ == "__main__":
    sys.exit(main())
