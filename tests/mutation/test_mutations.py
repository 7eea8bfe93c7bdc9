"""Breaking a rule makes a test fail: five rules, each noticed by a test of its unit and by one of the whole engine.

The table here is the table of `docs/failure-modes.md`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNIT = "tests/unit/kvtier_worker"
SIMULATION = "tests/sim/test_random_schedules.py::test_faults_of_store_copies_and_steps_change_no_token"
DIFFERENTIAL = "tests/integration/test_differential.py::test_tokens_do_not_depend_on_the_cache"

DETECTED_BY = {
    "and over ranks": (
        f"{UNIT}/core/test_hits.py::test_a_block_is_a_hit_only_if_every_rank_has_it",
        f"{UNIT}/engine/test_admission.py::test_a_block_counts_only_if_every_rank_has_it",
        SIMULATION,
    ),
    "wait at the layer": (
        f"{UNIT}/engine/test_transfers.py::test_the_gate_opens_at_the_start_of_each_range_and_not_before_its_copies",
        f"{DIFFERENTIAL}[0]",
    ),
    "D2H before publish": (
        f"{UNIT}/engine/test_writeback.py::test_the_host_publishes_only_when_every_rank_copied_everything",
        SIMULATION,
    ),
    "exists before get": (
        f"{UNIT}/engine/test_transfers.py::test_existence_is_asked_first_and_only_whole_blocks_are_read",
    ),
    "provenance": (
        f"{UNIT}/engine/test_block_manager.py::test_two_requests_that_mounted_the_same_host_prefix_both_restore_right",
        SIMULATION,
    ),
}
CASES = [(rule, test) for rule, tests in DETECTED_BY.items() for test in tests]


def run_broken(rule: str, test: str) -> subprocess.CompletedProcess[str]:
    """Run one test with one rule broken."""
    environment = os.environ | {"KVTIER_MUTATION": rule, "PYTHONPATH": str(Path(__file__).parent)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "mutations",
        "-q",
        "-x",
        "--no-header",
        "-p",
        "no:cacheprovider",
        test,
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rule", "test"), CASES, ids=[f"{rule}: {test.rpartition('::')[2]}" for rule, test in CASES])
def test_a_broken_rule_is_noticed(rule: str, test: str) -> None:
    result = run_broken(rule, test)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout[-4000:]
    assert " error" not in result.stdout.splitlines()[-1], "the test could not even start"


def test_every_rule_is_in_the_table_of_failure_modes() -> None:
    page = (ROOT / "docs" / "failure-modes.md").read_text(encoding="utf-8")
    missing = [name for rule, tests in DETECTED_BY.items() for name in (rule, *tests) if name.split("[")[0] not in page]
    assert missing == []
