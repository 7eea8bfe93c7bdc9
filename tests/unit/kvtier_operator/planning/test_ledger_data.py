import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.errors import LedgerError
from kvtier_operator.planning.ledger import BlockKey, Entry, Ledger, Retired
from kvtier_operator.planning.ledger_data import ledger_data, read_ledger, read_slots, slots_text
from kvtier_operator.planning.ports import PortBlock


def test_a_cluster_is_one_line_that_people_can_read() -> None:
    ledger = Ledger(
        {
            BlockKey("llm.demo.1", "engine", "A", 0): Entry(PortBlock(20000, 20006)),
            BlockKey("llm.demo.1", "master", "", -1): Entry(PortBlock(20006, 20008), 5.5),
        },
        (Retired(BlockKey("llm.demo.1", "engine", "A", 0), PortBlock(20010, 20012)),),
    )
    assert ledger_data(ledger) == {
        "llm.demo.1": '{"blocks":{"engine/A/0":[20000,20006],"master//-1":[20006,20008,5.5]},'
        '"retired":[["engine/A/0",20010,20012]]}'
    }


_SPANS = st.tuples(
    st.sampled_from(["llm.a.1", "llm.b.2"]),
    st.sampled_from(["engine", "store-dram", "api/engine", "master"]),
    st.sampled_from(["", "A", "B"]),
    st.integers(-1, 1023),
    st.integers(1, 40),
    st.none() | st.floats(0, 2e9),
    st.booleans(),
)


@given(st.lists(_SPANS, max_size=30), st.text("0123456789", max_size=5))
def test_reading_gives_back_what_was_written(
    spans: list[tuple[str, str, str, int, int, float | None, bool]], version: str
) -> None:
    entries: dict[BlockKey, Entry] = {}
    retired: list[Retired] = []
    start = 20000
    for cluster, group, lane, slot, width, released_at, is_retired in spans:
        key, block = BlockKey(cluster, group, lane, slot), PortBlock(start, start + width)
        start += width
        if is_retired:
            retired.append(Retired(key, block, released_at))
        else:
            entries[key] = Entry(block, released_at)
    ledger = Ledger(entries, tuple(sorted(retired, key=lambda one: one.key.cluster)), version)
    assert read_ledger(ledger_data(ledger), version) == ledger


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no record of blocks"),
        ('{"blocks": []}', "is no record of blocks"),
        ('{"block": {}}', "is no record of blocks"),
        ('{"blocks": {"engine": [1, 2]}}', "'engine' is no owner"),
        ('{"blocks": {"engine/C/0": [1, 2]}}', "'engine/C/0' is no owner"),
        ('{"blocks": {"engine/A/0": [20, 20]}}', r"engine/A/0 = \[20, 20\]: is no \[start, stop\]"),
        ('{"blocks": {"engine/A/0": [20, 70000]}}', r"engine/A/0 = \[20, 70000\]: is no \[start, stop\]"),
        ('{"blocks": {"engine/A/0": ["20", 30]}}', "is no .start, stop."),
        ('{"blocks": {"engine/A/0": [20, 30, NaN]}}', "is no .start, stop."),
        ('{"blocks": {"engine/A/0": [20, 30, Infinity]}}', "is no .start, stop."),
        ('{"blocks": {"engine/A/0": [20, 30, -5]}}', "is no .start, stop."),
        ('{"retired": ["engine/A/0"]}', "is no .start, stop."),
        ('{"retired": [[]]}', "is no owner"),
        ('{"blocks": {"engine/A/0": [20, 30], "engine/A/1": [29, 40]}}', "meets engine/A/0 of x, which has 20-29"),
    ],
)
def test_a_damaged_ledger_is_an_error_that_says_where_and_how_to_mend_it(text: str, problem: str) -> None:
    with pytest.raises(LedgerError, match=problem) as caught:
        read_ledger({"x": text}, "1")
    assert "delete the ConfigMap" in str(caught.value)


def test_all_problems_of_a_ledger_come_at_once() -> None:
    with pytest.raises(LedgerError) as caught:
        read_ledger({"a": "?", "b": '{"blocks": {"x": [1, 2], "engine/A/0": []}}'}, "1")
    assert len(caught.value.problems) == 3


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9), st.lists, max_leaves=9)
)
def test_nothing_but_a_ledger_error_comes_out_of_nonsense(value: object) -> None:
    for text in (json.dumps({"blocks": {"engine/A/0": value}}), json.dumps({"retired": [value]}), json.dumps(value)):
        try:
            read_ledger({"x": text}, "1")
        except LedgerError:
            continue


def test_blocks_of_a_set_are_written_for_people_and_read_back() -> None:
    blocks = {0: PortBlock(20000, 20006), 1: PortBlock(20006, 20012), -1: PortBlock(20012, 20014)}
    assert slots_text(blocks) == "-1:20012-20013,0:20000-20005,1:20006-20011"
    assert read_slots(slots_text(blocks)) == blocks


@given(st.text(max_size=40))
def test_nonsense_in_an_annotation_is_no_block(text: str) -> None:
    assert read_slots(f"x{text}") == {} or "," in text


def test_a_block_beyond_all_ports_in_an_annotation_is_left_out() -> None:
    assert read_slots("0:65000-65536,1:20000-20001,2:30-20") == {1: PortBlock(20000, 20002)}
