"""What a field of the KVCacheCluster API can be. Pure records: `api.schema` describes the API with them, once.

The parser reads defaults and limits from them, the custom resource definition and docs/manifest.md are rendered from
them. So no two of the three can differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

NAME_PATTERN = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
OBJECT_NAME_PATTERN = "[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
"""Name of an object that may have dots."""
OBJECT_NAME_ADVICE = "write a name of lower-case letters, digits, dashes and dots, 253 characters at most"
NAME_ADVICE = "write a name of lower-case letters, digits and dashes, 63 characters at most"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule over one value that the API server checks, also when the operator is down.

    Attributes:
        cel: true when the value is right; ``oldSelf`` makes it a rule over changes.
        message: what to write instead.
        expression: CEL text that makes the message, where the value matters; empty = ``message`` as it stands.
        path: of the field to blame, relative to the value, as in ``.master.replicas``; empty = the value itself.
    """

    cel: str
    message: str
    expression: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field.

    Attributes:
        text: what it means, with its unit; shown by ``kubectl explain``.
        rules: checked by the API server.
        persisted: the API server writes the default into the object. Not where a stated value means more than the
            same value by default.
    """

    text: str
    rules: tuple[Rule, ...] = ()
    persisted: bool = True

    @property
    def default_value(self) -> object:
        """The default as JSON; None = there is none."""
        value: object = getattr(self, "default", None)
        return str(value) if isinstance(value, StrEnum) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Field):
    """A string that matches ``pattern`` as a whole; ``advice`` tells how to mend one that does not."""

    default: str | None = None
    pattern: str = ""
    advice: str = "write a string, in quotes if it looks like a number"
    max_length: int = 253


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Field):
    """One member of the enum of ``default``; ``later`` tells why a text that users may expect is no member yet."""

    default: StrEnum
    later: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boolean(Field):
    """True or false."""

    default: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Integer(Field):
    """A whole number of [minimum, maximum], or one of ``choices``."""

    default: int
    minimum: int = 0
    maximum: int
    choices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decimal(Field):
    """A number that is not negative: an integer, or a quoted decimal, since the API has no floats."""

    default: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes(Field):
    """A size, as in ``512Mi``; ``minimum`` in bytes."""

    default: str | None = None
    minimum: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration(Field):
    """A time, as in ``1m30s``; limits in milliseconds."""

    default: str
    minimum: int = 0
    maximum: int = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TextList(Field):
    """A list of different strings."""

    item: Text
    min_items: int = 0
    max_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMap(Field):
    """A mapping of free names to strings."""

    max_items: int = 64
    max_length: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts(Field):
    """Resources of a container, by name."""

    max_items: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Free(Field):
    """A mapping that is handed on as it stands; the API server judges it where it goes to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeList(Field):
    """A list of mappings that are handed on; only the fields of ``item`` are read, all of them required texts."""

    item: Object
    max_items: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Field):
    """Flags of the engine that no other field decides; described by the engine's contract, in `engine_settings`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Object(Field):
    """A mapping with known fields.

    Attributes:
        required: names of fields that must be stated.
        optional: that it is stated means something (``router``, ``external``), so it is never made by defaults.
    """

    fields: Mapping[str, Field]
    required: tuple[str, ...] = ()
    optional: bool = False

    @property
    def has_defaults(self) -> bool:
        """An absent one appears, with the defaults below it."""
        return not self.optional and not self.required and any(_appears(child) for child in self.fields.values())

    @property
    def default_value(self) -> object:
        """All defaults below it: rules judge it before the API server would fill it."""
        if not self.has_defaults:
            return None
        return {name: child.default_value for name, child in self.fields.items() if _appears(child)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectList(Field):
    """A list of mappings; ``key`` names the field that tells them apart."""

    item: Object
    key: str
    min_items: int = 0
    max_items: int

    @property
    def default_value(self) -> object:
        """An empty list, unless it may not be empty."""
        return None if self.min_items else []


def walk(described: Object, path: str = "") -> Iterator[tuple[str, Field]]:
    """Every field and list item below an object with its path, as in ``roles[].name``, in the order of description."""
    for name, child in described.fields.items():
        at = f"{path}.{name}" if path else name
        yield at, child
        if isinstance(child, Object):
            yield from walk(child, at)
        if isinstance(child, (ObjectList, FreeList)):
            yield f"{at}[]", child.item
            yield from walk(child.item, f"{at}[]")


def _appears(child: Field) -> bool:
    return child.persisted and child.default_value is not None
