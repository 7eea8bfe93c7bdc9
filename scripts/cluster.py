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
from pathlib import Path

from kvtier_operator.errors import OperatorError, ProcessFailed
from kvtier_operator.testing import binaries
from kvtier_operator.testing.control_plane import PROGRAMS, ControlPlane
from kvtier_operator.testing.hollow_nodes import HollowNodes

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".cache" / "cluster"
PID_FILE, READY_FILE, LOG_FILE = STATE / "pid", STATE / "ready", STATE / "serve.log"
KUBECONFIG = STATE / "control-plane" / "admin.kubeconfig"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1


def up(num_nodes: int) -> int:
    """Start the control plane in the background and say how to reach it."""
    with one_at_a_time():
        if serving_pid() is None:
            # Here and not in the background: the first time it builds for minutes and says so.
            kubectl = binaries.require(*PROGRAMS)["kubectl"]
            if not start_serving(num_nodes):
                return 1
            print("the control plane is ready")
            explain_nodes(num_nodes)
        else:
            kubectl = binaries.require("kubectl")["kubectl"]
            print("the control plane is already running (make cluster-down ends it)")
    print(f"\n  export KUBECONFIG={shlex.quote(str(KUBECONFIG))}")
    if (shutil.which("kubectl") or "") != str(kubectl):
        print(f"  export PATH={shlex.quote(str(kubectl.parent))}:$PATH        # kubectl of the same version")
    print("  kubectl apply -f crds/\n")
    return 0


def explain_nodes(num_nodes: int) -> None:
    """Say what becomes of pods."""
    if num_nodes:
        print(f"{num_nodes} hollow nodes report every pod as running; no container is started")
    else:
        print("it has no nodes: pods stay pending")


def start_serving(num_nodes: int) -> bool:
    """Start `serve` and wait until it is ready; on failure show its log."""
    shutil.rmtree(STATE, ignore_errors=True)
    STATE.mkdir(parents=True)
    with LOG_FILE.open("wb") as log:
        command = [sys.executable, str(Path(__file__).resolve()), "serve", "--nodes", str(num_nodes)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    PID_FILE.write_text(str(process.pid))
    deadline = time.monotonic() + START_TIMEOUT_S
    while not READY_FILE.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            print(f"the control plane did not start:\n{LOG_FILE.read_text(errors='replace')}", file=sys.stderr)
            PID_FILE.unlink()
            return False
        time.sleep(POLL_S)
    return True


def serve(num_nodes: int) -> int:
    """Own the control plane until SIGTERM, which exits with 0 from here; 1 if one of its processes ended first."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: sys.exit(0))
    try:
        with ControlPlane(state_dir=STATE / "control-plane") as control_plane, ExitStack() as stack:
            if num_nodes:
                stack.enter_context(HollowNodes(control_plane.api, num_nodes))
            READY_FILE.touch()
            while True:
                control_plane.check()
                time.sleep(1.0)
    except ProcessFailed as error:
        print(error, *error.log_tail, sep="\n", file=sys.stderr)
        return 1


def down() -> int:
    """End the control plane."""
    with one_at_a_time():
        pid = serving_pid()
        if pid is None:
            print("no control plane is running")
        else:
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while serving_pid() == pid and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if serving_pid() == pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            print("the control plane is stopped")
        shutil.rmtree(STATE, ignore_errors=True)
    return 0


def serving_pid() -> int | None:
    """Process id of the `serve` that runs for this checkout; a number that another program got does not count."""
    try:
        pid = int(PID_FILE.read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if str(Path(__file__).resolve()).encode() in words and b"serve" in words else None


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the lock that ``up`` and ``down`` share."""
    STATE.parent.mkdir(parents=True, exist_ok=True)
    with (STATE.parent / "cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Do what was asked."""
    parser = argparse.ArgumentParser(prog="cluster.py", description="A Kubernetes control plane on this machine.")
    parser.add_argument("action", choices=("up", "down", "serve"))
    parser.add_argument(
        "--nodes", type=int, default=2, help="hollow nodes, which run no containers (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        if options.action == "down":
            return down()
        return up(options.nodes) if options.action == "up" else serve(options.nodes)
    except OperatorError as error:
        print(f"make cluster: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
