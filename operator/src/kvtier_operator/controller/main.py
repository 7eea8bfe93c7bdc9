"""``kvtier operator``: reconciles KVCacheCluster resources; the entry point.

Exit status: 0 stopped by a signal or printed a dry run, 1 the operator failed, 2 flags, credentials or the file are not
fit (nothing was changed then). Without the definition of KVCacheCluster the operator says so once and waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier_operator.controller.credentials import login
from kvtier_operator.controller.dry_run import render
from kvtier_operator.controller.loop import Policy
from kvtier_operator.controller.options import Defaults, Options, parse_options
from kvtier_operator.controller.run import run_operator
from kvtier_operator.errors import MachineError, OperatorError, SpecError
from kvtier_operator.log import configure_logging
from kvtier_operator.manifest import load
from kvtier_operator.reconcile import reconcile, refuse

EXIT_STOPPED, EXIT_FAILED, EXIT_UNFIT = 0, 1, 2
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``kvtier operator``."""
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv, _defaults())
        if options.dry_run:
            sys.stdout.write(render(load(Path(options.dry_run))))
            return EXIT_STOPPED
        configure_logging(logging.DEBUG if options.verbose else logging.INFO)
        return asyncio.run(_serve(options))
    except SpecError as error:
        _complain("the file is not valid:", [str(violation) for violation in error.violations])
    except MachineError as error:
        _complain("nothing was started:", error.problems)
    return EXIT_UNFIT


async def _serve(options: Options) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        await run_operator(options, Policy(reconcile, refuse), stop)
    except* MachineError as group:
        raise MachineError([problem for error in _leaves(group) for problem in error.problems]) from group
    return EXIT_STOPPED


def _leaves(group: BaseExceptionGroup[MachineError]) -> list[MachineError]:
    found: list[MachineError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _defaults() -> Defaults:
    host = socket.gethostname()
    in_pod = _NAMESPACE_FILE.exists()
    return Defaults(
        namespace=_own_namespace(),
        identity=f"{host}_{secrets.token_hex(4)}",
        host="0.0.0.0" if in_pod else "127.0.0.1",  # noqa: S104 - the kubelet asks from outside the pod
    )


def _own_namespace() -> str:
    try:
        return login().default_namespace or "default"
    except OperatorError:
        return os.environ.get("POD_NAMESPACE") or "default"  # said again, in full, when the credentials are needed


def _complain(headline: str, lines: Sequence[str]) -> None:
    sys.stderr.write("\n  ".join((f"kvtier operator: {headline}", *lines)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
