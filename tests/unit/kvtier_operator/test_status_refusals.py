"""The status of what cannot be carried out: an invalid spec, a damaged ledger, an object that the server refuses."""

from __future__ import annotations

from kvtier_operator.errors import LedgerError, SpecError, Violation
from kvtier_operator.planning.ledger_data import FIX
from kvtier_operator.reconcile import refuse
from kvtier_operator.status import damaged_ledger_status, invalid_status, refused_status
from kvtier_operator.testing.sample_status import NOW, conditions, message, status


def test_an_invalid_spec_says_everything_and_keeps_what_was_said_of_the_children() -> None:
    before = status()
    body = {"metadata": {"name": "demo", "generation": 5}, "status": before}
    error = SpecError([Violation("spec.roles", [], "write one"), Violation("spec.master.replicas", 0, "write 1")])
    found = invalid_status(body, error, NOW + 5.0)
    told = conditions(found)
    assert (found["phase"], found["observedGeneration"]) == ("Failed", 5)
    assert (told["SpecValid"], told["Ready"]) == ("False/Invalid", "False/SpecInvalid")
    assert (told["Available"], told["StoreReady"]) == ("True/Serving", "True/AllServe")
    assert "spec.roles = []: write one; spec.master.replicas = 0: write 1" in message(found, "SpecValid")
    assert list(told) == list(conditions(before))
    assert {**found, "conditions": 0, "phase": 0, "observedGeneration": 0} == {
        **before,
        "conditions": 0,
        "phase": 0,
        "observedGeneration": 0,
    }
    assert invalid_status({**body, "status": found}, error, NOW + 50.0) == found


def test_an_invalid_spec_of_a_new_object_has_the_three_conditions_that_are_known() -> None:
    found = invalid_status({"metadata": {"name": "x"}}, SpecError([Violation("spec", None, "write it")]), NOW)
    assert list(conditions(found)) == ["Ready", "Progressing", "SpecValid"]


def test_an_object_that_the_server_never_accepts_is_told_in_every_word_people_look_at() -> None:
    before = status()
    found = refused_status(before, before, "Service/x: 422; delete it", NOW + 5.0)
    told = conditions(found)
    assert found["phase"] == "Degraded"
    assert {told["Ready"], told["Progressing"], told["Degraded"]} == {"False/ApplyRefused", "True/ApplyRefused"}
    assert (told["Available"], told["StoreReady"]) == ("True/Serving", "True/AllServe")
    assert message(found, "Ready") == "Service/x: 422; delete it"
    assert list(told) == list(conditions(before))
    assert {**found, "conditions": 0, "phase": 0} == {**before, "conditions": 0, "phase": 0}


def test_a_refusal_that_goes_on_keeps_its_time() -> None:
    first = refused_status(status(), status(), "as before", NOW + 5.0)
    assert refused_status(status(), first, "as before", NOW + 300.0) == first


def test_a_damaged_ledger_is_told_by_the_cluster_that_waits_for_it() -> None:
    error = LedgerError(["ledger data['x']: is no JSON"], FIX)
    running = damaged_ledger_status({"metadata": {"generation": 4}, "status": status()}, error, NOW)
    told = conditions(running)
    assert (told["PortsAllocated"], told["Ready"]) == ("False/LedgerDamaged", "False/PortsAllocated")
    assert (told["Available"], running["phase"]) == ("True/Serving", "Degraded")
    assert "delete the ConfigMap" in message(running, "PortsAllocated")
    assert damaged_ledger_status({"metadata": {}}, error, NOW)["phase"] == "Pending"
    body = {"metadata": {"generation": 4}, "status": status()}
    assert refuse(body, error, NOW) == running
    assert refuse(body, SpecError([Violation("spec", 1, "no")]), NOW)["phase"] == "Failed"
