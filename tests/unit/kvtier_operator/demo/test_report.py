from dataclasses import replace

import pytest
from kvtier_operator.demo.answers import Answer
from kvtier_operator.demo.prompt import harbour_log
from kvtier_operator.demo.report import Phase, PhaseName, faults, report, speed_remark, table

BLOCK = 128
PROMPT_TOKENS = 3000
FULL = PROMPT_TOKENS // BLOCK * BLOCK


def phase(name: PhaseName, ttft_ms: float, **cached: int) -> Phase:
    tiers = {"device": 0, "host": 0, "store": 0} | cached
    return Phase(name, Answer(ttft_ms, ttft_ms + 300, PROMPT_TOKENS, tiers, (5, 6, 7), " text"))


def good() -> list[Phase]:
    return [
        phase(PhaseName.COLD, 4000),
        phase(PhaseName.DEVICE, 150, device=FULL),
        phase(PhaseName.HOST, 160, host=FULL),
        phase(PhaseName.STORE, 250, store=FULL),
        phase(PhaseName.GONE, 4100),
    ]


def test_a_demo_in_which_every_phase_met_its_tier_has_no_faults() -> None:
    assert faults(good(), BLOCK) == ()


@pytest.mark.parametrize(("index", "tier"), [(1, "device"), (2, "host"), (3, "store")])
def test_a_phase_whose_tier_served_too_few_blocks_is_a_fault(index: int, tier: str) -> None:
    phases = good()
    enough = phase(phases[index].name, 150, **{tier: 22 * BLOCK, "device" if tier != "device" else "host": BLOCK})
    too_few = phase(phases[index].name, 150, **{tier: 21 * BLOCK})
    phases[index] = enough
    assert faults(phases, BLOCK) == ()
    phases[index] = too_few
    assert faults(phases, BLOCK) == (f"{phases[index].name}: 91% of the full blocks came from {tier}",)


@pytest.mark.parametrize("index", [0, 4])
def test_a_phase_that_should_find_nothing_must_find_nothing(index: int) -> None:
    phases = good()
    phases[index] = phase(phases[index].name, 4000, host=BLOCK)
    assert faults(phases, BLOCK) == (f"{phases[index].name}: 128 tokens came from a cache that should have been empty",)


def test_other_tokens_are_a_fault_and_so_are_none() -> None:
    phases = good()
    phases[4] = Phase(PhaseName.GONE, replace(phases[4].answer, token_ids=(5, 6, 8)))
    assert faults(phases, BLOCK) == ("the phases answered with different tokens",)
    silent = [Phase(one.name, replace(one.answer, token_ids=())) for one in good()]
    assert faults(silent, BLOCK) == ("the phases answered with different tokens",)


def test_a_slow_store_hit_is_remarked_and_not_a_fault() -> None:
    phases = good()
    assert "idle machine" not in speed_remark(phases)
    phases[3] = phase(PhaseName.STORE, 501, store=FULL)
    assert faults(phases, BLOCK) == ()
    assert "8.0x faster than cold; an idle machine shows 8x or more" in speed_remark(phases)


def test_a_phase_that_did_not_run_is_a_fault() -> None:
    assert faults(good()[:-1], BLOCK) == ("not run: store gone",)


def test_the_report_has_the_agreed_fields_and_no_others() -> None:
    content = report(good())
    assert set(content) == {"phases", "token_ids_equal"}
    assert content["token_ids_equal"] is True
    assert [one["name"] for one in content["phases"]] == ["cold", "device hit", "host hit", "store hit", "store gone"]
    assert content["phases"][3] == {
        "name": "store hit",
        "ttft_ms": 250,
        "total_ms": 550,
        "prompt_tokens": PROMPT_TOKENS,
        "cached_tokens": {"device": 0, "host": 0, "store": FULL},
        "token_ids": [5, 6, 7],
    }


def test_the_table_shows_where_every_prompt_token_came_from() -> None:
    lines = table(good()).splitlines()
    assert lines[1].split() == ["phase", "first", "token", "vs", "cold", "total", "device", "host", "store", "computed"]
    assert lines[6].split() == ["store", "hit", "250", "ms", "16.0x", "550", "ms", "0", "0", "2,944", "56"]
    assert max(map(len, lines)) <= 100


def test_the_prompt_is_the_same_every_time_and_grows_by_entries() -> None:
    assert harbour_log(5) == harbour_log(5)
    shared = harbour_log(5).rsplit("\n", 1)[0]
    assert harbour_log(6).startswith(shared)
    entries = harbour_log(60).splitlines()
    assert len(set(entries)) == len(entries)
