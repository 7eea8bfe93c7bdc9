"""The description of the API: its parser, its schema and its page say the same."""

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_operator.api import API_VERSION, parse
from kvtier_operator.api.fields import walk
from kvtier_operator.api.schema import DOCUMENT, SPEC, STATUS, custom_resource_definition
from kvtier_operator.api.units import duration_text, parse_duration_ms
from kvtier_operator.errors import SpecError
from kvtier_operator.manifest import load
from kvtier_operator.observed import Observed
from kvtier_operator.planning.progress import Progress
from kvtier_operator.status import status_of

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*.yaml"))
VERSION = custom_resource_definition()["spec"]["versions"][0]
SCHEMA: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]

MINIMAL: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "KVCacheCluster",
    "metadata": {"name": "demo"},
    "spec": {
        "model": {"source": {"uri": "/models/tiny"}, "identity": {"id": "tiny"}},
        "roles": [{"name": "engine"}],
    },
}
RICH: dict[str, Any] = {
    **MINIMAL,
    "spec": {
        "engine": {"dialect": "Xllm"},
        "coordination": {"etcd": {"managed": {"replicas": 3, "storage": {"size": "1Gi"}}}},
        "master": {"replicas": 3, "leaseTTL": "10s", "durability": "OpLog"},
        "store": {"pools": [{"name": "dram", "segmentSize": "1Gi", "drain": {"timeout": "1m"}}]},
        "model": {"source": {"uri": "pvc://a/b"}, "identity": {"id": "a"}},
        "roles": [
            {
                "name": name,
                "type": kind,
                "port": port,
                "tiers": {"host": {"blocksFactor": "2"}, "store": {"enabled": True}},
                "settings": {"block_size": 64, "dtype": "float32", "enable_mix_batch": True},
                "pod": {"resources": {"limits": {"memory": "1Gi"}}, "env": {"A": "b"}},
            }
            for name, kind, port in (("p", "Prefill", 8010), ("d", "Decode", 8110))
        ],
        "router": {"port": 8888},
    },
}
VALUES = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        7,
        2**40,
        1.5,
        "",
        "a",
        "1Gi",
        "1GB",
        "10s",
        "2.5",
        "-1",
        "A b",
        "x" * 300,
        [],
        {},
        ["a"],
        {"a": 1},
    ]
)


