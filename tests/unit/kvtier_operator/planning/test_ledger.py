from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.api import PortRange
from kvtier_operator.planning.allocation import Allocation, adopt, allocate, release_absent
from kvtier_operator.planning.claims import Claims
from kvtier_operator.planning.ledger import QUARANTINE_S, BlockKey, Entry, Ledger, Retired, Taken, Want, owner
from kvtier_operator.planning.ports import PortBlock

RANGE = PortRange(20000, 100)
NOBODY: frozenset[BlockKey] = frozenset()


def key(slot: int, lane: str = "A", group: str = "engine", cluster: str = "llm.demo.1") -> BlockKey:
    return BlockKey(cluster, group, lane, slot)


def wants(count: int, width: int = 10, lane: str = "A", cluster: str = "llm.demo.1") -> list[Want]:
    return [Want(key(slot, lane, cluster=cluster), width) for slot in range(count)]


def give(
    ledger: Ledger,
    wanted: Sequence[Want],
    live: frozenset[BlockKey] = NOBODY,
    *,
    now: float = 0.0,
    ports: PortRange = RANGE,
    cluster: str = "llm.demo.1",
) -> Allocation:
    return allocate(ledger, ports, cluster, wanted, live=live, now=now)


def assert_disjoint(ledger: Ledger) -> None:
    blocks = [block for block, _ in ledger.claims()]
    assert not [pair for pair in combinations(blocks, 2) if pair[0].meets(pair[1])]


def test_blocks_are_packed_from_the_start_in_the_order_of_the_wants() -> None:
    allocation = give(Ledger(), [Want(key(0), 7), Want(key(1), 3)])
    assert allocation.blocks == {key(0): PortBlock(20000, 20007), key(1): PortBlock(20007, 20010)}
    assert not allocation.refused


def test_asking_again_changes_nothing_and_gives_back_the_very_ledger() -> None:
    first = give(Ledger(resource_version="7"), wants(3))
    again = give(first.ledger, wants(3), frozenset(first.blocks), now=500.0)
    assert again.ledger is first.ledger
    assert again.blocks == first.blocks
    assert first.ledger.resource_version == "7"


def test_a_removed_slot_keeps_its_ports_while_its_pod_lives_and_a_minute_longer() -> None:
    ledger = give(Ledger(), wants(2)).ledger
    held = give(ledger, wants(1), frozenset({key(0), key(1)}), now=1000.0).ledger
    assert held == ledger
    released = give(held, wants(1), frozenset({key(0)}), now=1000.0).ledger
    assert released.entries[key(1)] == Entry(PortBlock(20010, 20020), released_at=1000.0)
    still = give(released, wants(1), now=1000.0 + QUARANTINE_S - 0.1).ledger
    assert still is released
    assert key(1) not in give(still, wants(1), now=1000.0 + QUARANTINE_S).ledger.entries


def test_nobody_else_gets_released_ports_before_the_quarantine_is_over() -> None:
    ledger = give(give(Ledger(), wants(1)).ledger, [], now=10.0).ledger
    other = [Want(key(0, "B"), 10)]
    assert give(ledger, other, now=69.0).blocks[key(0, "B")] == PortBlock(20010, 20020)
    assert give(ledger, other, now=70.0).blocks[key(0, "B")] == PortBlock(20000, 20010)


def test_who_comes_back_within_the_quarantine_gets_its_ports_back() -> None:
    first = give(Ledger(), wants(2))
    away = give(first.ledger, wants(1), now=10.0).ledger
    assert give(away, wants(2), now=20.0).blocks == first.blocks
    assert give(away, wants(2), now=20.0).ledger == first.ledger


def test_a_pod_that_its_old_workload_makes_again_within_the_quarantine_holds_its_ports() -> None:
    ledger = give(give(Ledger(), wants(1)).ledger, [], now=10.0).ledger
    held = give(ledger, [], frozenset({key(0)}), now=20.0).ledger
    assert held.entries[key(0)].released_at is None


def test_a_clock_that_was_ahead_does_not_lock_ports_up() -> None:
    ledger = give(give(Ledger(), wants(1)).ledger, [], now=10_000.0).ledger
    ledger = give(ledger, [], now=100.0).ledger
    assert ledger.entries[key(0)].released_at == 100.0
    assert not give(ledger, [], now=160.0).ledger.entries


