"""Stop strings are cut exactly, whatever pieces the text arrives in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.api.stops import StopMatcher

SMALL = st.text(alphabet="ab", min_size=1, max_size=4)


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The definition: read character by character, the stop string that is complete first wins, of two the longer."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


def feed(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        outcome = matcher.feed(piece)
        shown.append(outcome.text)
        if outcome.stopped:
            return shown, True
    return [*shown, matcher.flush()], False


@given(st.lists(st.text(alphabet="abc", max_size=5), max_size=8), st.lists(SMALL, max_size=3))
def test_pieces_give_what_the_whole_gives(pieces: list[str], stops: list[str]) -> None:
    shown, stopped = feed(pieces, stops)
    assert ("".join(shown), stopped) == cut("".join(pieces), stops)


@given(st.lists(st.text(alphabet="abc", max_size=5), max_size=8), st.lists(SMALL, min_size=1, max_size=3))
def test_nothing_shown_is_ever_taken_back(pieces: list[str], stops: list[str]) -> None:
    whole, _ = cut("".join(pieces), stops)
    shown = ""
    for piece in feed(pieces, stops)[0]:
        shown += piece
        assert whole.startswith(shown)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    assert feed(["one EN", "D", "x"], ["END."]) == (["one ", "", "ENDx", ""], False)
    assert feed(["one EN", "D", ".x"], ["END."]) == (["one ", "", ""], True)


def test_text_that_cannot_be_part_of_a_stop_string_is_shown_at_once() -> None:
    assert StopMatcher(["END"]).feed("no stop here").text == "no stop here"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [("abcd", ["abcd", "bc"], "a"), ("xabc", ["bc", "abc"], "x"), ("aaa", ["aa"], ""), ("abc", [], "abc")],
)
def test_of_several_stop_strings_the_one_complete_first_wins(text: str, stops: list[str], expected: str) -> None:
    assert "".join(feed([text], stops)[0]) == expected
    assert "".join(feed(list(text), stops)[0]) == expected
