"""What runs here, in a file: `kvtier up` writes it at every change, `kvtier status` reads it. IO."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier_operator.errors import MachineError
from kvtier_operator.local.report import ProcessState

STATE_DIR = Path(".kvtier")
"""Default folder for state and logs; each cluster has a folder in it."""
STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True)
class ClusterState:
    """One cluster.

    Attributes:
        pid: of the `kvtier up` that runs it.
        born: when that process was made, in ticks since boot, so that a later one of the same pid is no mistake.
    """

    cluster: str
    pid: int
    born: int
    processes: tuple[ProcessState, ...]

    @property
    def runs(self) -> bool:
        """Whether that `kvtier up` still lives."""
        return bool(self.born) and _born(self.pid) == self.born


class StateFile:
    """The file of one cluster, written by the process that runs it.

    Args:
        folder: of the cluster, below the folder for state.
        cluster: its name.
    """

    def __init__(self, folder: Path, cluster: str) -> None:
        self._path = folder / STATE_FILE
        self._cluster = cluster
        self._claim = -1

    def claim(self) -> None:
        """Keep the folder to this process until `remove`, so that of two that start at one moment one is refused.

        Raises:
            MachineError: another process has it.
            OSError: there can be no such folder.
        """
        if self._claim >= 0:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        claim = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(claim)
            problem = f"another `kvtier up` has {self._path.parent}: stop that one, or choose another --state-dir"
            raise MachineError([problem]) from error
        except OSError:
            os.close(claim)  # a file system without locks: the state file alone has to tell
        else:
            self._claim = claim

    def holder(self) -> int:
        """Pid of another `kvtier up` that runs a cluster in this folder; 0 = none."""
        try:
            state = read_state(self._path)
        except MachineError:
            return 0  # damaged: nobody can rely on it
        return state.pid if state and state.runs and state.pid != os.getpid() else 0

    def neighbours(self) -> Iterator[ClusterState]:
        """Other clusters that run, of those that keep their state beside this one."""
        for path in self._path.parent.parent.glob(f"*/{STATE_FILE}"):
            with suppress(MachineError):
                state = read_state(path) if path != self._path else None
                if state and state.runs:
                    yield state

    def write(self, processes: Sequence[ProcessState]) -> None:
        """Replace the file as a whole: readers see the old one or the new one. The folder may have been removed.

        Raises:
            OSError: it cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        state = ClusterState(self._cluster, os.getpid(), _born(os.getpid()), tuple(processes))
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps(dataclasses.asdict(state), indent=1) + "\n", encoding="utf-8")
        draft.replace(self._path)

    def remove(self) -> None:
        """Nothing runs any more."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        if self._claim >= 0:
            os.close(self._claim)
            self._claim = -1


def read_state(path: Path) -> ClusterState | None:
    """What was written there; None when there is no such file.

    Raises:
        MachineError: it cannot be read.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return ClusterState(
            cluster=str(fields["cluster"]),
            pid=int(fields["pid"]),
            born=int(fields["born"]),
            processes=tuple(map(_process, fields["processes"])),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        problem = f"{path} cannot be read ({error!r}); stop its `kvtier up`, then remove it"
        raise MachineError([problem]) from error


def _process(fields: Mapping[str, Any]) -> ProcessState:
    return ProcessState(
        name=str(fields["name"]),
        component=str(fields["component"]),
        pid=int(fields["pid"]),
        restarts=int(fields["restarts"]),
        url=str(fields["url"]),
        probe_url=str(fields["probe_url"]),
        ports={int(port): str(purpose) for port, purpose in fields["ports"].items()},
    )


def _born(pid: int) -> int:
    """Start of a process in ticks since boot; 0 = there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    state, *rest = stat.rpartition(")")[2].split()
    return 0 if state in {"Z", "X"} else int(rest[18])