def test_another_width_gets_another_block_and_the_old_one_is_kept_back() -> None:
    ledger = give(Ledger(), wants(2)).ledger
    wider = give(ledger, [Want(key(0), 12), Want(key(1), 10)], now=5.0)
    assert wider.blocks == {key(0): PortBlock(20020, 20032), key(1): PortBlock(20010, 20020)}
    assert wider.ledger.retired == (Retired(key(0), PortBlock(20000, 20010), released_at=5.0),)
    later = give(wider.ledger, [Want(key(0), 12), Want(key(1), 10)], now=65.0)
    assert later.ledger.retired == ()
    assert later.blocks == wider.blocks


def test_the_old_block_of_a_living_pod_is_held_until_the_pod_was_away() -> None:
    wanted, alive = [Want(key(0), 12)], frozenset({key(0)})
    ledger = give(give(Ledger(), wants(1)).ledger, wanted, alive, now=5.0).ledger
    assert ledger.retired == (Retired(key(0), PortBlock(20000, 20010), released_at=None),)
    assert give(ledger, wanted, alive, now=500.0).ledger is ledger
    gone = give(ledger, wanted, now=600.0).ledger
    assert give(gone, wanted, alive, now=610.0).ledger.retired[0].released_at == 600.0
    assert give(gone, wanted, alive, now=660.0).ledger.retired == ()


def test_exhaustion_gives_nothing_new_and_says_what_is_missing() -> None:
    first = give(Ledger(), wants(9))
    refused = give(first.ledger, [*wants(10), Want(key(0, "B"), 10), Want(key(1, "B"), 15)])
    assert refused.refused
    assert refused.ledger is first.ledger
    assert refused.blocks == first.blocks
    assert [str(want.key) for want in refused.exhausted] == ["engine/B/0", "engine/B/1"]
    assert refused.missing == 25
    enough = give(first.ledger, [*wants(10), Want(key(0, "B"), 10), Want(key(1, "B"), 15)], ports=PortRange(20000, 125))
    assert not enough.refused


def test_what_is_refused_today_fits_once_released_ports_are_free() -> None:
    ledger = give(Ledger(), wants(10)).ledger
    swap = wants(10, lane="B")
    refused = give(ledger, swap, now=100.0)
    assert refused.refused
    assert give(refused.ledger, swap, now=100.0 + QUARANTINE_S - 1).refused
    assert not give(refused.ledger, swap, now=160.0).refused


def test_widths_that_do_not_fit_beside_the_old_ones_wait_for_them_instead_of_blocking_for_good() -> None:
    ledger = give(Ledger(), [Want(key(0), 60)]).ledger
    wider = [Want(key(0), 80)]
    alive = give(ledger, wider, frozenset({key(0)}), now=100.0)
    assert alive.refused
    assert alive.ledger is ledger
    assert alive.blocks == {}
    gone = give(ledger, wider, now=100.0)
    assert gone.refused
    assert give(gone.ledger, wider, now=160.0).blocks == {key(0): PortBlock(20000, 20080)}


def test_a_moved_range_moves_blocks_only_when_nobody_uses_them() -> None:
    ledger = give(Ledger(), wants(2)).ledger
    moved = PortRange(30000, 100)
    result = give(ledger, wants(2), frozenset({key(0)}), now=1.0, ports=moved)
    assert result.blocks == {key(0): PortBlock(20000, 20010), key(1): PortBlock(30000, 30010)}
    result = give(result.ledger, wants(2), now=100.0, ports=moved)
    assert result.blocks == {key(0): PortBlock(30010, 30020), key(1): PortBlock(30000, 30010)}


def test_clusters_on_one_ledger_keep_out_of_each_others_way_and_entries() -> None:
    theirs = give(Ledger(), wants(2, cluster="b"), cluster="b").ledger
    mine = give(theirs, wants(2), now=50.0)
    assert mine.blocks == {key(0): PortBlock(20020, 20030), key(1): PortBlock(20030, 20040)}
    assert give(mine.ledger, [], now=60.0).ledger.entries[key(0, cluster="b")] == theirs.entries[key(0, cluster="b")]


def test_a_port_that_the_user_chose_is_given_as_it_is_or_its_holder_named() -> None:
    api, other = Want(key(-1, "", "api/engine"), 1, at=8010), Want(key(-1, "", "api/engine", "b"), 1, at=8010)
    first = give(Ledger(), [api])
    assert first.blocks == {api.key: PortBlock(8010, 8011)}
    refused = give(first.ledger, [other, *wants(1, cluster="b")], cluster="b")
    assert refused.refused
    assert refused.taken == (Taken(other.key, PortBlock(8010, 8011), api.key),)
    assert refused.blocks == {}
    assert (refused.exhausted, refused.missing) == ((), 0)


