"""Random schedules for the simulation: small pools, shared prefixes, cancels, drops and faults, all from one seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import Tier
from kvtier_worker.core.keys import HashChain
from kvtier_worker.testing.faults import Delays, Faults
from kvtier_worker.testing.simulation import Simulation
from kvtier_worker.testing.symbolic import entries
from kvtier_worker.testing.workers import FakeStore, FakeWorkerGroup

BLOCK_SIZE = 4


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one seed makes.

    Args:
        seed: of everything.
        num_ranks: tensor-parallel ranks.
        faulty: whether anything goes wrong.
        num_requests: submitted over the run.
    """

    seed: int
    num_ranks: int = 1
    faulty: bool = False
    num_requests: int = 24

    def run(self) -> Simulation:
        """Run it to its end, checking all the way; an AssertionError names the seed."""
        random = Random(self.seed)  # noqa: S311 - reproducible, not secret
        simulation = Simulation(self._settings(random), self._workers(random))
        try:
            self._plan(random, simulation)
            simulation.run()
        except Exception as error:
            error.add_note(f"reproduce with {self}")
            raise
        return simulation

    def _settings(self, random: Random) -> WorkerSettings:
        budget = random.choice([8, 16, 64])
        return WorkerSettings(
            model="simulated",
            block_size=BLOCK_SIZE,
            enable_kvcache_store=_chance(random, 0.8),
            enable_prefix_cache=_chance(random, 0.95),
            prefetch_timeout=random.choice([0, 5, 40]),
            prefetch_batch_size=random.choice([1, 2, 5]),
            enable_control_h2d_block_num=_chance(random, 0.3),
            max_h2d_blocks_per_step=random.choice([1, 3, 8]),
            enable_in_batch_prefix_cache=_chance(random, 0.3),
            max_tokens_per_batch=budget,
            max_tokens_per_chunk_for_prefill=random.choice([-1, 4, 7]),
            max_seqs_per_batch=random.choice([2, 5, 20]),
            enable_chunked_prefill=_chance(random, 0.85),
            enable_mix_batch=_chance(random, 0.7),
            priority_strategy=random.choice(["fcfs", "priority"]),
            device_eviction=random.choice(["lru", "s3fifo"]),
            host_eviction=random.choice(["lru", "s3fifo"]),
        )

    def _workers(self, random: Random) -> FakeWorkerGroup:
        num_device = random.choice([9, 14, 40])
        num_host = random.choice([0, 3, num_device + 4, 2 * num_device])
        faults = Faults()
        if self.faulty:
            rates = [random.choice([0.0, 0.05, 0.3]) for _ in range(6)]
            faults = Faults(
                prefetch_item_lost=rates[0],
                prefetch_malformed=rates[1],
                copy_fails=rates[2],
                put_fails=rates[3],
                restore_aborts=rates[4],
                registers_short=rates[5],
                forward_fails=random.choice([0.0, 0.02]),
            )
        return FakeWorkerGroup(
            num_ranks=self.num_ranks,
            num_device_blocks=num_device,
            num_host_slots=num_host,
            block_size=BLOCK_SIZE,
            seed=self.seed,
            store=_warm_store(random, self.num_ranks),
            faults=faults,
            delays=replace(Delays(), forward=random.choice([0.001, 0.02]), prefetch=random.choice([0.001, 0.03])),
            max_position=(num_device - 1) * BLOCK_SIZE,
            eos_token_ids=(13,),
        )

    def _plan(self, random: Random, simulation: Simulation) -> None:
        workers = simulation.workers
        longest = simulation.engine.info.max_model_len - 1
        if not simulation.settings.enable_chunked_prefill:
            longest = min(longest, simulation.settings.max_tokens_per_batch)
        for number in range(self.num_requests):
            when, name = random.random() * 0.4, f"r{number}"
            length = random.choice([1, 3, 4, 5, 8, 16, longest, 1 + int(random.random() * longest)])
            prompt = _document(random)[: min(length, longest)]
            submit = partial(
                simulation.submit,
                prompt=prompt,
                max_tokens=random.choice([1, 2, 9, 30]),
                priority=random.randrange(3),
            )
            workers.at(when, partial(submit, name))
            if _chance(random, 0.15):
                for choice in (1, 2):
                    follow = partial(submit, f"{name}.{choice}", leader=name)
                    workers.at(when + 0.0001 * choice, follow)
            if _chance(random, 0.25):
                delay = random.random() * random.choice([0.002, 0.02, 0.2])
                workers.at(when + delay, partial(simulation.cancel, name))
        for _ in range(6):
            tiers = frozenset(random.sample([Tier.DEVICE, Tier.HOST], random.choice([1, 2])))
            workers.at(random.random() * 0.5, partial(simulation.engine.drop_caches, tiers))
        if self.faulty:
            workers.at(random.random() * 0.2, partial(_set_store, simulation, down=True))
            workers.at(0.2 + random.random() * 0.2, partial(_set_store, simulation, down=False))


def _chance(random: Random, probability: float) -> bool:
    return random.random() < probability


def _set_store(simulation: Simulation, *, down: bool) -> None:
    simulation.workers.faults.store_down = down


_STEM = tuple(Random(7).choices(range(50), k=200))  # noqa: S311 - test data


def _document(random: Random) -> tuple[int, ...]:
    """A text that shares a prefix of random length with others."""
    shared = random.choice([0, 4, 10, 16, 40, 200])
    tail = Random(random.randrange(4)).choices(range(50), k=200)  # noqa: S311 - test data
    return (*_STEM[:shared], *tail)[:200]


def _warm_store(random: Random, num_ranks: int) -> FakeStore:
    """What another engine has left behind: some blocks of the common prefix, not all of them on every rank."""
    whole = entries(_STEM)
    store: FakeStore = {}
    rate = random.choice([0.0, 0.5, 0.95, 1.0])
    for index, block_hash in enumerate(HashChain(BLOCK_SIZE).extend(_STEM, len(_STEM) // BLOCK_SIZE)):
        for rank in range(num_ranks):
            if random.random() < rate:
                store[rank, bytes(block_hash)] = tuple(whole[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
    return store
