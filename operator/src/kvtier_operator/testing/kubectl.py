"""Runs kubectl against a throw-away control plane. IO; called by `control_plane`."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvtier_operator.errors import OperatorError

TIMEOUT_S = 60.0


class KubectlFailed(OperatorError):
    """kubectl ended with an error.

    Attributes:
        stderr: what it said.
    """

    def __init__(self, arguments: Sequence[str], stderr: str) -> None:
        self.stderr = stderr
        super().__init__(f"kubectl {' '.join(arguments)}: {stderr.strip()}")


def run_kubectl(program: Path, kubeconfig: Path, arguments: Sequence[str], stdin: str = "") -> str:
    """What kubectl prints.

    Args:
        program: kubectl.
        kubeconfig: whom to ask, and as whom; kubectl's cache goes beside it, since addresses of servers recur.
        arguments: of kubectl.
        stdin: for ``-f -``.

    Raises:
        KubectlFailed: with what it said.
    """
    cache = kubeconfig.parent / "kubectl-cache"
    command = [str(program), f"--kubeconfig={kubeconfig}", f"--cache-dir={cache}", *arguments]
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if result.returncode != 0:
        raise KubectlFailed(arguments, result.stderr or result.stdout)
    return result.stdout