def test_other_wants_keep_clear_of_a_port_that_the_user_chose() -> None:
    blocks = give(Ledger(), [*wants(1), Want(key(-1, "", "api/engine"), 1, at=20005)]).blocks
    assert blocks == {key(-1, "", "api/engine"): PortBlock(20005, 20006), key(0): PortBlock(20006, 20016)}


def test_gone_clusters_are_released_from_a_shared_ledger() -> None:
    ledger = give(give(Ledger(), wants(1)).ledger, wants(1, cluster="b"), cluster="b").ledger
    assert release_absent(ledger, frozenset({"llm.demo.1", "b"}), 5.0) is ledger
    released = release_absent(ledger, frozenset({"b"}), 5.0)
    assert released.entries[key(0)].released_at == 5.0
    assert set(release_absent(released, frozenset({"b"}), 65.0).entries) == {key(0, cluster="b")}


def test_a_lost_ledger_is_made_again_from_what_runs() -> None:
    before = give(Ledger(), wants(4))
    again = adopt(Ledger(), before.blocks)
    assert again == before.ledger
    assert adopt(again, before.blocks) is again


def test_a_pod_on_other_ports_than_the_ledger_says_keeps_both() -> None:
    ledger = adopt(give(Ledger(), wants(1)).ledger, {key(0): PortBlock(20050, 20060)})
    assert ledger.entries[key(0)].block == PortBlock(20000, 20010)
    assert ledger.retired == (Retired(key(0), PortBlock(20050, 20060)),)
    assert adopt(ledger, {key(0): PortBlock(20050, 20060)}) is ledger


def test_of_overlapping_blocks_only_one_is_adopted() -> None:
    ledger = adopt(Ledger(), {key(0): PortBlock(20000, 20010), key(1): PortBlock(20005, 20015)})
    assert ledger == Ledger({key(0): Entry(PortBlock(20000, 20010))})


def test_two_wants_of_one_owner_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="two blocks"):
        give(Ledger(), [Want(key(0), 1), Want(key(0), 2)])


def test_a_cluster_that_is_made_again_under_its_name_is_another_owner() -> None:
    assert owner("llm", "demo", "1") != owner("llm", "demo", "2")
    assert owner("llm", "demo", "") == "demo"


_WANTS = st.lists(
    st.builds(
        lambda cluster, group, lane, slot, width: Want(BlockKey(cluster, group, lane, slot), width),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["prefill", "decode", "store-dram"]),
        st.sampled_from(["A", "B"]),
        st.integers(0, 3),
        st.integers(1, 40),
    ),
    max_size=40,
    unique_by=lambda want: want.key,
)


@given(_WANTS, st.data())
def test_no_two_blocks_meet_whatever_roles_lanes_slots_widths_and_clusters(
    wanted: list[Want], data: st.DataObject
) -> None:
    ledger = Ledger()
    ranges = {name: PortRange(20000 + data.draw(st.integers(0, 50)), data.draw(st.integers(1, 400))) for name in "abc"}
    for turn in range(3):
        for cluster, ports in ranges.items():
            mine = [want for want in wanted if want.key.cluster == cluster and data.draw(st.integers(0, 3))]
            allocation = allocate(ledger, ports, cluster, mine, live=NOBODY, now=turn * 40.0)
            assert_disjoint(allocation.ledger)
            if not allocation.refused:
                assert set(allocation.blocks) == {want.key for want in mine}
            for want in mine:
                if block := allocation.blocks.get(want.key):
                    assert block.width == want.width
                    assert ports.start <= block.start < block.stop <= ports.stop
            ledger = allocation.ledger


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), max_size=10), st.integers(0, 100), st.integers(1, 8))
def test_claims_find_the_holder_that_a_plain_search_finds(
    gaps_and_widths: list[tuple[int, int]], start: int, width: int
) -> None:
    blocks, at = [], 0
    for gap, size in gaps_and_widths:
        blocks.append(PortBlock(at + gap, at + gap + size))
        at += gap + size
    probe = PortBlock(start, start + width)
    claims = Claims((block, index) for index, block in enumerate(blocks))
    meeting = [(block, index) for index, block in enumerate(blocks) if block.meets(probe)]
    holder = claims.holder(probe)
    assert (holder is None) == (not meeting)
    assert holder is None or holder in meeting
    gaps = list(claims.gaps(0))
    assert not [gap for gap in gaps for block in blocks if gap.meets(block)]
    assert sum(gap.width for gap in gaps[:-1]) + sum(block.width for block in blocks) == gaps[-1].start
