"""Hypothesis drives the engine step by step and shrinks what fails: submit, cancel, drop, faults, time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import Tier
from kvtier_worker.engine.frontend import FinishReason
from kvtier_worker.testing.faults import Faults
from kvtier_worker.testing.simulation import Simulation
from kvtier_worker.testing.workers import FakeStore, FakeWorkerGroup

NUM_DEVICE = 12
LONGEST = (NUM_DEVICE - 1) * 4 - 1


class EngineMachine(RuleBasedStateMachine):
    """Prompts are prefixes of two texts, so that they share, duplicate and extend one another."""

    @initialize(
        num_ranks=st.sampled_from([1, 2]),
        num_host=st.sampled_from([0, 6, 30]),
        chunk=st.sampled_from([3, 8, 64]),
        in_batch=st.booleans(),
        timeout=st.sampled_from([0, 10]),
        seed=st.integers(0, 2**16),
    )
    def start(self, *, num_ranks: int, num_host: int, chunk: int, in_batch: bool, timeout: int, seed: int) -> None:
        self.store: FakeStore = {}
        self.names: list[str] = []
        workers = FakeWorkerGroup(num_ranks, NUM_DEVICE, num_host, seed=seed, store=self.store)
        flags = WorkerSettings(
            model="machine",
            block_size=4,
            enable_kvcache_store=True,
            max_tokens_per_batch=chunk,
            max_seqs_per_batch=4,
            enable_in_batch_prefix_cache=in_batch,
            prefetch_timeout=timeout,
        )
        self.simulation = Simulation(flags, workers)

    @rule(text=st.sampled_from([0, 1000]), length=st.integers(1, LONGEST), tokens=st.integers(1, 12))
    def submit(self, text: int, length: int, tokens: int) -> None:
        name = f"r{len(self.names)}"
        self.names.append(name)
        self.simulation.submit(name, range(text, text + length), tokens)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        leader = data.draw(st.sampled_from(self.names))
        prompt = self.simulation.clients[leader].request.prompt_token_ids
        name = f"r{len(self.names)}"
        self.names.append(name)
        self.simulation.submit(name, prompt, 3, leader=leader)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.simulation.cancel(data.draw(st.sampled_from(self.names)))

    @rule(turns=st.integers(1, 12))
    def pass_time(self, turns: int) -> None:
        for _ in range(turns):
            self.simulation.turn()

    @rule(tiers=st.sets(st.sampled_from([Tier.DEVICE, Tier.HOST]), min_size=1))
    def drop(self, tiers: set[Tier]) -> None:
        self.simulation.engine.drop_caches(frozenset(tiers))

    @rule(down=st.booleans())
    def switch_store(self, down: bool) -> None:
        self.simulation.workers.faults.store_down = down

    @rule(kind=st.sampled_from(["prefetch_item_lost", "prefetch_malformed", "copy_fails", "restore_aborts"]))
    def break_something(self, kind: str) -> None:
        setattr(self.simulation.workers.faults, kind, 0.5)

    @rule()
    def repair(self) -> None:
        self.simulation.workers.faults = Faults()

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        self.simulation.run()
        ends = {client.reason for client in self.simulation.clients.values()}
        assert ends <= {FinishReason.LENGTH, FinishReason.CANCELLED}


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=25, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
