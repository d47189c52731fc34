"""Finds the fields of a request body that its structs do not have.

Knows: how structs are nested, the values of unsupported fields. Must not know: the fields of any
dialect, the rule for unknown fields (app/api/unknown_fields.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import orjson
from msgspec import Raw, inspect

from app.api.fields import invalid_request, json_equal, quote_value, unsupported_value
from app.api.schema.base import OBJECT_DECODER, Options, Unsupported
from app.api.unknown_fields import check_unknown, report_unknown

# No value without effect is longer.
_MAX_NEUTRAL_BYTES = 256

_optional_text_decoder = msgspec.json.Decoder(str | None)
_text_decoder = msgspec.json.Decoder(str)
_objects_decoder = msgspec.json.Decoder(list[dict[str, Raw]])


@dataclass(frozen=True, slots=True)
class ObjectNames:
    """The names in an object. known: the names of supported and ignored fields. nested: the fields
    whose values contain further objects."""

    type_: type[Options]
    known: frozenset[str]
    nested: Mapping[str, "ValueNames"]


@dataclass(frozen=True, slots=True)
class ValueNames:
    """The objects that a value may be or contain. tag_field: the field that selects one of several
    objects. by_tag: the objects; the key is None if there is only one without a tag. item: the
    objects in an array."""

    tag_field: str | None
    by_tag: Mapping[str | None, ObjectNames]
    item: "ValueNames | None"

    def select(self, fields: Mapping[str, Raw]) -> ObjectNames:
        tag = None if self.tag_field is None else _text_decoder.decode(fields[self.tag_field])
        return self.by_tag[tag]


def find_names(type_: inspect.Type) -> ValueNames | None:
    """Returns the names in values of a type, or None if they contain no objects with known
    names."""
    match type_:
        case inspect.Metadata(type=inner):
            return find_names(inner)
        case inspect.UnionType(types=types):
            members = [names for one in types if (names := find_names(one)) is not None]
            if not members:
                return None
            return ValueNames(
                tag_field=next((one.tag_field for one in members if one.tag_field), None),
                by_tag={tag: names for one in members for tag, names in one.by_tag.items()},
                item=next((one.item for one in members if one.item is not None), None),
            )
        case inspect.ListType(item_type=item):
            names = find_names(item)
            return None if names is None else ValueNames(tag_field=None, by_tag={}, item=names)
        case inspect.StructType(cls=cls) if issubclass(cls, Options):
            nested = {field.encode_name: find_names(field.type) for field in type_.fields}
            names = ObjectNames(
                type_=cls,
                known=frozenset((*nested, *cls.ignored, *filter(None, [type_.tag_field]))),
                nested={name: names for name, names in nested.items() if names is not None},
            )
            tag = None if type_.tag is None else str(type_.tag)
            return ValueNames(tag_field=type_.tag_field, by_tag={tag: names}, item=None)
        case _:
            return None


def check_names(fields: Mapping[str, Raw], names: ObjectNames, at: str = "") -> None:
    """Reports the unknown fields of an object and of the objects in it. Raises AppError(INVALID)
    for an unsupported field whose value would have an effect, and for a misspelled name. at: the
    path of the object."""
    opaque = names.type_.opaque_types
    if opaque and "type" in fields and _optional_text_decoder.decode(fields["type"]) in opaque:
        return
    if not fields.keys() <= names.known:
        _check_unknown_names(fields, names, at)
    for name, nested in names.nested.items():
        value = fields.get(name)
        if value is not None:
            _check_value(value, nested, f"{at}.{name}" if at else name)


def _check_value(value: Raw, names: ValueNames, at: str) -> None:
    first = bytes(memoryview(value)[:1])
    if first == b"{" and names.by_tag:
        fields = OBJECT_DECODER.decode(value)
        check_names(fields, names.select(fields), at)
    elif first == b"[" and names.item is not None:
        for index, fields in enumerate(_objects_decoder.decode(value)):
            check_names(fields, names.item.select(fields), f"{at}.{index}")


def _check_unknown_names(fields: Mapping[str, Raw], names: ObjectNames, at: str) -> None:
    unknown: list[str] = []
    for name, value in fields.items():
        if name in names.known or bytes(memoryview(value)[:4]) == b"null":
            continue
        rule = names.type_.unsupported.get(name)
        if rule is None:
            unknown.append(name)
        else:
            _reject(f"{at}.{name}" if at else name, value, rule)
    if names.type_.check_names:
        check_unknown(unknown, names.known | names.type_.unsupported.keys(), at)
    else:
        report_unknown(unknown, at)


def _reject(path: str, value: Raw, rule: Unsupported) -> None:
    """Raises AppError(INVALID) unless the value has no effect."""
    if not rule.neutral:
        raise invalid_request(path, f"{path} is not supported: {rule.instead or 'leave it out'}")
    quoted = "this value"
    if len(memoryview(value)) <= _MAX_NEUTRAL_BYTES:
        decoded = orjson.loads(memoryview(value))
        if any(json_equal(decoded, neutral) for neutral in rule.neutral):
            return
        quoted = quote_value(decoded)
    raise unsupported_value(path, quoted, rule.neutral)
