"""Renders the description of the API as a structural OpenAPI schema. Pure."""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

from kvtier_worker.contract import Flag

from kvtier_operator.api.engine_settings import FREE
from kvtier_operator.api.fields import (
    Amounts,
    Boolean,
    Bytes,
    Choice,
    Decimal,
    Duration,
    Field,
    Free,
    FreeList,
    Integer,
    Object,
    ObjectList,
    Rule,
    Settings,
    Text,
    TextList,
    TextMap,
)
from kvtier_operator.api.units import (
    AMOUNT_PATTERN,
    BYTES_ADVICE,
    BYTES_PATTERN,
    DECIMAL_ADVICE,
    DECIMAL_PATTERN,
    DURATION_ADVICE,
    DURATION_PATTERN,
    duration_text,
)

Schema = dict[str, Any]

_MAX_NUMBER_TEXT = 32
_IS_NUMBER = "isQuantity(string(self))"
NO_DURATION = f"!self.matches('^{DURATION_PATTERN}$')"
"""Keeps a rule from judging what the pattern has refused already."""

_EXACT = 2**53
"""Numbers beyond it lose digits in JSON; such a limit says only "fits the machine's integers"."""


def render(described: Field) -> Schema:
    """The schema of one field and everything below it."""
    schema: Schema = {"description": described.text, **_kind(described)}
    if described.persisted and described.default_value is not None:
        schema["default"] = described.default_value
    if rules := [*_own_rules(described), *map(_rule, described.rules)]:
        schema["x-kubernetes-validations"] = rules
    return schema


def _rule(rule: Rule) -> Schema:
    rendered: Schema = {"rule": rule.cel, "message": rule.message, "reason": "FieldValueInvalid"}
    if rule.expression:
        rendered["messageExpression"] = rule.expression
    if rule.path:
        rendered["fieldPath"] = rule.path
    return rendered


def _own_rules(described: Field) -> list[Schema]:
    """Limits that OpenAPI cannot say, and advice for what a pattern refuses without telling why."""
    rules: list[Rule] = []
    if isinstance(described, Text) and described.pattern:
        rules.append(Rule(f"self.matches(r'^({described.pattern})$')", described.advice))
    if isinstance(described, Decimal):
        rules.append(Rule(_IS_NUMBER, DECIMAL_ADVICE))
    if isinstance(described, Bytes):
        rules.append(Rule(_IS_NUMBER, BYTES_ADVICE))
        rules.append(
            Rule(
                f"!isQuantity(string(self)) || !quantity(string(self)).isLessThan(quantity('{described.minimum}'))",
                f"write at least {described.minimum} bytes",
            )
        )
    if isinstance(described, Duration):
        rules.append(Rule(f"self.matches(r'^{DURATION_PATTERN}$')", DURATION_ADVICE))
        low, high = duration_text(described.minimum), duration_text(described.maximum)
        if described.minimum:
            rules.append(Rule(f"{NO_DURATION} || duration(self) >= duration('{low}')", f"write at least {low}"))
        rules.append(Rule(f"{NO_DURATION} || duration(self) <= duration('{high}')", f"write at most {high}"))
    return [_rule(rule) for rule in rules]


@singledispatch
def _kind(described: Field) -> Schema:
    raise TypeError(type(described).__name__)


@_kind.register
def _(described: Text) -> Schema:
    schema: Schema = {"type": "string", "maxLength": described.max_length}
    if described.pattern:
        schema["pattern"] = f"^({described.pattern})$"
    return schema


@_kind.register
def _(described: Choice) -> Schema:
    return {"type": "string", "enum": [str(member) for member in type(described.default)]}


@_kind.register
def _(_described: Boolean) -> Schema:
    return {"type": "boolean"}


@_kind.register
def _(described: Integer) -> Schema:
    schema: Schema = {"type": "integer", "format": "int64", "minimum": described.minimum}
    if described.maximum < _EXACT:
        schema["maximum"] = described.maximum
    if described.choices:
        schema["enum"] = list(described.choices)
    return schema


@_kind.register
def _(_described: Decimal) -> Schema:
    return _number_text(DECIMAL_PATTERN)


@_kind.register
def _(_described: Bytes) -> Schema:
    return _number_text(BYTES_PATTERN)


@_kind.register
def _(_described: Duration) -> Schema:
    return {"type": "string", "pattern": f"^{DURATION_PATTERN}$", "maxLength": _MAX_NUMBER_TEXT}


@_kind.register
def _(described: TextList) -> Schema:
    schema: Schema = {
        "type": "array",
        "items": render(described.item),
        "maxItems": described.max_items,
        "x-kubernetes-list-type": "set",
    }
    return schema | ({"minItems": described.min_items} if described.min_items else {})


@_kind.register
def _(described: TextMap) -> Schema:
    value = {"type": "string", "maxLength": described.max_length}
    return {"type": "object", "additionalProperties": value, "maxProperties": described.max_items}


@_kind.register
def _(described: Amounts) -> Schema:
    value = _number_text(AMOUNT_PATTERN)
    return {"type": "object", "additionalProperties": value, "maxProperties": described.max_items}


@_kind.register
def _(_described: Free) -> Schema:
    return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


@_kind.register
def _(described: FreeList) -> Schema:
    items = render(described.item) | {"x-kubernetes-preserve-unknown-fields": True}
    return {
        "type": "array",
        "items": items,
        "maxItems": described.max_items,
        "x-kubernetes-list-type": "atomic",
    }


@_kind.register
def _(_described: Settings) -> Schema:
    """Known flags are explained and checked; others are kept, so that the operator can name them."""
    properties = {name: _flag(flag) for name, flag in FREE.items()}
    return {"type": "object", "properties": properties, "x-kubernetes-preserve-unknown-fields": True}


@_kind.register
def _(described: Object) -> Schema:
    schema: Schema = {"type": "object"}
    if described.fields:
        schema["properties"] = {name: render(child) for name, child in described.fields.items()}
    if described.required:
        schema["required"] = list(described.required)
    return schema


@_kind.register
def _(described: ObjectList) -> Schema:
    schema: Schema = {
        "type": "array",
        "items": render(described.item),
        "maxItems": described.max_items,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": [described.key],
    }
    return schema | ({"minItems": described.min_items} if described.min_items else {})


def _number_text(pattern: str) -> Schema:
    return {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
        "pattern": f"^{pattern}$",
        "maxLength": _MAX_NUMBER_TEXT,
    }


def _flag(flag: Flag) -> Schema:
    """One flag of the engine, without its default and words: those are the engine's, whatever its version."""
    schema: Schema = {"description": f"{flag.help} The engine's default: {flag.render(flag.default) or 'empty'}."}
    if flag.kind is float:
        return schema | _number_text(DECIMAL_PATTERN)
    schema["type"] = {bool: "boolean", int: "integer", str: "string"}[flag.kind]
    if flag.kind is int:
        schema["format"] = "int64"
        bounds = {"minimum": flag.minimum, "maximum": flag.maximum}
        schema |= {name: int(value) for name, value in bounds.items() if math.isfinite(value) and abs(value) < _EXACT}
    return schema
