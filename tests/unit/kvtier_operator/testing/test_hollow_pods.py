"""What hollow nodes report about pods, without an API server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.testing.hollow_pods import Mood, Place, Rule, report, rule_of

PLACE = Place(pod_ip="127.9.0.1", host_ip="127.9.255.1")
BEFORE, NOW = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
READY = Rule("*", Mood.READY)
HELD = Rule("*", Mood.HELD)
CRASHING = Rule("*", Mood.FAILING, "CrashLoopBackOff")
UNPULLED = Rule("*", Mood.FAILING, "ImagePullBackOff")
RULES = (READY, HELD, CRASHING, UNPULLED)


def pod(name: str = "web-0", status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "here"},
        "spec": {"containers": [{"name": "main", "image": "main:1"}], **spec},
        "status": status or {},
    }


def after(one: dict[str, Any], rule: Rule, now: str = NOW) -> dict[str, Any]:
    """The pod when the server has merged a report: conditions by type, everything else as it is."""
    change = report(one, rule, PLACE, now)
    conditions = {item["type"]: item for item in one["status"].get("conditions", [])}
    for condition in change.get("conditions", []):
        merged = conditions.get(condition["type"], {}) | condition
        conditions[condition["type"]] = {key: value for key, value in merged.items() if value is not None}
    status = one["status"] | change | {"conditions": list(conditions.values())}
    return {**one, "status": status}


def conditions(one: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {item["type"]: (item["status"], item["lastTransitionTime"]) for item in one["status"]["conditions"]}


def main_container(one: dict[str, Any]) -> dict[str, Any]:
    (container,) = one["status"]["containerStatuses"]
    assert isinstance(container, dict)
    return container


def test_a_new_pod_is_reported_running_and_ready_at_its_addresses() -> None:
    status = after(pod(), READY)["status"]
    assert (status["phase"], status["podIP"], status["hostIP"]) == ("Running", "127.9.0.1", "127.9.255.1")
    assert status["podIPs"] == [{"ip": "127.9.0.1"}]
    assert {name: value for name, (value, _) in conditions({"status": status}).items()} == {
        "PodReadyToStartContainers": "True",
        "Initialized": "True",
        "ContainersReady": "True",
        "Ready": "True",
    }
    assert status["containerStatuses"][0]["state"] == {"running": {"startedAt": NOW}}


@given(first=st.sampled_from(RULES), second=st.sampled_from(RULES))
def test_a_report_changes_nothing_the_second_time(first: Rule, second: Rule) -> None:
    settled = after(after(pod(), first, BEFORE), second)
    assert report(settled, second, PLACE, "2026-01-01T09:00:00Z") == {}


def test_fields_that_a_server_adds_are_no_reason_to_report() -> None:
    settled = after(pod(), READY)
    settled["status"]["qosClass"] = "BestEffort"
    settled["status"]["containerStatuses"][0]["resources"] = {}
    assert report(settled, READY, PLACE, NOW) == {}


def test_a_crash_loop_waits_after_a_restart_and_is_not_ready() -> None:
    crashed = after(after(pod(), READY, BEFORE), CRASHING)
    container = main_container(crashed)
    assert container["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert (container["ready"], container["started"], container["restartCount"]) == (False, False, 1)
    assert container["lastState"]["terminated"]["exitCode"] == 1
    assert crashed["status"]["phase"] == "Running"
    assert conditions(crashed)["Ready"] == ("False", NOW)
    assert conditions(crashed)["Initialized"] == ("True", BEFORE)


def test_a_pod_whose_image_is_missing_stays_pending() -> None:
    waiting = after(pod(), UNPULLED)
    assert waiting["status"]["phase"] == "Pending"
    assert main_container(waiting)["restartCount"] == 0
    assert main_container(waiting)["lastState"] == {}


def test_a_held_pod_runs_without_being_ready_and_goes_on_when_released() -> None:
    held = after(pod(), HELD, BEFORE)
    assert main_container(held)["state"] == {"running": {"startedAt": BEFORE}}
    assert conditions(held)["Ready"][0] == "False"
    released = after(held, READY)
    assert conditions(released)["Ready"] == ("True", NOW)
    assert main_container(released)["state"] == {"running": {"startedAt": BEFORE}}
    assert all("reason" not in item for item in released["status"]["conditions"])


def test_a_readiness_gate_that_nobody_opened_keeps_a_pod_from_being_ready() -> None:
    gated = after(pod(readinessGates=[{"conditionType": "served"}]), READY, BEFORE)
    assert conditions(gated)["ContainersReady"][0] == "True"
    assert conditions(gated)["Ready"][0] == "False"
    gated["status"]["conditions"].append({"type": "served", "status": "True", "lastTransitionTime": NOW})
    assert conditions(after(gated, READY))["Ready"] == ("True", NOW)


def test_conditions_of_others_are_not_reported() -> None:
    gated = pod(readinessGates=[{"conditionType": "served"}])
    gated["status"]["conditions"] = [{"type": "served", "status": "False", "lastTransitionTime": BEFORE}]
    assert "served" not in {item["type"] for item in report(gated, READY, PLACE, NOW)["conditions"]}


def test_init_containers_are_done_and_sidecars_run() -> None:
    containers = [{"name": "wait", "image": "i"}, {"name": "proxy", "image": "i", "restartPolicy": "Always"}]
    once = after(pod(initContainers=containers), READY, BEFORE)
    wait, proxy = once["status"]["initContainerStatuses"]
    assert wait["state"]["terminated"]["reason"] == "Completed"
    assert proxy["state"] == {"running": {"startedAt": BEFORE}}
    assert report(once, READY, PLACE, NOW) == {}


@pytest.mark.parametrize(
    ("rules", "mood"),
    [
        ([], Mood.READY),
        ([Rule("web-*", Mood.HELD)], Mood.HELD),
        ([Rule("here/web-0", Mood.HELD)], Mood.HELD),
        ([Rule("there/*", Mood.HELD)], Mood.READY),
        ([Rule("web-*", Mood.HELD), Rule("web-0", Mood.READY)], Mood.READY),
        ([Rule("web-0", Mood.READY), Rule("*", Mood.FAILING, "CrashLoopBackOff")], Mood.FAILING),
    ],
)
def test_the_last_rule_that_matches_a_pod_counts(rules: list[Rule], mood: Mood) -> None:
    assert rule_of(pod(), rules).mood is mood
