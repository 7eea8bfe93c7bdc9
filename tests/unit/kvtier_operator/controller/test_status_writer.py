"""Unit tests of when a status is worth writing."""

from __future__ import annotations

from typing import Any

from kvtier_operator.controller.status_writer import REFUSED, same_status, with_refusal

NOW = 1_767_225_600.0


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


def test_a_refusal_shows_in_the_conditions_people_look_at() -> None:
    planned = status(condition("Ready"), condition("Degraded", "False"), condition("StoreReady"))
    said = {item["type"]: item for item in with_refusal(planned, "cannot change", NOW)["conditions"]}
    assert (said["Ready"]["status"], said["Degraded"]["status"]) == ("False", "True")
    assert said["Ready"]["reason"] == REFUSED
    assert said["Ready"]["lastTransitionTime"] == "2026-01-01T00:00:00Z"
    assert said["StoreReady"] == condition("StoreReady")


def test_a_refusal_that_goes_on_does_not_flip_again() -> None:
    planned = status(condition("Degraded", "True"))
    assert with_refusal(planned, "cannot change", NOW)["conditions"][0]["lastTransitionTime"] == "t0"
