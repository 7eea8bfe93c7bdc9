"""``python -m kvtier_operator.demo``, behind ``make demo``.

Exit status: 0 every phase met its tier with equal tokens, 1 it did not or a process failed, 2 nothing was started.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.api.schema.pod import API_KEY_VARIABLE
from kvtier_operator.demo.client import EngineHttp
from kvtier_operator.demo.phases import MAX_TOKENS, Walk
from kvtier_operator.demo.prompt import harbour_log
from kvtier_operator.demo.report import Phase, faults, report, speed_remark, table
from kvtier_operator.errors import Interrupted, MachineError, OperatorError, ProcessFailed, SpecError
from kvtier_operator.local.console import StopRequest, heed_signals, say
from kvtier_operator.local.supervisor import LocalCluster
from kvtier_operator.local.up import EXIT_FAILED, EXIT_UNFIT, curl_line, explain_failure, prepare
from kvtier_operator.manifest import load
from kvtier_operator.planning.revision import effective_model_id
from kvtier_operator.resources.engine import engine_name
from kvtier_operator.resources.processes import LOOPBACK

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo."""
    options = _parser().parse_args(argv)
    stop_request = StopRequest()
    heed_signals(stop_request)
    try:
        cluster = load(options.manifest)
        local = prepare(cluster, options.manifest, options.report.parent, say, stop_request)
        return _run(cluster, local, options.report, keep=options.keep)
    except (SpecError, MachineError) as error:
        say(f"nothing was started:\n{error}")
        return EXIT_UNFIT
    except ProcessFailed as error:
        explain_failure(error)
        return EXIT_FAILED
    except Interrupted as error:
        say(str(error))
        return EXIT_INTERRUPTED
    except OperatorError as error:
        say(f"the demo failed: {error}")
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvtier_operator.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the cluster serving until Ctrl-C")
    parser.add_argument("--manifest", type=Path, default=Path("examples/local.yaml"), help="default: %(default)s")
    parser.add_argument("--report", type=Path, default=Path(".demo/report.json"), help="default: %(default)s")
    return parser


def _run(cluster: KVCacheCluster, local: LocalCluster, report_path: Path, *, keep: bool) -> int:
    role = cluster.roles[0]
    engine = engine_name(role.name, 0)
    url, key = f"http://{LOOPBACK}:{role.port}", os.environ.get(API_KEY_VARIABLE, "")
    http = EngineHttp(url, effective_model_id(cluster.model), key)
    stores = tuple(reversed([name for name in local.names if name != engine]))
    with local:
        walk = Walk(local, engine=engine, stores=stores, http=http, prompt=harbour_log(), say=say)
        say(f"\nA prompt of about 3,000 tokens, {MAX_TOKENS} greedy tokens each time; a short prompt warms up first.")
        phases = list(walk.run())
        failures = _finish(phases, walk.block_size(), report_path)
        if keep:
            walk.restore_store()
            say(f"\nserving until Ctrl-C; try:\n  {curl_line(cluster, with_key=API_KEY_VARIABLE in os.environ)}")
            local.watch()
    return EXIT_FAILED if failures else 0


def _finish(phases: Sequence[Phase], block_size: int, report_path: Path) -> tuple[str, ...]:
    report_path.parent.mkdir(parents=True, exist_ok=True)
    report_path.write_text(json.dumps(report(phases), indent=2) + "\n", encoding="utf-8")
    failures = faults(phases, block_size)
    say(f"\n{table(phases)}\n\nreport: {report_path}")
    if failures:
        say("\n".join(("FAILED", *failures)))
    else:
        say(f"every phase met its tier, with the same tokens; {speed_remark(phases)}")
    return failures


if __name__ == "__main__":
    sys.exit(main())
