"""Finds the fields of a request body that its structs do not have.

Knows: how structs are nested, the values of unsupported fields, the rule for unknown fields. Must
not know: the fields of any dialect, how a response reports ignored fields.

A field that the server knows is honored, or rejected by name where its value would change the
response. A field that it does not know is ignored and reported, in the request's context
(app/core/request_context.py). Two names are errors: one that differs from the name of a known
option by one edit, because it is probably misspelled, and with `--strict-fields`, every unknown
name at the top of a body.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import orjson
from msgspec import Raw, inspect

from app.api.fields import invalid_request, json_equal, quote_value, unsupported_value
from app.api.schema.base import OBJECT_DECODER, Options, Unsupported
from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.request_context import REQUEST_CONTEXT

# No value without effect is longer.
_MAX_NEUTRAL_BYTES = 256

_MAX_ECHO_CHARS = 200

# The number of unknown fields of an object that are compared with the known ones.
_MAX_COMPARED = 64

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


def report_unknown(names: Iterable[str], at: str = "") -> None:
    """Reports fields that are ignored. at: the path of their object."""
    context = REQUEST_CONTEXT.get()
    if context is not None:
        for name in names:
            context.report_ignored_field(f"{at}.{name}" if at else name)


def check_unknown(names: Iterable[str], known: Collection[str], at: str = "") -> None:
    """Checks the unknown fields of a body or of an object of options, and reports those that are
    ignored. at: the path of the object; "" for the body. Raises AppError(INVALID)."""
    context = REQUEST_CONTEXT.get()
    strict = context is not None and context.strict_fields and not at
    for place, name in enumerate(names):
        path = f"{at}.{name[:_MAX_ECHO_CHARS]}" if at else name[:_MAX_ECHO_CHARS]
        shown = mark_client_text(repr(path))
        meant = find_misspelled(name, known) if place < _MAX_COMPARED else None
        if meant is not None:
            raise AppError(
                ErrorKind.INVALID, f"unknown field {shown}: did you mean {meant!r}?", param=path
            )
        if strict:
            raise AppError(
                ErrorKind.INVALID,
                f"unknown field {shown}: leave it out, or start the server without --strict-fields",
                param=path,
            )
        report_unknown((name,), at)


def find_misspelled(name: str, known: Collection[str]) -> str | None:
    """Returns the known name that differs from `name` by one edit, or None. Known names of one
    letter are not considered, because every other letter differs from them by one edit."""
    near = (one for one in known if len(one) > 1 and is_one_edit(name, one))
    return min(near, default=None)


def is_one_edit(a: str, b: str) -> bool:
    """Returns whether two different texts differ by one insertion, deletion or replacement of a
    character, or by two adjacent characters in exchanged order. Takes linear time."""
    short, long = sorted((a, b), key=len)
    if len(long) - len(short) > 1 or a == b:
        return False
    at = next(
        (n for n, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1]), -1
    )
    if at < 0:
        return True  # the longer text has one more character at its end
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    swapped = short[at : at + 2] == long[at : at + 2][::-1] and short[at + 2 :] == long[at + 2 :]
    return swapped or short[at + 1 :] == long[at + 1 :]
