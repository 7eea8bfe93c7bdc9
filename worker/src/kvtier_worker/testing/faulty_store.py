"""A store that misbehaves on purpose, reproducibly from a seed: slow, partial, short, corrupt, dead, recovering.

It wraps any `KVCacheStore`. What a call suffers depends only on the seed and the call's number, so a failing run can
be repeated; with several threads the numbers, and so the faults, depend on the order of calls.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtier_worker.engine.ports import GetOutcome, KVCacheStore, PutOutcome, StoreBuffer


@dataclass(frozen=True, slots=True)
class FaultProfile:
    """What may go wrong. Chances are per call or per object, 0…1; the default does nothing.

    Attributes:
        slow: chance that a call is delayed.
        delay_s: by how much.
        partial_get: chance per object that a read ends in FAULT.
        short_read: chance per object that only its first half arrives: MISS, garbage stays in the buffer.
        corrupt: chance per object that a HIT has one flipped bit. Only a checksum can tell.
        vanish: chance per object that it is gone between `exists` and `get`.
        lease_expiry: chance per call that a whole read is rejected after its bytes arrived.
        hidden: chance per key that `exists` does not see it.
        failed_put: chance per object that a write fails.
        lost_put: chance per object that a write claims STORED and is not.
        outages: half-open ranges of call numbers during which the store is dead; numbers start at 0.
    """

    slow: float = 0.0
    delay_s: float = 0.0
    partial_get: float = 0.0
    short_read: float = 0.0
    corrupt: float = 0.0
    vanish: float = 0.0
    lease_expiry: float = 0.0
    hidden: float = 0.0
    failed_put: float = 0.0
    lost_put: float = 0.0
    outages: tuple[tuple[int, int], ...] = ()


class FaultyStore:
    """`KVCacheStore` around another one. `profile` and `dead` may change at any time.

    Args:
        inner: the store that does the work.
        profile: what may go wrong.
        seed: of every decision.
        sleep: how to be slow; a fake clock's sleep in virtual time.
    """

    def __init__(
        self,
        inner: KVCacheStore,
        profile: FaultProfile | None = None,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.profile = profile if profile is not None else FaultProfile()
        self.dead = False
        self._inner = inner
        self._seed = seed
        self._sleep = sleep
        self._calls = 0
        self._errors: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def calls(self) -> int:
        """Calls of `exists`, `get` and `put` so far."""
        return self._calls

    @property
    def state(self) -> str:
        """``open`` while dead."""
        return "open" if self._is_out(self._calls) else self._inner.state

    @property
    def error_counts(self) -> Mapping[str, int]:
        """Injected faults as ``injected_…`` and the inner store's errors."""
        with self._lock:
            return {**self._inner.error_counts, **self._errors}

    def allocate(self, nbytes: int) -> int:
        """As the inner store."""
        return self._inner.allocate(nbytes)

    def register(self, address: int, nbytes: int) -> None:
        """As the inner store."""
        self._inner.register(address, nbytes)

    def exists(self, keys: Sequence[str]) -> Sequence[bool]:
        """Nothing when dead; hides some."""
        chance, is_out = self._begin()
        if is_out:
            return [False] * len(keys)
        found = self._inner.exists(keys)
        return [there and not self._strikes(chance, self.profile.hidden, "hidden") for there in found]

    def get(self, buffers: Sequence[StoreBuffer]) -> Sequence[GetOutcome]:
        """Read, then break what the profile says."""
        chance, is_out = self._begin()
        if is_out:
            return [GetOutcome.FAULT] * len(buffers)
        outcomes = self._inner.get(buffers)
        if self._strikes(chance, self.profile.lease_expiry, "lease_expiry"):
            return [GetOutcome.FAULT] * len(buffers)
        return [self._spoil(chance, buffer, one) for buffer, one in zip(buffers, outcomes, strict=True)]

    def _spoil(self, chance: random.Random, buffer: StoreBuffer, outcome: GetOutcome) -> GetOutcome:
        if outcome is not GetOutcome.HIT:
            return outcome
        if self._strikes(chance, self.profile.partial_get, "partial_get"):
            return GetOutcome.FAULT
        if self._strikes(chance, self.profile.vanish, "vanish"):
            return GetOutcome.MISS
        if self._strikes(chance, self.profile.short_read, "short_read"):
            half = buffer.nbytes // 2
            ctypes.memset(buffer.address + half, 0xA5, buffer.nbytes - half)
            return GetOutcome.MISS
        if self._strikes(chance, self.profile.corrupt, "corrupt"):
            place = ctypes.c_ubyte.from_address(buffer.address + chance.randrange(buffer.nbytes))
            place.value ^= 1 << chance.randrange(8)
        return GetOutcome.HIT

    def put(self, buffers: Sequence[StoreBuffer]) -> Sequence[PutOutcome]:
        """Write, except what the profile refuses or loses."""
        chance, is_out = self._begin()
        if is_out:
            return [PutOutcome.FAILED] * len(buffers)
        fates: dict[str, PutOutcome] = {}
        for buffer in buffers:
            if buffer.key in fates:
                continue
            if self._strikes(chance, self.profile.failed_put, "failed_put"):
                fates[buffer.key] = PutOutcome.FAILED
            elif self._strikes(chance, self.profile.lost_put, "lost_put"):
                fates[buffer.key] = PutOutcome.STORED
        written = [buffer for buffer in buffers if buffer.key not in fates]
        outcomes = iter(self._inner.put(written))
        return [fates[buffer.key] if buffer.key in fates else next(outcomes) for buffer in buffers]

    def discard(self, keys: Sequence[str]) -> None:
        """Drop objects, unless the store is out."""
        _, is_out = self._begin()
        if not is_out:
            self._inner.discard(keys)

    def close(self) -> None:
        """As the inner store."""
        self._inner.close()

    def _begin(self) -> tuple[random.Random, bool]:
        with self._lock:
            number = self._calls
            self._calls += 1
        chance = random.Random(f"{self._seed}/{number}")  # noqa: S311 - reproducible on purpose
        if self._strikes(chance, self.profile.slow, "slow"):
            self._sleep(self.profile.delay_s)
        is_out = self._is_out(number)
        if is_out:
            self._count("outage")
        return chance, is_out

    def _is_out(self, number: int) -> bool:
        return self.dead or any(start <= number < stop for start, stop in self.profile.outages)

    def _strikes(self, chance: random.Random, probability: float, name: str) -> bool:
        if probability <= 0.0 or chance.random() >= probability:
            return False
        self._count(name)
        return True

    def _count(self, name: str) -> None:
        with self._lock:
            self._errors[f"injected_{name}"] += 1
