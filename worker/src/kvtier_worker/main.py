"""``kvtier engine``: the engine process, put together.

    main thread     settings -> sockets -> event loop: HTTP front, signals
    engine thread   worker processes -> EngineLoop.run -> workers closed

The front listens from the first moment, so that probes see a process that is alive and not ready yet. SIGTERM and
Ctrl-C drain: no new requests, running ones finish within ``--drain_timeout``, write-backs are flushed. A second signal
ends running requests at once. Exit code: 0 = stopped on request, 1 = the engine died or the store is down at the
start, 2 = settings that cannot work.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import uvloop

from kvtier_worker.api.tokenizer import TextTokenizer
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.errors import ConfigError
from kvtier_worker.log import configure_logging
from kvtier_worker.serving import EngineProcess, ExitCode
from kvtier_worker.settings import Machine, describe, load_settings

COMMAND = "kvtier engine"


def main(argv: Sequence[str] | None = None) -> int:
    """Run an engine until it is told to stop; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help", "-help"} & set(words):
        sys.stdout.write(WorkerSettings.help_text() + "\n")
        return ExitCode.STOPPED
    if {"-V", "--version"} & set(words):
        sys.stdout.write(f"kvtier {version('kvtier')}\n")
        return ExitCode.STOPPED
    try:
        return _serve(words, dict(os.environ))
    except ConfigError as error:
        sys.stderr.write(describe(error, COMMAND) + "\n")
        return ExitCode.BAD_SETTINGS


def _serve(words: Sequence[str], env: Mapping[str, str]) -> int:
    settings = load_settings(words, env, Machine.here())
    tokenizer = TextTokenizer.load(settings.model, settings.chat_template)
    configure_logging("engine")
    code = uvloop.run(EngineProcess(settings, tokenizer, env).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # all is stopped: an impatient signal must not make a failure of it
    return code


if __name__ == "__main__":
    sys.exit(main())
