"""``kvtier slot --dir=DIR -- PROGRAM ARGUMENTS…``: becomes a program with what belongs to one slot of a set of pods.

The pods of a set share one template; what differs from slot to slot stands in files of one folder, a mounted ConfigMap:

    slot-N.env     KEY=VALUE lines, added to the environment
    slot-N.flags   one flag a line, put after ARGUMENTS
    slot-N.hosts   names of this machine, waited for: right after a start they are unknown yet, or its predecessor's
    slot-N.ports   START-STOP lines, both included: ports that must be free, or the program would fail later and worse

N is the environment variable KVTIER_SLOT. A missing file counts as empty, but a slot without any file does not exist.
Exit status: 2 when something is wrong, all of it named; otherwise the program's own.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier_worker.errors import ConfigError
from kvtier_worker.machine.ports import port_holder, port_is_free

SLOT_VARIABLE = "KVTIER_SLOT"
EXIT_WRONG = 2
_KINDS = ("env", "flags", "hosts", "ports")
_HOSTS_PATIENCE_S = 60.0
_POLL_S = 0.25
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*")
_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class SlotCommand:
    """What to become.

    Attributes:
        argv: program and arguments.
        env: added to the environment.
        ports: that must be free.
        hosts: names that must lead to this machine.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    ports: tuple[int, ...]
    hosts: tuple[str, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns only when something is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{__doc__}\n")
        return 0
    try:
        command = read_command(words, os.environ)
        wait_for_hosts(command.hosts)
        check_ports(command.ports)
        os.execvpe(command.argv[0], command.argv, {**os.environ, **command.env})  # noqa: S606 - signals must arrive
    except ConfigError as error:
        sys.stderr.writelines(f"kvtier slot: {violation}\n" for violation in error.violations)
    except OSError as error:
        sys.stderr.write(f"kvtier slot: cannot run {command.argv[0]}: {error.strerror}\n")
    return EXIT_WRONG


def read_command(words: Sequence[str], environment: Mapping[str, str]) -> SlotCommand:
    """The slot's command from our arguments and its files.

    Raises:
        ConfigError: with everything that is wrong.
    """
    folder, program, violations = _arguments(words)
    slot = environment.get(SLOT_VARIABLE, "")
    if not slot.isdecimal():
        violations.append(f"{SLOT_VARIABLE}={slot}: set it to the number of the slot, from the pod-index label")
    if violations:
        raise ConfigError(violations)
    paths = {kind: folder / f"slot-{int(slot)}.{kind}" for kind in _KINDS}
    if not any(path.is_file() for path in paths.values()):
        raise ConfigError(
            [f"{folder} has no file of slot {slot}; the folder must know every slot before its pod starts"]
        )
    lines = {kind: _lines(path) for kind, path in paths.items()}
    ports = tuple(_ports(paths["ports"], lines["ports"], violations))
    env = dict(_variables(paths["env"], lines["env"], violations))
    if violations:
        raise ConfigError(violations)
    return SlotCommand((*program, *lines["flags"]), env, ports, lines["hosts"])


def wait_for_hosts(
    hosts: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until each name leads to this machine: a program that listens at its own name needs it from the start.

    Raises:
        ConfigError: naming every host that does not, when the patience is over.
    """
    deadline = clock() + _HOSTS_PATIENCE_S
    while problems := [f"{host}: {problem}" for host in hosts if (problem := _why_elsewhere(host))]:
        if clock() >= deadline:
            fix = "the Service of this name must select this pod and publish addresses that are not ready"
            raise ConfigError([f"{problem} after {_HOSTS_PATIENCE_S:.0f} s; {fix}" for problem in problems])
        sleep(_POLL_S)


def check_ports(ports: Sequence[int]) -> None:
    """Make sure that nobody listens on a slot's ports.

    Raises:
        ConfigError: naming every port that is taken, and by whom.
    """
    if busy := [f"PortBusy: {port} held by {port_holder(port)}" for port in ports if not port_is_free(port)]:
        raise ConfigError(busy)


def _why_elsewhere(host: str) -> str:
    """Why nobody can listen at that name here; empty = one can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as error:
        return f"does not lead to this machine ({error.strerror or error})"
    return ""


def _arguments(words: Sequence[str]) -> tuple[Path, tuple[str, ...], list[str]]:
    """Folder, program with arguments, violations."""
    at = words.index("--") if "--" in words else len(words)
    own, program = words[:at], tuple(words[at + 1 :])
    violations = [f"{word}: unknown; only --dir=DIR stands before --" for word in own if not word.startswith("--dir=")]
    folders = [word.removeprefix("--dir=") for word in own if word.startswith("--dir=")]
    if not folders or not folders[-1]:
        violations.append("--dir is missing: name the folder with the files of the slots")
    if not program:
        violations.append("no program: write it after --, as in `kvtier slot --dir=DIR -- kvtier store`")
    return Path(folders[-1] if folders else ""), program, violations


def _lines(path: Path) -> tuple[str, ...]:
    """Without blanks and comments; empty when there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} cannot be read: {error}"]) from error
    stripped = (line.strip() for line in text.splitlines())
    return tuple(line for line in stripped if line and not line.startswith("#"))


def _variables(path: Path, lines: Sequence[str], violations: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if _VARIABLE.fullmatch(line):
            name, _, value = line.partition("=")
            yield name, value
        else:
            violations.append(f"{path}: {line}: write NAME=VALUE")


def _ports(path: Path, lines: Sequence[str], violations: list[str]) -> Iterator[int]:
    for line in lines:
        match = _PORTS.fullmatch(line)
        first, last = (int(match[1]), int(match[2])) if match else (0, 0)
        if 1 <= first <= last <= _MAX_PORT:
            yield from range(first, last + 1)
        else:
            violations.append(f"{path}: {line}: write START-STOP, two ports of 1..{_MAX_PORT}, the smaller one first")


if __name__ == "__main__":
    sys.exit(main())
