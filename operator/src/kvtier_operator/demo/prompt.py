"""A long prompt, the same on every machine: a harbour log made from word lists by counting. Pure."""

from __future__ import annotations

_HARBOURS = ("Oakhaven", "Saltmere", "Northquay", "Elderport", "Greywater", "Linden Bay", "Stonewick")
_GOODS = ("copper", "barley", "tar", "glass", "wool", "salted fish", "timber", "paper", "lamp oil", "rope", "cider")
_PEOPLE = ("the miller", "the smith", "a printer", "the brewery", "two farmers", "the shipyard")
_WINDS = ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west", "no clear side")
_NOTES = (
    "nothing was lost",
    "one crate was wet",
    "the bell rang twice",
    "the bridge stayed open",
    "a late boat came in",
)

NUM_ENTRIES = 69
"""Makes 3,014 tokens of SmolLM2, and an answer whose every token is clearly the likeliest (0.06 in logits at least)."""


def harbour_log(num_entries: int = NUM_ENTRIES) -> str:
    """A log of ``num_entries`` days, ending where the model goes on with the next day."""
    entries = [_entry(day) for day in range(1, num_entries + 1)]
    return "The keeper's log of the harbours.\n\n" + "\n".join(entries) + f"\nDay {num_entries + 1}, harbour of"


def _entry(day: int) -> str:
    harbour, goods, people, wind, note = (
        words[day * step % len(words)]
        for words, step in ((_HARBOURS, 3), (_GOODS, 4), (_PEOPLE, 5), (_WINDS, 2), (_NOTES, 3))
    )
    crates = 10 + day * 17 % 83
    return (
        f"Day {day}, harbour of {harbour}: the ferry brought {crates} crates of {goods} for {people}, "
        f"the wind came from {wind}, and the keeper wrote that {note}."
    )
