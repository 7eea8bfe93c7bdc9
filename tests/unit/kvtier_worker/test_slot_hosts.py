"""A pod that listens at its own name waits until the name is its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtier_worker.errors import ConfigError
from kvtier_worker.slot import read_command, wait_for_hosts


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_names_of_a_slot_are_read(tmp_path: Path) -> None:
    (tmp_path / "slot-0.hosts").write_text("a.b.c.svc\n")
    assert read_command([f"--dir={tmp_path}", "--", "x"], {"KVTIER_SLOT": "0"}).hosts == ("a.b.c.svc",)
    (tmp_path / "slot-1.flags").write_text("")
    assert read_command([f"--dir={tmp_path}", "--", "x"], {"KVTIER_SLOT": "1"}).hosts == ()


def test_a_name_that_leads_here_is_waited_for_no_longer() -> None:
    clock = Clock()
    wait_for_hosts(["localhost", "127.0.0.1"], clock, clock.sleep)
    assert clock.now == 0.0


def test_names_that_lead_elsewhere_are_all_named_when_the_patience_is_over() -> None:
    clock = Clock()
    # 192.0.2.0/24 is for documentation: no machine has it. The other name cannot be looked up at all.
    with pytest.raises(ConfigError) as caught:
        wait_for_hosts(["192.0.2.1", "localhost", "no name"], clock, clock.sleep)
    assert [violation.split(":")[0] for violation in caught.value.violations] == ["192.0.2.1", "no name"]
    assert all("must select this pod" in violation for violation in caught.value.violations)
    assert 60.0 <= clock.now < 61.0
