"""Turns `model.source.uri` into a folder on this machine; a packaged model is converted once. IO; called by `local`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvtier_operator.errors import MachineError
from kvtier_operator.supervisor import Say

_PACKAGE = "package://"
_FILE = "file://"
_PREPARE_MODULE = "kvtier_worker.model.prepare"
"""Prints the folder as its last line on stdout; progress goes to stderr. Run, not imported: it needs torch."""


def planned_model_dir(uri: str, base: Path) -> str:
    """What a dry run shows: the folder where it is known, the uri where it would have to be made.

    Args:
        uri: as in the manifest.
        base: folder of the manifest; relative paths start there.
    """
    return uri if uri.startswith(_PACKAGE) else str(_folder(uri, base))


def model_dir(uri: str, base: Path, say: Say) -> str:
    """The model's folder; a packaged model is converted on first use.

    Args:
        uri: as in the manifest.
        base: folder of the manifest; relative paths start there.
        say: gets progress lines.

    Raises:
        MachineError: there is no such folder or package.
    """
    if uri.startswith(_PACKAGE):
        return _prepare(uri.removeprefix(_PACKAGE), say)
    folder = _folder(uri, base)
    if not (folder / "config.json").is_file():
        raise MachineError([f"spec.model.source.uri = {uri!r}: {folder} is no model folder, it has no config.json"])
    return str(folder)


def _folder(uri: str, base: Path) -> Path:
    return (base / uri.removeprefix(_FILE)).resolve()


def _prepare(package: str, say: Say) -> str:
    say(f"model: preparing {package}")
    command = (sys.executable, "-m", _PREPARE_MODULE, f"--package={package}")
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = run.stdout.split()
    if run.returncode != 0 or not lines:
        problem = f"spec.model.source.uri: package {package!r} could not be prepared (status {run.returncode})"
        raise MachineError([f"{problem}; its own words are above"])
    say(f"model: {lines[-1]}")
    return lines[-1]
