"""An engine over fake workers in virtual time, with the invariants that must hold after every turn.

The engine code is the real one; only workers and clock are not. Everything follows from the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import BlockHash, RequestId, Tier
from kvtier_worker.core.keys import HashChain
from kvtier_worker.core.pool import BlockPool
from kvtier_worker.core.sampling import SamplingParams
from kvtier_worker.engine.frontend import EngineRequest, FinishReason, RequestOutput
from kvtier_worker.engine.loop import EngineLoop
from kvtier_worker.testing.symbolic import Content, continuation, entries
from kvtier_worker.testing.workers import FakeWorkerGroup


@dataclass(slots=True)
class Client:
    """One submitted request and what came back.

    Attributes:
        request: as submitted.
        submitted: virtual time.
        expected: what the oracle answers.
        outputs: in order.
        first_at: virtual time of the first token.
    """

    request: EngineRequest
    submitted: float
    expected: list[int]
    outputs: list[RequestOutput] = field(default_factory=list)
    first_at: float | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens received so far."""
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def reason(self) -> FinishReason | None:
        """Why it ended; None = it has not."""
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def cached(self) -> dict[Tier, int]:
        """Cached tokens as last reported."""
        return dict(self.outputs[-1].cached_tokens)


class Simulation:
    """One engine, its fake workers, and its clients.

    Args:
        settings: of the engine; block size and ranks are those of ``workers``.
        workers: fake workers.
    """

    def __init__(self, settings: WorkerSettings, workers: FakeWorkerGroup) -> None:
        self.workers = workers
        self.settings = settings
        self.engine = EngineLoop(settings, workers, workers.clock)
        self.clients: dict[str, Client] = {}
        self._truth: dict[BlockHash, Content] = {}
        self._wrong: list[str] = []

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        leader: str | None = None,
        stop_token_ids: tuple[int, ...] = (),
    ) -> Client:
        """Submit a request now."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop_token_ids)
        request = EngineRequest(
            RequestId(name),
            tuple(prompt),
            params,
            priority=priority,
            leader=None if leader is None else RequestId(leader),
        )
        room = min(max_tokens, self.engine.info.max_model_len - len(prompt))
        stops = frozenset((*stop_token_ids, *self.workers.eos_token_ids))
        expected = continuation(prompt, room, self.workers.vocab_size, stops)
        client = Client(request, self.workers.now, expected)
        self._learn([*prompt, *expected])

        def sink(output: RequestOutput) -> None:
            client.outputs.append(output)
            tokens = client.tokens
            if tokens != expected[: len(tokens)]:  # told by `check`: what a sink raises ends its client only
                self._wrong.append(f"{name}: wrong tokens {tokens}")
            if output.token_ids and client.first_at is None:
                client.first_at = self.workers.now

        self.engine.submit(request, sink)
        self.clients[name] = client
        return client

    def cancel(self, name: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """The client of ``name`` is gone, or has what it wants."""
        self.engine.cancel(RequestId(name), reason)

    def turn(self) -> None:
        """One turn of the engine, then every invariant that holds at any time."""
        self.engine.turn()
        self.check()

    def run(self, max_turns: int = 20_000) -> None:
        """Turn until nothing is left to do, then check what must hold when idle."""
        for _ in range(max_turns):
            self.turn()
            if self.engine.idle and not self.workers.busy:
                break
        else:
            stuck = [name for name, client in self.clients.items() if client.reason is None]
            msg = f"not idle after {max_turns} turns; unfinished: {stuck}"
            raise AssertionError(msg)
        self.check_idle()

    # invariants

    def check(self) -> None:
        """Tokens are right, accounting is exact, and every findable block is whole and right on every rank."""
        assert not self._wrong, self._wrong
        for report in self.engine.check():
            assert report.ok, f"{report.name}: {report.faults}"
        self._check_content(Tier.DEVICE, self.engine.blocks.device)
        if self.engine.blocks.host is not None:
            self._check_content(Tier.HOST, self.engine.blocks.host.pool)

    def check_idle(self) -> None:
        """Every client has one last output; nothing is leased."""
        for name, client in self.clients.items():
            ends = [output for output in client.outputs if output.finish_reason is not None]
            assert len(ends) == 1, f"{name}: {len(ends)} last outputs"
            assert client.outputs[-1] is ends[0], f"{name}: output after the last"
            if client.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert client.tokens == client.expected, f"{name}: {client.tokens}"
                cached = sum(client.cached.values())
                assert cached < len(client.request.prompt_token_ids), f"{name}: no prompt token computed"
        for report in self.engine.check():
            assert report.leased == 0, f"{report.name}: {report.leased} slots leased when idle"

    def _check_content(self, tier: Tier, pool: BlockPool) -> None:
        for block_hash, content in self._truth.items():
            slot = pool.lookup(block_hash)
            if slot is None or pool.pending(slot) is not None:
                continue
            for rank, memory in enumerate(self.workers.ranks):
                found = memory.tier(tier).content(slot)
                assert found == content, f"{tier} slot {slot} of rank {rank} is published and holds something else"

    def _learn(self, tokens: Sequence[int]) -> None:
        size = self.workers.block_size
        count = len(tokens) // size
        whole = entries(tokens)
        for index, block_hash in enumerate(HashChain(size).extend(tokens, count)):
            self._truth[block_hash] = tuple(whole[index * size : (index + 1) * size])
