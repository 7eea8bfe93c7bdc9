"""Turns `model.source.uri` into a folder on this machine; a packaged model is converted once. IO; called by `up`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from kvtier_operator.api import PACKAGED_MODEL_URI
from kvtier_operator.errors import Interrupted, MachineError
from kvtier_operator.local.console import POLL_S, Say, StopRequest

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


def model_dir(uri: str, base: Path, say: Say, stop_request: StopRequest | None = None) -> str:
    """The model's folder; a packaged model is converted on first use.

    Args:
        uri: as in the manifest.
        base: folder of the manifest; relative paths start there.
        say: gets progress lines.
        stop_request: ends a conversion.

    Raises:
        MachineError: there is no such folder or package.
        Interrupted: asked to stop meanwhile.
    """
    if uri == PACKAGED_MODEL_URI:
        return _prepare(say, stop_request or StopRequest())
    if uri.startswith(_VOLUME):
        fix = "volumes are Kubernetes' own; write the folder of the model on this machine"
        raise MachineError([f"spec.model.source.uri = {uri!r}: {fix}"])
    folder = _folder(uri, base)
    if not (folder / "config.json").is_file():
        raise MachineError([f"spec.model.source.uri = {uri!r}: {folder} is no model folder, it has no config.json"])
    return str(folder)


def _folder(uri: str, base: Path) -> Path:
    return (base / uri.removeprefix(_FILE)).resolve()


def _prepare(say: Say, stop_request: StopRequest) -> str:
    say("model: preparing the packaged one; the first time takes some seconds")
    command = (sys.executable, "-m", _PREPARE_MODULE)
    # In a session of its own: a Ctrl-C at the terminal is for us, and reaches it once, when we hand it on.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        out, complaint = _await(run, stop_request)
    if stop_request.asked:
        raise Interrupted("stopped while the model was being prepared")
    lines = out.splitlines()
    if run.returncode != 0 or not lines:
        reason = complaint.strip() or f"it ended with status {run.returncode}"
        raise MachineError([f"spec.model.source.uri = {PACKAGED_MODEL_URI!r}: {reason}"])
    say(f"model: {lines[-1]}")
    return lines[-1]


def _await(run: subprocess.Popen[str], stop_request: StopRequest) -> tuple[str, str]:
    """What it wrote; a wish to stop lets it clean up and end, a second one ends it."""
    told = False
    while True:
        try:
            return run.communicate(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            if stop_request.insisted:
                run.kill()
            elif stop_request.asked and not told:
                run.send_signal(signal.SIGINT)
                told = True
