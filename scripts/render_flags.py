"""Write docs/flags.md from the contract, so that the two cannot differ.

python scripts/render_flags.py [--check]      --check: write nothing, exit 1 if the file is not current
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvtier_worker.contract import WorkerSettings

TARGET = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
HEAD = """# Flags of `kvtier engine`

Generated from `kvtier_worker/contract/` by `scripts/render_flags.py`; do not edit. `--flag=value` and `--flag value`
are the same; a boolean takes `true` or `false`, and alone means `true`. An unknown flag is refused with the nearest
known name, and every invalid value or combination is reported at once. `xllm` is another name of `kvtier engine`.
"""


def render() -> str:
    """The whole page."""
    return f"{HEAD}\n{WorkerSettings.render_markdown()}"


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
