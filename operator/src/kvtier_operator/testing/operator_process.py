"""`kvtier operator` as a process against a control plane of tests, benches and people. IO."""

from __future__ import annotations

import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier_worker.testing.processes import ChildProcess, free_ports, http_status
from prometheus_client.parser import text_string_to_metric_families

READY_S = 30.0


class OperatorProcess:
    """One operator. A context manager; entering waits until it is ready.

    Args:
        kubeconfig: of the account that it uses.
        flags: beyond the ports.
        identity: in the election; without one the process chooses.
    """

    def __init__(self, kubeconfig: Path, *flags: str, identity: str = "") -> None:
        self._metrics_port, self._liveness_port = free_ports(2)
        argv: Sequence[str] = (
            sys.executable,
            "-m",
            "kvtier_operator.controller.main",
            f"--metrics_port={self._metrics_port}",
            f"--liveness_port={self._liveness_port}",
            *([f"--identity={identity}"] if identity else []),
            *flags,
        )
        log = Path(tempfile.mkdtemp(prefix="kvtier-operator-")) / "log"
        self._child = ChildProcess("kvtier operator", argv, {"KUBECONFIG": str(kubeconfig)}, log)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.stop()
        if error is not None:
            error.add_note(f"the operator wrote last:\n{self.log()}")
        with suppress(OSError):
            self._child.log_path.unlink()
            self._child.log_path.parent.rmdir()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    @property
    def running(self) -> bool:
        """It has not ended."""
        return self._child.running

    def start(self, *, wait: bool = True) -> None:
        """Start it (again).

        Raises:
            RuntimeError: it is not ready in time; has the end of its log.
        """
        self._child.start()
        if not wait:
            return
        try:
            self._child.wait_until(lambda: self.status("/readyz") == HTTPStatus.OK, READY_S)
        except RuntimeError:
            self._child.kill()
            raise

    def stop(self) -> int:
        """End it as Kubernetes does; the exit status."""
        return self._child.stop()

    def kill(self) -> None:
        """End it as a power cut does."""
        self._child.kill()

    def status(self, path: str) -> int:
        """HTTP status of /healthz or /readyz; 0 = no answer."""
        return http_status(self._liveness_port, path)

    def log(self) -> str:
        """The end of what it wrote."""
        return self._child.log_tail()

    def metric(self, sample_name: str, /, **labels: str) -> float:
        """Sum of the samples of this name that have these labels; 0 when there are none.

        Raises:
            OSError: it does not answer.
        """
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == sample_name and labels.items() <= sample.labels.items()
        )

    @property
    def leads(self) -> bool:
        """It acts and does not stand by."""
        return self.metric("kvtier_operator_leader") == 1
