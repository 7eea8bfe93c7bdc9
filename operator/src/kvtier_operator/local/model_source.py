"""Turns `model.source.uri` into a folder on this machine; a packaged model is converted once. IO; called by `local`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvtier_operator.api import PACKAGED_MODEL_URI
from kvtier_operator.errors import MachineError
from kvtier_operator.local.console import Say

_FILE = "file://"
_VOLUME = "pvc://"
_PREPARE_MODULE = "kvtier_worker.model.prepare"
"""Prints the folder as its last line on stdout, and what is wrong on stderr. Run, not imported: it is the worker's."""


def planned_model_dir(uri: str, base: Path) -> str:
    """What a dry run shows: the folder where it is known, the uri where it would have to be made.

    Args:
        uri: as in the manifest.
        base: folder of the manifest; relative paths start there.
    """
    return uri if uri.startswith((PACKAGED_MODEL_URI, _VOLUME)) else str(_folder(uri, base))


def model_dir(uri: str, base: Path, say: Say) -> str:
    """The model's folder; a packaged model is converted on first use.

    Args:
        uri: as in the manifest.
        base: folder of the manifest; relative paths start there.
        say: gets progress lines.

    Raises:
        MachineError: there is no such folder or package.
    """
    if uri == PACKAGED_MODEL_URI:
        return _prepare(say)
    if uri.startswith(_VOLUME):
        fix = "volumes are Kubernetes' own; write the folder of the model on this machine"
        raise MachineError([f"spec.model.source.uri = {uri!r}: {fix}"])
    folder = _folder(uri, base)
    if not (folder / "config.json").is_file():
        raise MachineError([f"spec.model.source.uri = {uri!r}: {folder} is no model folder, it has no config.json"])
    return str(folder)


def _folder(uri: str, base: Path) -> Path:
    return (base / uri.removeprefix(_FILE)).resolve()


def _prepare(say: Say) -> str:
    say("model: preparing the packaged one; the first time takes some seconds")
    run = subprocess.run((sys.executable, "-m", _PREPARE_MODULE), capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    if run.returncode != 0 or not lines:
        reason = run.stderr.strip() or f"it ended with status {run.returncode}"
        raise MachineError([f"spec.model.source.uri = {PACKAGED_MODEL_URI!r}: {reason}"])
    say(f"model: {lines[-1]}")
    return lines[-1]
