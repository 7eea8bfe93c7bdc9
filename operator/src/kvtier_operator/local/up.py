"""``kvtier up FILE``: runs a KVCacheCluster on this machine until Ctrl-C.

The same parser and builders as in a cluster; the processes are started here instead of in pods. One that ends by itself
is started again, as a container is, until it fails several times in a row. Exit status: 0 stopped by the user, 1 a
process failed at its first start or too often, 2 the manifest or the machine is not fit (nothing was started then).
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.api.schema.pod import API_KEY_VARIABLE
from kvtier_operator.errors import Interrupted, MachineError, ProcessFailed, SpecError
from kvtier_operator.local.console import Say, StopRequest, heed_signals, say
from kvtier_operator.local.limits import refusals, without_effect
from kvtier_operator.local.model_source import model_dir, planned_model_dir
from kvtier_operator.local.process_plan import plan_processes
from kvtier_operator.local.state import STATE_DIR, StateFile
from kvtier_operator.local.supervisor import LocalCluster
from kvtier_operator.manifest import find_programs, load
from kvtier_operator.planning.revision import effective_model_id
from kvtier_operator.resources.processes import LOOPBACK, ProcessSpec, Programs

EXIT_STOPPED, EXIT_FAILED, EXIT_UNFIT = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``kvtier up``."""
    options = _parser().parse_args(argv)
    manifest = Path(options.file)
    stop_request = StopRequest()
    previous = heed_signals(stop_request)
    try:
        cluster = load(manifest)
        if fields := without_effect(cluster):
            _complain("only Kubernetes can honour these fields, they do nothing here:", fields)
        _check_possible(cluster)
        if options.dry_run:
            folder = planned_model_dir(cluster.model.uri, manifest.parent)
            _print_plan(plan_processes(cluster, folder, Programs(), str(_cluster_dir(options.state_dir, cluster))))
            return EXIT_STOPPED
        local = prepare(cluster, manifest, options.state_dir, say, stop_request)
        return _run(cluster, local)
    except SpecError as error:
        _complain(f"{manifest} is not valid:", [str(violation) for violation in error.violations])
        return EXIT_UNFIT
    except MachineError as error:
        _complain("nothing was started:", error.problems)
        return EXIT_UNFIT
    except Interrupted as error:
        say(str(error))
        return EXIT_STOPPED
    except ProcessFailed as error:
        explain_failure(error)
        return EXIT_FAILED
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def prepare(
    cluster: KVCacheCluster, manifest: Path, state_dir: Path, progress: Say, stop_request: StopRequest | None = None
) -> LocalCluster:
    """Plan a cluster's processes on this machine; starts none.

    Args:
        cluster: what to run.
        manifest: its file; relative paths in it start at its folder.
        state_dir: gets a folder per cluster with the logs.
        progress: gets lines of progress, later ones too.
        stop_request: the user's wish to stop, if somebody can utter it.

    Raises:
        SpecError: the port range is too small.
        MachineError: programs or the model are missing, or only Kubernetes can run this.
        Interrupted: asked to stop meanwhile.
    """
    _check_possible(cluster)
    programs = find_programs(etcd=cluster.coordination.managed is not None)
    plan_processes(cluster, cluster.model.uri, programs)  # a bad manifest is refused before a model is converted
    model = model_dir(cluster.model.uri, manifest.parent, progress, stop_request)
    folder = _cluster_dir(state_dir, cluster)
    processes = plan_processes(cluster, model, programs, str(folder))
    return LocalCluster(processes, folder / "logs", progress, stop_request, state_file=StateFile(folder, cluster.name))


def explain_failure(error: ProcessFailed) -> None:
    """Say which process failed, how, and what it wrote last."""
    _complain(f"{error}; it wrote {'last:' if error.log_tail else 'nothing'}", error.log_tail)


def curl_line(cluster: KVCacheCluster, *, with_key: bool) -> str:
    """A command that sends a first request to the first engine, with the key of the environment if it asks for one."""
    prompt = "The capital of France is"
    port = next(role.port for role in cluster.roles if role.replicas)
    url = f"http://{LOOPBACK}:{port}/v1/completions"
    body = f'{{"model": "{effective_model_id(cluster.model)}", "prompt": "{prompt}", "max_tokens": 16}}'
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if with_key else ""
    return f"curl {url}{key} -H 'Content-Type: application/json' -d '{body}'"


def _check_possible(cluster: KVCacheCluster) -> None:
    if problems := refusals(cluster):
        raise MachineError(problems)


def _cluster_dir(state_dir: Path, cluster: KVCacheCluster) -> Path:
    return (state_dir / cluster.name).absolute()


def _run(cluster: KVCacheCluster, local: LocalCluster) -> int:
    with local:
        _print_summary(cluster, local)
        local.watch()
        say("stopping")
    say("stopped")
    return EXIT_STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier up", description="Run a KVCacheCluster on this machine until Ctrl-C; a second Ctrl-C kills."
    )
    parser.add_argument("file", metavar="FILE", help="manifest, as in examples/local.yaml")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="print every command and start nothing")
    parser.add_argument(
        "--state-dir",
        "--state_dir",
        type=Path,
        default=STATE_DIR,
        help="folder for logs and state (default: %(default)s)",
    )
    return parser


def _print_plan(processes: Sequence[ProcessSpec]) -> None:
    for process in processes:
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in process.env.items())
        say(f"# {process.name}\n{settings}{' ' if settings else ''}{shlex.join(process.argv)}")


def _print_summary(cluster: KVCacheCluster, local: LocalCluster) -> None:
    say(f"\n{cluster.name} is ready")
    for role in cluster.roles:
        for index in range(role.replicas):
            say(f"  {role.name}-{index}: http://{LOOPBACK}:{role.port + index}/v1  (also /metrics, /health, /ready)")
    say(f"  logs: {local.log_path('*')}")
    if any(role.replicas for role in cluster.roles):
        say(f"  try:  {curl_line(cluster, with_key=API_KEY_VARIABLE in os.environ)}")
    else:
        say("  idle: no role has replicas")
    say("  `kvtier status` shows what runs")
    say("  Ctrl-C stops everything")


def _complain(headline: str, lines: Sequence[str]) -> None:
    say("\n  ".join((f"kvtier up: {headline}", *lines)), sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
