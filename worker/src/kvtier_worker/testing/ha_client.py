"""A store client in a process of its own: ``python -m kvtier_worker.testing.ha_client MASTERS CLUSTER_ID``.

Leaving an HA group takes a process half a minute unless it ends as the worker does, so tests of HA use this. It
puts one object, says ``stored``, waits for a line, then reads until it hits or a minute is over and prints
``OUTCOME seconds state``; the process ends at once.
"""

from __future__ import annotations

import dataclasses
import sys
import time

from kvtier_worker.adapters.mooncake_store import MooncakeStore
from kvtier_worker.errors import StoreUnavailable
from kvtier_worker.mooncake_client.leaving import end_process
from kvtier_worker.testing.store_worlds import Arena, content_of, gets, mooncake_options, puts, read

_NBYTES = 50_000
_PATIENCE_S = 60.0


def main() -> int:
    """Put, wait, read; returns the exit code."""
    masters, cluster_id = sys.argv[1:]
    try:
        store = MooncakeStore.connect(dataclasses.replace(mooncake_options(masters), cluster_id=cluster_id))
    except StoreUnavailable as error:
        _say(f"unavailable: {error}")
        return 1
    arena = Arena(store)
    content = content_of("survivor", _NBYTES)
    _say(puts(store, [arena.buffer("survivor", content)])[0])
    sys.stdin.readline()
    target = arena.buffer("survivor", nbytes=_NBYTES)
    started, outcome = time.monotonic(), ""
    while outcome != "hit" and time.monotonic() - started < _PATIENCE_S:
        (outcome,) = gets(store, [target])
        time.sleep(0.1)
    right = outcome == "hit" and read(target) == content
    _say(f"{outcome if right else 'wrong'} {time.monotonic() - started:.1f} {store.state}")
    started = time.monotonic()
    store.close()
    _say(f"closed {time.monotonic() - started:.1f}")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    end_process(main())
