"""Unit tests of when a status is worth writing."""

from __future__ import annotations

from typing import Any

from kvtier_operator.controller.status_writer import same_status
from kvtier_operator.status import hindered_status


def condition(kind: str, status: str = "True", **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "R", "message": "m", "lastTransitionTime": "t0"} | more


def status(*conditions: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"observedGeneration": 1, "conditions": list(conditions), **more}


def test_equal_statuses_are_the_same_whatever_the_order_of_conditions() -> None:
    assert same_status(status(condition("A"), condition("B")), status(condition("B"), condition("A")))


def test_conditions_of_others_are_theirs() -> None:
    assert same_status(status(condition("A")), status(condition("A"), condition("Theirs")))


def test_a_changed_message_a_new_field_and_a_field_that_went_are_news() -> None:
    live = status(condition("A"), leader={"pod": "m-0"})
    assert not same_status(status(condition("A", message="other"), leader={"pod": "m-0"}), live)
    assert not same_status(status(condition("A")), live)
    assert not same_status(status(condition("A"), leader={"pod": "m-0"}, phase="Ready"), live)
    assert not same_status(status(condition("A"), condition("B"), leader={"pod": "m-0"}), live)


def test_no_message_is_longer_than_the_api_server_takes() -> None:
    planned = status(condition("Ready"), condition("Progressing"))
    ready, progressing = hindered_status(planned, "x" * 50_000)["conditions"]
    assert ready == condition("Ready")
    assert len(progressing["message"]) == 2000
