"""What differs between the pods of one set: files of a ConfigMap, one group a slot. Pure.

A StatefulSet has one pod template, and a pod's ports follow its slot. So the template's command names only what all
pods share; `kvtier slot` reads the files of its slot, waits until the pod is known by its own name, sees that its
ports are free, and becomes the program. Images of others have no `kvtier`: a shell reads the environment, and the
program itself the flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_operator import labels
from kvtier_operator.planning.ports import PortBlock

CONFIG_DIR: Final = "/etc/kvtier"
SLOT_VARIABLE: Final = "KVTIER_SLOT"
_OWN_VARIABLES = frozenset({"MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"})
_READ_ENVIRONMENT = f'set -a; . "{CONFIG_DIR}/slot-${SLOT_VARIABLE}.env"; set +a'


@dataclass(frozen=True, slots=True)
class Slot:
    """What one pod has for itself.

    Attributes:
        number: its ordinal.
        flags: appended to the program's arguments.
        env: added to its environment.
        ports: that must be free before it starts.
        host: name at which it listens; empty = it listens at addresses only.
        ranks: flags of each process but the first, where an engine of another image starts one a rank.
    """

    number: int
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    ports: Sequence[PortBlock] = ()
    host: str = ""
    ranks: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A container's program.

    Attributes:
        program: and its leading arguments.
        flags: that all pods of the set share.
        foreign: its image has no `kvtier`.
        ranks: processes; more than one only in a foreign image.
    """

    program: tuple[str, ...]
    flags: tuple[str, ...]
    foreign: bool = False
    ranks: int = 1

    def render(self) -> dict[str, list[str]]:
        """``command`` and ``args`` of the container."""
        if not self.foreign:
            return {"command": ["kvtier", "slot", f"--dir={CONFIG_DIR}", "--", *self.program], "args": [*self.flags]}
        file = f"--flagfile={CONFIG_DIR}/slot-${SLOT_VARIABLE}"
        others = [f'"$@" "{file}.rank-{rank}.flags" &' for rank in range(1, self.ranks)]
        script = " ".join([f"{_READ_ENVIRONMENT};", *others, f'exec "$@" "{file}.flags"'])
        return {"command": ["/bin/sh", "-c", script, "slot"], "args": [*self.program, *self.flags]}


def slot_files(slots: Iterable[Slot]) -> dict[str, str]:
    """``data`` of the ConfigMap."""
    data: dict[str, str] = {}
    for slot in slots:
        data[f"slot-{slot.number}.env"] = _lines(f"{name}={text}" for name, text in slot.env.items())
        data[f"slot-{slot.number}.flags"] = _lines(slot.flags)
        data[f"slot-{slot.number}.ports"] = _lines(str(block) for block in slot.ports)
        if slot.host:
            data[f"slot-{slot.number}.hosts"] = _lines([slot.host])
        for rank, flags in enumerate(slot.ranks, start=1):
            data[f"slot-{slot.number}.rank-{rank}.flags"] = _lines(flags)
    return data


def split_flags(flags: Iterable[str], own: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags that a set's pods share, and those that each has for itself, which ``own`` names."""
    shared: list[str] = []
    others: list[str] = []
    for text in flags:
        name = text.removeprefix("--").partition("=")[0]
        (others if name in own else shared).append(text)
    return tuple(shared), tuple(others)


def split_env(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Environment that a set's pods share, and what each has for itself: the ports of its Mooncake clients."""
    own = {name: text for name, text in env.items() if name in _OWN_VARIABLES}
    return {name: text for name, text in env.items() if name not in own}, own


def slot_env() -> dict[str, Any]:
    """How a container learns its slot: from a label that StatefulSets put on their pods."""
    return {"fieldRef": {"fieldPath": f"metadata.labels['{labels.POD_INDEX}']"}}


def _lines(texts: Iterable[str]) -> str:
    return "".join(f"{text}\n" for text in texts)