def with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """Structural defaulting as the API server does it."""
    if isinstance(value, dict):
        filled = dict(value)
        for name, child in schema.get("properties", {}).items():
            if name not in filled and "default" in child:
                filled[name] = deepcopy(child["default"])
            if name in filled:
                filled[name] = with_defaults(filled[name], child)
        return filled
    if isinstance(value, list):
        return [with_defaults(item, schema["items"]) for item in value]
    return value


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Validation by the structural part of the schema, rules in CEL apart."""
    if schema.get("x-kubernetes-int-or-string"):
        kinds: Any = (int, str)
    else:
        kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}[schema["type"]]
    if not isinstance(value, kinds) or (isinstance(value, bool) and schema.get("type") != "boolean"):
        return False
    if isinstance(value, str):
        return (
            len(value) <= schema.get("maxLength", len(value))
            and re.search(schema.get("pattern", ""), value) is not None
            and value in schema.get("enum", [value])
        )
    if isinstance(value, int) and schema.get("type") == "integer":
        in_range = schema.get("minimum", value) <= value <= schema.get("maximum", value)
        return in_range and value in schema.get("enum", [value])
    if isinstance(value, list):
        return schema.get("minItems", 0) <= len(value) <= schema["maxItems"] and all(
            fits(item, schema["items"]) for item in value
        )
    return not isinstance(value, dict) or fits_object(value, schema)


def fits_object(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    known: dict[str, Any] = schema.get("properties", {})
    free = schema.get("additionalProperties")
    if not set(schema.get("required", ())) <= set(value):
        return False
    if free is not None:
        return len(value) <= schema["maxProperties"] and all(fits(item, free) for item in value.values())
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or schema is SCHEMA["properties"]["metadata"]
    return all(fits(item, known[name]) if name in known else open_ended for name, item in value.items())


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from nodes(schema[name], f"{path}[]")


def test_defaults_of_the_api_server_are_those_of_the_parser() -> None:
    assert parse(with_defaults(MINIMAL, SCHEMA)) == parse(MINIMAL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_means_the_same_with_the_defaults_of_the_api_server(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert fits(document, SCHEMA)
    assert fits(with_defaults(document, SCHEMA), SCHEMA)
    assert parse(with_defaults(document, SCHEMA)) == load(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_status_that_is_written_is_described(path: Path) -> None:
    status = status_of(load(path), Observed(now=1e9), Progress())
    assert fits(status, SCHEMA["properties"]["status"])


@given(st.data())
@settings(max_examples=200)
def test_the_parser_takes_nothing_that_the_schema_refuses(data: st.DataObject) -> None:
    document = deepcopy(RICH)
    at, key = data.draw(st.sampled_from(list(places_in(document["spec"]))))
    at[key] = data.draw(VALUES)
    if not fits(without_nothing(document), SCHEMA):
        with pytest.raises(SpecError):
            parse(document)


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places_in(value[key])


def without_nothing(value: Any) -> Any:
    """As the API server sees a document: a field that is null is absent."""
    if isinstance(value, dict):
        return {key: without_nothing(item) for key, item in value.items() if item is not None}
    return [without_nothing(item) for item in value] if isinstance(value, list) else value


def test_every_node_has_a_type_and_a_limit_that_bounds_the_cost_of_rules() -> None:
    for path, node in nodes(SCHEMA):
        assert node.get("type") or node.get("x-kubernetes-int-or-string"), path
        if node.get("type") == "array":
            assert node["maxItems"], path
            assert node["x-kubernetes-list-type"], path
        if "additionalProperties" in node:
            assert node["maxProperties"], path
        if "pattern" in node:
            re.compile(node["pattern"])
            assert node["maxLength"], path


def test_every_field_is_explained_in_a_sentence() -> None:
    for described in (SPEC, STATUS):
        for path, field in walk(described):
            assert len(field.text) > 7, path


def test_every_rule_says_what_to_do_and_blames_a_field_that_exists() -> None:
    for path, node in nodes(SCHEMA):
        for rule in node.get("x-kubernetes-validations", []):
            assert len(rule["message"]) > 15, path
            at = node
            for name in rule.get("fieldPath", "").split(".")[1:]:
                at = at["properties"][name]


def test_an_id_can_be_neither_added_nor_taken_away_nor_changed() -> None:
    (rule,) = (rule for rule in SPEC.rules if rule.path == ".clusterID")
    now, _, before = rule.cel.partition(" == ")
    assert before == now.replace("self.", "oldSelf."), "the rule takes one way and not the other"
    assert "has(self.clusterID)" in now


def test_the_definition_names_what_people_type() -> None:
    spec = custom_resource_definition()["spec"]
    assert spec["names"]["shortNames"] == ["kvc"]
    assert set(spec["names"]["categories"]) == {"all", "kvtier"}
    assert VERSION["subresources"] == {"status": {}}
    for column in VERSION["additionalPrinterColumns"]:
        if column["jsonPath"].startswith(".status") and "[" not in column["jsonPath"]:
            at = SCHEMA
            for name in column["jsonPath"].split(".")[1:]:
                at = at["properties"][name]


def test_rendering_the_definition_twice_gives_the_same() -> None:
    assert custom_resource_definition() == custom_resource_definition()
    assert DOCUMENT.fields["spec"] is SPEC


@given(st.integers(0, 999_999_999))
def test_a_duration_survives_being_written(milliseconds: int) -> None:
    assert parse_duration_ms(duration_text(milliseconds)) == milliseconds
