"""Write docs/flags.md from the contract, so that the two cannot differ.

python scripts/render_flags.py [--check]      --check: write nothing, exit 1 if the file is not current
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from kvtier_worker.contract import FlagGroup, WorkerSettings

TARGET = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
HEAD = """# Flags of `kvtier engine`

Generated from `kvtier_worker/contract/` by `scripts/render_flags.py`; do not edit. `--flag=value` and `--flag value`
are the same; a boolean takes `true` or `false`, and alone means `true`. An unknown flag is refused with the nearest
known name, and every invalid value or combination is reported at once. `xllm` is another name of `kvtier engine`.
"""


def default_of(item: Field[Any]) -> str:
    """A flag's default as it would be typed."""
    value = item.default if item.default is not MISSING else ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else "(empty)"


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for group in FlagGroup:
        rows = [item for item in fields(WorkerSettings) if item.metadata["group"] is group]
        if not rows:
            continue
        parts.append(f"\n## {group.value}\n\n| flag | default | meaning |\n|---|---|---|\n")
        for item in rows:
            text = item.metadata["help"].replace("|", "\\|")
            if item.metadata["choices"]:
                text += " One of: " + ", ".join(f"`{choice}`" for choice in item.metadata["choices"]) + "."
            if item.metadata["env"]:
                text += f" Environment: `{item.metadata['env']}`."
            parts.append(f"| `--{item.name}` | `{default_of(item)}` | {text} |\n")
    return "".join(parts)


def main(arguments: list[str]) -> int:
    """Write the page or compare it."""
    page = render()
    if "--check" in arguments:
        if TARGET.exists() and TARGET.read_text() == page:
            return 0
        print(f"{TARGET.name} is not current: python scripts/render_flags.py", file=sys.stderr)
        return 1
    TARGET.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
