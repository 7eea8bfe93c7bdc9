"""A Kubernetes control plane that stays up on this machine, for people: ``make cluster`` and ``make cluster-down``.

    python scripts/cluster.py up [--nodes N]      start it, or say that it runs; print how to reach it
    python scripts/cluster.py down                end it and remove its state

``up`` leaves a process behind (``serve``) that owns the control plane; everything ends with it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier_operator.errors import OperatorError, ProcessFailed
from kvtier_operator.testing import binaries
from kvtier_operator.testing.control_plane import PROGRAMS, ControlPlane
from kvtier_operator.testing.hollow_nodes import HollowNodes

STATE = Path(__file__).resolve().parent.parent / ".cache" / "cluster"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1
NODELESS = "it has no nodes: pods stay pending"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The control plane whose state is in one folder.

    Attributes:
        state: the folder; beside it lies a lock.
    """

    state: Path

    @property
    def pid_file(self) -> Path:
        """Process id of `serve`."""
        return self.state / "pid"

    @property
    def ready_file(self) -> Path:
        """Is there when the control plane is ready."""
        return self.state / "ready"

    @property
    def log_file(self) -> Path:
        """What `serve` wrote."""
        return self.state / "serve.log"

    @property
    def serve_command(self) -> list[str]:
        """By which we know the process again."""
        return [sys.executable, str(Path(__file__).resolve()), "serve", "--state", str(self.state)]

    def serving_pid(self) -> int | None:
        """Process id of the `serve` that runs; a number that another program got meanwhile does not count."""
        try:
            pid = int(self.pid_file.read_text())
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except (OSError, ValueError):
            return None
        return pid if words[: len(self.serve_command)] == self.serve_command else None

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Hold the lock that `up` and `down` share."""
        self.state.parent.mkdir(parents=True, exist_ok=True)
        with self.state.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def up(cluster: Cluster, num_nodes: int) -> int:
    """Start the control plane in the background and say how to reach it."""
    with cluster.one_at_a_time():
        # Here and not in the background: the first time it builds for minutes and says so.
        kubectl = binaries.require(*PROGRAMS)["kubectl"]
        if cluster.serving_pid() is not None:
            print("the control plane is already running (make cluster-down ends it)")
        elif start_serving(cluster, num_nodes):
            print("the control plane is ready")
            print(
                f"{num_nodes} hollow nodes report every pod as running and start no container"
                if num_nodes
                else NODELESS
            )
        else:
            return 1
    print(f"\n  export KUBECONFIG={shlex.quote(str(cluster.state / 'control-plane' / 'admin.kubeconfig'))}")
    if shutil.which("kubectl") != str(kubectl):
        print(f"  export PATH={shlex.quote(str(kubectl.parent))}:$PATH        # a kubectl that fits")
    print("  kubectl apply -f crds/\n")
    return 0


def start_serving(cluster: Cluster, num_nodes: int) -> bool:
    """Start `serve` and wait until it is ready; on failure show its log."""
    shutil.rmtree(cluster.state, ignore_errors=True)
    cluster.state.mkdir(parents=True)
    with cluster.log_file.open("wb") as log:
        process = subprocess.Popen(
            [*cluster.serve_command, "--nodes", str(num_nodes)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    cluster.pid_file.write_text(str(process.pid))
    deadline = time.monotonic() + START_TIMEOUT_S
    while not cluster.ready_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            print(f"the control plane did not start:\n{cluster.log_file.read_text(errors='replace')}", file=sys.stderr)
            return False
        time.sleep(POLL_S)
    return True


def serve(cluster: Cluster, num_nodes: int) -> int:
    """Own the control plane until SIGTERM, which exits with 0 from here; 1 if one of its processes ended first."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: sys.exit(0))
    try:
        with ControlPlane(state_dir=cluster.state / "control-plane") as control_plane, ExitStack() as stack:
            if num_nodes:
                stack.enter_context(HollowNodes(control_plane.api, num_nodes))
            cluster.ready_file.touch()
            while True:
                control_plane.check()
                time.sleep(1.0)
    except ProcessFailed as error:
        print(error, *error.log_tail, sep="\n", file=sys.stderr)
        return 1


def down(cluster: Cluster) -> int:
    """End the control plane."""
    with cluster.one_at_a_time():
        pid = cluster.serving_pid()
        if pid is None:
            print("no control plane is running")
        else:
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while cluster.serving_pid() == pid and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if cluster.serving_pid() == pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            print("the control plane is stopped")
        shutil.rmtree(cluster.state, ignore_errors=True)
    return 0


def main(arguments: list[str]) -> int:
    """Do what was asked."""
    parser = argparse.ArgumentParser(prog="cluster.py", description="A Kubernetes control plane on this machine.")
    parser.add_argument("action", choices=("up", "down", "serve"))
    parser.add_argument("--state", type=Path, default=STATE, help="folder for its state (default: %(default)s)")
    parser.add_argument(
        "--nodes", type=int, default=2, help="hollow nodes, which run no containers (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    cluster = Cluster(options.state.resolve())
    try:
        if options.action == "down":
            return down(cluster)
        return up(cluster, options.nodes) if options.action == "up" else serve(cluster, options.nodes)
    except OperatorError as error:
        print(f"make cluster: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
