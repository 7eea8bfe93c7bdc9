"""Finds the programs of a control plane, or builds them once. IO; called by `control_plane`, tests and scripts.

A program is taken from the folder that ``KUBEBUILDER_ASSETS`` names, then from PATH, if it is new enough there; else
from our cache, ``$XDG_CACHE_HOME/kvtier/bin/PRODUCT-VERSION``, which is filled from the Go modules in
``e2e/controlplane``.

    python -m kvtier_operator.testing.binaries kube-apiserver etcd      prints a path a line
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from kvtier_operator.errors import MachineError
from kvtier_operator.testing import go_builds
from kvtier_operator.testing.programs import PROGRAMS, Product, Program

MODULES = Path(__file__).resolve().parents[4] / "e2e" / "controlplane"
"""The Go modules of a checkout."""

ASSETS_VARIABLE = "KUBEBUILDER_ASSETS"
VERSION_TIMEOUT_S = 30.0


def require(*names: str, environment: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Paths of programs, by name; builds what is missing, everything of one product by one command.

    Args:
        names: keys of `PROGRAMS`.
        environment: ``KUBEBUILDER_ASSETS``, ``PATH``, ``XDG_CACHE_HOME`` and ``HOME`` are read.

    Raises:
        MachineError: something has to be built and cannot be.
    """
    wanted = [PROGRAMS[name] for name in names]
    found = {program.name: path for program in wanted if (path := installed(program, environment)) is not None}
    missing = [program for program in wanted if program.name not in found]
    for product in dict.fromkeys(program.product for program in missing):
        found |= _built(product, [program for program in missing if program.product == product], environment)
    return {name: found[name] for name in names}


def binary(name: str) -> Path:
    """Path of one program; see `require`."""
    return require(name)[name]


def installed(program: Program, environment: Mapping[str, str]) -> Path | None:
    """The first one on this machine that is new enough; None when there is none."""
    for path in _candidates(program.name, environment):
        version = version_of(path, program.version_arguments)
        if version >= program.product.oldest:
            return path
    return None


@cache
def version_of(path: Path, arguments: tuple[str, ...]) -> tuple[int, int]:
    """Major and minor version that a program prints; (0, 0) when it prints none."""
    try:
        answer = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0, 0
    match = re.search(r"(\d+)\.(\d+)\.\d+", answer)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Holds a folder of executables per product and version."""
    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    return Path(home) / "kvtier" / "bin"


def _candidates(name: str, environment: Mapping[str, str]) -> Iterator[Path]:
    for folders in (environment.get(ASSETS_VARIABLE, ""), environment.get("PATH", "")):
        found = shutil.which(name, path=folders) if folders else None
        if found:
            yield Path(found)


def _built(product: Product, programs: Sequence[Program], environment: Mapping[str, str]) -> dict[str, Path]:
    if not MODULES.is_dir():
        names = ", ".join(program.name for program in programs)
        oldest = ".".join(map(str, product.oldest))
        fix = f"only a checkout of kvtier can build it; set {ASSETS_VARIABLE} to a folder that has it"
        raise MachineError([f"{names} {oldest} or newer is not installed, and {fix}"])
    version = product.version(MODULES)
    folder = cache_dir(environment) / f"{product.name}-{version}"
    # The whole batch: its programs share most of their packages, and whoever wants one wants the others next.
    batches = {program.batch for program in programs}
    wanted = [program for program in PROGRAMS.values() if program.product == product and program.batch in batches]
    if not all((folder / program.name).exists() for program in programs):
        go_builds.build(product, wanted, MODULES / product.name, version, folder)
    return {program.name: folder / program.name for program in programs}


def main(names: Sequence[str]) -> int:
    """Print paths, a line each."""
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown or not names:
        complaint = f"no such program: {', '.join(unknown)}; " if unknown else ""
        print(f"{complaint}name some of: {', '.join(PROGRAMS)}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    try:
        paths = require(*names)
    except MachineError as error:
        print(error, file=sys.stderr)  # noqa: T201 - a command
        return 1
    print("\n".join(map(str, paths.values())))  # noqa: T201 - a command
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
