"""Cache blocks as symbols: what a block holds is which tokens, in which order, it was computed from.

An entry stands for the key and value of one token: the fingerprint of the whole prefix up to it, and that of the prefix
before it. A reader that follows the links notices every block that is unfilled, foreign or out of order, which real
numbers would only show as slightly wrong logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier_worker.core.ids import Tier

_MODULUS = (1 << 61) - 1
_ROOT = 88172645463325252


@dataclass(frozen=True, slots=True)
class Entry:
    """Cache entry of one token: fingerprints of the prefix before it and with it."""

    before: int
    after: int


Content = tuple[Entry | None, ...]
"""One block; None = unfilled."""


class WrongToken(AssertionError):
    """A step read a block that does not hold what its sequence needs."""


class Hazard(AssertionError):
    """A slot was written while something else still used it."""


def extend(before: int, token: int) -> Entry:
    """The entry of ``token`` behind the prefix ``before``."""
    return Entry(before, (before * 6364136223846793005 + token * 1442695040888963407 + 1) % _MODULUS)


def entries(tokens: Iterable[int]) -> list[Entry]:
    """The entries of a sequence from its start."""
    made, before = [], _ROOT
    for token in tokens:
        made.append(extend(before, token))
        before = made[-1].after
    return made


def sample(after: int, vocab_size: int) -> int:
    """The token that follows a prefix; the same for everybody who has this prefix."""
    return (after >> 7) % vocab_size


def continuation(
    prompt: Sequence[int], count: int, vocab_size: int, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """The oracle: what the model answers to ``prompt``, with nothing cached."""
    before = entries(prompt)[-1].after
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(sample(before, vocab_size))
        before = extend(before, tokens[-1]).after
        if tokens[-1] in stop_ids:
            break
    return tokens


@dataclass(slots=True)
class SymbolicMemory:
    """The slots of one tier on one rank, and who uses them right now.

    Args:
        name: of the tier and rank, for messages.
        num_slots: including padding slot 0.
        block_size: tokens in a block.
    """

    name: str
    num_slots: int
    block_size: int
    slots: list[list[Entry | None]] = field(init=False)
    _users: dict[int, dict[object, bool]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = [[None] * self.block_size for _ in range(self.num_slots)]

    def use(self, slot: int, user: object, *, write: bool) -> None:
        """``user`` reads or writes ``slot`` from now until `leave`. Raises Hazard if that meets another's write."""
        if not 0 < slot < self.num_slots:
            msg = f"{self.name}: slot {slot} of {self.num_slots} is none"
            raise Hazard(msg)
        users = self._users.setdefault(slot, {})
        for other, writes in users.items():
            if other != user and (write or writes):
                msg = f"{self.name}: slot {slot} is used by {other} and wanted by {user}"
                raise Hazard(msg)
        users[user] = users.get(user, False) or write

    def leave(self, user: object) -> None:
        """``user`` touches nothing any more."""
        for slot in [slot for slot, users in self._users.items() if users.pop(user, None) is not None]:
            if not self._users[slot]:
                del self._users[slot]

    def content(self, slot: int) -> Content:
        """A copy of a slot."""
        return tuple(self.slots[slot])

    def put(self, slot: int, content: Content) -> None:
        """Overwrite a slot."""
        self.slots[slot][:] = content

    def spoil(self, slot: int) -> None:
        """A copy into a slot broke off."""
        self.slots[slot][:] = [None] * self.block_size

    def write(self, table: Sequence[int], start: int, tokens: Sequence[int]) -> int:
        """Compute ``tokens`` at ``start`` behind the cached prefix; returns the fingerprint of it all.

        Raises:
            WrongToken: the prefix is not whole.
        """
        before = self._follow(table, start)
        for position, token in enumerate(tokens, start):
            entry = extend(before, token)
            self.slots[table[position // self.block_size]][position % self.block_size] = entry
            before = entry.after
        return before

    def _follow(self, table: Sequence[int], stop: int) -> int:
        before = _ROOT
        for position in range(stop):
            slot = table[position // self.block_size]
            entry = self.slots[slot][position % self.block_size]
            if entry is None or entry.before != before:
                what = "unfilled" if entry is None else "of another sequence"
                msg = f"{self.name}: position {position} of {stop} in slot {slot} is {what}"
                raise WrongToken(msg)
            before = entry.after
        return before


@dataclass(slots=True)
class SymbolicRank:
    """Device and host memory of one rank."""

    device: SymbolicMemory
    host: SymbolicMemory

    def tier(self, tier: Tier) -> SymbolicMemory:
        """The memory of ``tier``."""
        return self.device if tier is Tier.DEVICE else self.host

    def leave(self, user: object) -> None:
        """``user`` touches nothing of this rank any more."""
        self.device.leave(user)
        self.host.leave(user)
