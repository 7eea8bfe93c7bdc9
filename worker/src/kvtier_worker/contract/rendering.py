"""From a settings record to a command line, a help page and a table for the docs."""

from __future__ import annotations

import textwrap
from typing import Any

from kvtier_worker.contract.flags import Flag, FlagGroup, flags_of

_INDENT = " " * 6


def render_argv(settings: Any) -> tuple[str, ...]:
    """The flags that differ from their defaults, as ``--flag=value`` in field order; secrets are left out."""
    return tuple(
        f"--{name}={entry.render(getattr(settings, name))}"
        for name, entry in flags_of(type(settings)).items()
        if not entry.env and getattr(settings, name) != entry.default
    )


def render_env(settings: Any) -> dict[str, str]:
    """The secrets that differ from their defaults, as environment variables."""
    return {
        entry.env: entry.render(getattr(settings, name))
        for name, entry in flags_of(type(settings)).items()
        if entry.env and getattr(settings, name) != entry.default
    }


def help_text(record: type[Any], *, usage: str, width: int = 100) -> str:
    """The page that ``--help`` prints: flags by group, each with its default, range and reason."""
    lines = [f"usage: {usage}", ""]
    for group, entries in _by_group(record).items():
        lines.append(f"{group}:")
        for entry in entries:
            lines.append(f"  --{entry.name}={_placeholder(entry)}")
            lines += textwrap.wrap(
                f"{entry.help} ({_facts(entry)})", width, initial_indent=_INDENT, subsequent_indent=_INDENT
            )
        lines.append("")
    lines.append("Flags are written --flag=value or --flag value; a switch alone means true, --noflag means false.")
    return "\n".join(lines)


def markdown_table(record: type[Any]) -> str:
    """The flags as Markdown, one table a group."""
    lines: list[str] = []
    for group, entries in _by_group(record).items():
        lines += [f"## {group}", "", "| flag | default | meaning |", "|---|---|---|"]
        for entry in entries:
            allowed = " \\| ".join(f"`{choice}`" for choice in entry.choices) or entry.range_hint
            meaning = entry.help.replace("|", "\\|") + (f" ({allowed})" if allowed else "")
            default = f"`{entry.render(entry.default)}`" if entry.render(entry.default) else "empty"
            lines.append(f"| `--{entry.name}` | {default} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def _by_group(record: type[Any]) -> dict[FlagGroup, list[Flag]]:
    entries = list(flags_of(record).values())
    grouped = {group: [entry for entry in entries if entry.group == group] for group in FlagGroup}
    return {group: members for group, members in grouped.items() if members}


def _placeholder(entry: Flag) -> str:
    if entry.choices:
        return "|".join(entry.choices)
    return {bool: "true|false", int: "N", float: "X", str: "TEXT"}[entry.kind]


def _facts(entry: Flag) -> str:
    facts = [f"default {entry.render(entry.default) or 'empty'}"]
    if entry.range_hint:
        facts.append(entry.range_hint)
    if entry.env:
        facts.append(f"or environment {entry.env}")
    return "; ".join(facts)
