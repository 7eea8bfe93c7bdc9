"""Run benches one after another, then write RESULTS.md. `make bench` runs all; `make bench BENCH="h2d tiers"` some.

Each bench is a script of its own beside this file and writes `results/NAME.json`. The peers' environment is built
first if a bench needs it. Nothing here passes or fails: a ratio that misses its aim is a line in RESULTS.md.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NOT_BENCHES = {"bounds", "client", "report", "run", "summary", "systems"}
NEED_PEERS = {"tiers"}


def benches() -> list[str]:
    """Names of all benches; the long ones last."""
    found = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NOT_BENCHES)
    return sorted(found, key=lambda name: name in NEED_PEERS)


def main(arguments: list[str]) -> int:
    """Run what was asked for, or everything."""
    known = benches()
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        print(f"unknown benches: {', '.join(unknown)}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    wanted = [name for name in known if name in arguments or not arguments]
    failed = []
    if NEED_PEERS & set(wanted):
        subprocess.run(["bash", str(FOLDER / "peers" / "setup.sh")], check=True)
    for name in wanted:
        print(f"\n=== {name}", flush=True)
        started = time.monotonic()
        if subprocess.run([sys.executable, str(FOLDER / f"{name}.py")], check=False).returncode:
            failed.append(name)
        print(f"=== {name}: {time.monotonic() - started:.0f} s", flush=True)
    subprocess.run([sys.executable, str(FOLDER / "summary.py")], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
