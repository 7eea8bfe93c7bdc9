"""``kvtier COMMAND``: finds the command among the installed ones and hands it the rest of the line.

Commands are entry points of group ``kvtier.commands``, so that packages that do not import each other share one
command line. Only the command that runs is imported.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points, version

COMMAND_GROUP = "kvtier.commands"
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""As shells say it of a program that Ctrl-C ended."""

_SUMMARIES = {
    "up": "Run a KVCacheCluster manifest on this machine: etcd, masters, store nodes, engines.",
    "status": "Show what `kvtier up` runs: processes, leader, store, hit rates.",
    "engine": "Serve a model over the OpenAI API with the three-tier KV cache.",
    "service": "Route requests over several engines.",
    "store": "Give memory of this machine to a Mooncake Store.",
    "operator": "Reconcile KVCacheCluster resources in Kubernetes.",
    "slot": "Become a program with the settings of one slot of a set of pods.",
    "etcd-member": "Decide how a member of a managed etcd starts, before it does.",
    "doctor": "Check what this machine offers and say what to do about the rest.",
    "top": "Show what the tiers of a running engine do.",
    "bench": "Measure.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``kvtier``; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {entry.name: entry for entry in entry_points(group=COMMAND_GROUP)}
    if not words or words[0] in {"-h", "--help", "help"}:
        _say(_overview(commands))
        return 0 if words else EXIT_USAGE
    if words[0] in {"-V", "--version", "version"}:
        _say(f"kvtier {version('kvtier')}")
        return 0
    name, *rest = words
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean `kvtier {near[0]}`?" if near else "`kvtier --help` lists the commands"
        sys.stderr.write(f"kvtier: no command {name!r}; {hint}\n")
        return EXIT_USAGE
    try:
        return _run(commands[name], rest)
    except KeyboardInterrupt:  # before the command minds signals itself: its modules take a while to load
        return EXIT_INTERRUPTED


def xllm(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``xllm``, another name of ``kvtier engine``."""
    return main(["engine", *(sys.argv[1:] if argv is None else argv)])


def _run(entry: EntryPoint, argv: Sequence[str]) -> int:
    try:
        command: Callable[[Sequence[str]], int] = entry.load()
    except ModuleNotFoundError as error:
        extra = "operator" if entry.value.startswith("kvtier_operator") else "worker"
        sys.stderr.write(
            f"kvtier {entry.name}: module {error.name!r} is not installed; pip install 'kvtier[{extra}]' brings it\n"
        )
        return EXIT_USAGE
    return command(argv)


def _overview(commands: Mapping[str, EntryPoint]) -> str:
    order = [name for name in _SUMMARIES if name in commands]
    order += sorted(name for name in commands if name not in _SUMMARIES)
    lines = [
        "usage: kvtier COMMAND [--flag=value ...]",
        "",
        "A KV cache in three tiers for LLM serving: device memory, pinned host memory, Mooncake Store.",
        "",
        *(f"  {name:9} {_SUMMARIES.get(name, '')}".rstrip() for name in order),
        "",
        "`kvtier COMMAND --help` shows its flags.",
    ]
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
