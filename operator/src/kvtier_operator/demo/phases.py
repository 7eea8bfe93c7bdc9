"""The demo's phases: drops, restarts and stops between requests, so that each finds the prompt in one tier only. IO."""

from __future__ import annotations

import time
from collections.abc import Iterator

from kvtier_operator.demo.answers import Answer
from kvtier_operator.demo.client import EngineHttp
from kvtier_operator.demo.report import Phase, PhaseName
from kvtier_operator.errors import OperatorError
from kvtier_operator.local.console import Say
from kvtier_operator.local.supervisor import LocalCluster

MAX_TOKENS = 16
WARM_UP_PROMPT = "A short hello, so that first-time initialisation is not measured."
WRITEBACK_TIMEOUT_S = 60.0
_POLL_S = 0.1


class WritebackTimeout(OperatorError):
    """The prompt did not reach the lower tiers in time."""


class Walk:
    """Answers one prompt in every phase.

    Args:
        cluster: running.
        engine: name of the engine's process.
        stores: names of the processes of the store, in stop order.
        http: that engine's API.
        prompt: a few thousand tokens.
        say: gets progress lines.
    """

    def __init__(
        self, cluster: LocalCluster, *, engine: str, stores: tuple[str, ...], http: EngineHttp, prompt: str, say: Say
    ) -> None:
        self._cluster = cluster
        self._engine = engine
        self._stores = stores
        self._http = http
        self._prompt = prompt
        self._say = say

    def run(self) -> Iterator[Phase]:
        """Yield every phase when its answer is complete. At the end the store is stopped."""
        self._http.complete(WARM_UP_PROMPT, max_tokens=2)
        yield self._phase(PhaseName.COLD, "nothing holds the prompt")
        yield self._phase(PhaseName.DEVICE, "the same prompt again")

        self._wait_for_writeback()
        self._http.drop(["device"])
        yield self._phase(PhaseName.HOST, "device cache dropped")

        self._cluster.restart(self._engine)
        self._http.complete(WARM_UP_PROMPT, max_tokens=2)
        yield self._phase(PhaseName.STORE, "engine restarted, its host memory is empty")

        self._wait_for_writeback()
        for name in self._stores:
            self._cluster.stop_process(name)
        self._http.drop(["device", "host"])
        yield self._phase(PhaseName.GONE, "store stopped, caches dropped")

    def block_size(self) -> int:
        """Tokens in a block."""
        return self._http.probe(self._prompt).block_size

    def restore_store(self) -> None:
        """Start the store again; it is empty, and the engine finds it by itself."""
        for name in reversed(self._stores):
            self._cluster.start_process(name)

    def _phase(self, name: PhaseName, how: str) -> Phase:
        answer = self._http.complete(self._prompt, MAX_TOKENS)
        self._cluster.check()
        self._say(f"{name} ({how}): {_described(answer)}")
        return Phase(name, answer)

    def _wait_for_writeback(self) -> None:
        """Wait until host and store hold every full block: what is dropped earlier would be lost, not moved."""
        deadline = time.monotonic() + WRITEBACK_TIMEOUT_S
        while True:
            held = self._http.probe(self._prompt)
            if min(held.blocks["host"], held.blocks["store"]) >= held.full_blocks:
                return
            if time.monotonic() > deadline:
                raise WritebackTimeout(
                    f"after {WRITEBACK_TIMEOUT_S:.0f} s host and store hold {held.blocks['host']} and "
                    f"{held.blocks['store']} of {held.full_blocks} blocks"
                )
            self._cluster.check()
            time.sleep(_POLL_S)


def _described(answer: Answer) -> str:
    cached = sum(answer.cached_tokens.values())
    return f"first token after {answer.ttft_ms:,.0f} ms, {cached:,} of {answer.prompt_tokens:,} prompt tokens cached"
