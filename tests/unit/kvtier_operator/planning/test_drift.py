from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.planning.drift import first_difference

LEAVES = st.one_of(st.text(max_size=4), st.integers(0, 9), st.booleans())
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), st.lists(inner, max_size=3)),
)


def deployment(**container: Any) -> dict[str, Any]:
    return {"spec": {"template": {"spec": {"containers": [{"name": "main", **container}]}}}}


def test_what_the_server_and_others_add_is_no_drift() -> None:
    intent = deployment(image="a", ports=[{"containerPort": 80}])
    live = copy.deepcopy(intent)
    live["status"] = {"ready": 1}
    live["spec"]["paused"] = False
    containers = live["spec"]["template"]["spec"]["containers"]
    containers[0]["ports"][0]["protocol"] = "TCP"
    containers[0]["ports"].insert(0, {"containerPort": 15000})
    containers.insert(0, {"name": "sidecar", "image": "b"})
    assert not first_difference(intent, live)


@pytest.mark.parametrize(
    ("intent", "live"),
    [
        ({"resources": {"requests": {"memory": "1Gi"}}}, {"resources": {"requests": {"memory": "1073741824"}}}),
        ({"resources": {"limits": {"cpu": "0.5"}}}, {"resources": {"limits": {"cpu": "500m"}}}),
        ({"emptyDir": {"sizeLimit": "2Gi"}}, {"emptyDir": {"sizeLimit": "2048Mi"}}),
        ({"resources": {"requests": {"memory": "1k"}}}, {"resources": {"requests": {"memory": "1000"}}}),
        ({"targetPort": 80}, {"targetPort": "80"}),
        ({"labels": {}}, {}),
        ({"args": []}, {"args": None}),
    ],
)
def test_another_spelling_of_the_same_value_is_no_drift(intent: Any, live: Any) -> None:
    assert first_difference(intent, live) == ""


@pytest.mark.parametrize(
    ("intent", "live", "found"),
    [
        ({"spec": {"replicas": 3}}, {"spec": {"replicas": 2}}, "spec.replicas is 2 instead of 3"),
        ({"spec": {"replicas": 3}}, {"spec": {}}, "spec.replicas is absent instead of 3"),
        ({"spec": {"a": "1"}}, {}, "spec is absent instead of {'a': '1'}"),
        ({"enabled": True}, {"enabled": "True"}, "enabled is 'True' instead of True"),
        ({"args": ["--a", "--b"]}, {"args": ["--a"]}, "args is ['--a'] instead of ['--a', '--b']"),
        ({"args": ["--a"]}, {"args": ["--b"]}, "args[0] is '--b' instead of '--a'"),
        ({"env": [{"name": "A", "value": "1000m"}]}, {"env": [{"name": "A", "value": "1"}]}, "env[A].value is"),
        ({"requests": {"memory": "1Gi"}}, {"requests": {"memory": "1G"}}, "requests.memory is '1G' instead of '1Gi'"),
        (
            {"spec": {"ports": [{"name": "http", "port": 80}]}},
            {"spec": {"ports": [{"name": "http", "port": 81}]}},
            "spec.ports[80] is absent",
        ),
    ],
)
def test_a_changed_value_is_named_with_its_path(intent: Any, live: Any, found: str) -> None:
    assert first_difference(intent, live).startswith(found)


def test_a_rule_that_somebody_adds_to_a_network_policy_is_drift() -> None:
    """Lists that the server does not merge are one value: more of it would open what we closed."""
    intent = {"spec": {"ingress": [{"ports": [{"port": 80, "protocol": "TCP"}]}]}}
    wider = copy.deepcopy(intent)
    wider["spec"]["ingress"][0]["ports"].append({"port": 22, "protocol": "TCP"})
    assert first_difference(intent, wider)
    assert first_difference(intent, {"spec": {"ingress": [*intent["spec"]["ingress"], {}]}})


def test_a_removed_item_of_a_merged_list_is_drift() -> None:
    intent = {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}]}
    assert first_difference(intent, {"volumes": [intent["volumes"][1]]}).startswith("volumes[a] is absent")


@given(OBJECTS)
def test_nothing_differs_from_itself(value: Any) -> None:
    assert not first_difference({"value": value}, {"value": copy.deepcopy(value)})


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3), min_size=1), st.data())
def test_every_changed_leaf_is_found(intent: dict[str, int], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(intent)))
    assert first_difference({"spec": intent}, {"spec": intent | {name: intent[name] + 1}})
