"""Decodes the bytes of a request body to a struct, translates the decoder's errors, and finds the
fields that the structs do not have.

Knows: msgspec, the text of errors, how structs are nested, the values of unsupported fields, the
rule for unknown fields. Must not know: the fields of any dialect, how a response reports ignored
fields.

A body is decoded in two passes. The first builds the struct and skips everything else, so that a
hostile body fails at its first wrong value before other objects are built. The second finds the
names that the structs do not have. It builds an object for each field, whose number
app/http/body.py limits.

A field that the server knows is honored, or rejected by name where its value would change the
response. A field that it does not know is ignored and reported, in the request's context
(app/core/request_context.py). Two names are errors: one that differs from the name of a known
option by one edit, because it is probably misspelled, and with `--strict-fields`, every unknown
name at the top level of a body.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

import msgspec
import orjson
from msgspec import Raw, inspect

from app.api.fields import (
    as_integer,
    as_mapping,
    describe_integer_range,
    invalid_request,
    join_or,
    json_equal,
    quote_value,
    unsupported_value,
)
from app.api.schema.base import EXPECTED, MESSAGE, OBJECT_DECODER, Options, Unsupported
from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.request_context import REQUEST_CONTEXT
from app.core.sampling_params import INT64_MAX, INT64_MIN

# No value without effect is longer.
_MAX_NEUTRAL_BYTES = 256

_MAX_ECHO_CHARS = 200

# The number of unknown fields of an object that are compared with the known ones.
_MAX_COMPARED = 64

_optional_text_decoder = msgspec.json.Decoder(str | None)
_text_decoder = msgspec.json.Decoder(str)
_objects_decoder = msgspec.json.Decoder(list[dict[str, Raw]])

Value = TypeVar("Value")
Body = TypeVar("Body", bound=Options)
Data = bytes | bytearray | Raw
Path = Sequence[str | int]

# Above this size, an error message does not quote the invalid value, because finding it again
# builds an object for each field and item before it.
_MAX_QUOTED_BYTES = 256 * 1024

# How often numbers such as 1.0 are replaced in a body: each time in all fields of one object, or in
# one whole array.
_MAX_REPAIRS = 16

_INVALID_JSON = (msgspec.DecodeError, UnicodeDecodeError, orjson.JSONDecodeError)

_MISSING = re.compile(r"Object missing required field `(\w+)`")
_LENGTH = re.compile(r"Expected `array` of length (>=|<=) (\d+)")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_FRACTION = re.compile(rb"-?\d{1,20}(?:\.\d{1,20})?(?:[eE][+-]?\d{1,3})?")

_array_decoder = msgspec.json.Decoder(list[Raw])


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
    """Returns whether two different strings differ by one insertion, deletion or replacement of a
    character, or by two swapped adjacent characters. Takes linear time."""
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


class BodyDecoder(Generic[Body]):
    """Decodes bodies of one type. type_: the struct of the body. camel_case: whether the names of
    known fields may also be in camel case: Vercel's AI SDK passes the options of a provider on as
    they are written in JavaScript. normalize: changes the JSON text first. repair: changes the JSON
    text of a body that could not be decoded; None if it cannot."""

    def __init__(
        self,
        type_: type[Body],
        *,
        camel_case: bool = False,
        normalize: Callable[[bytes | bytearray], bytes] | None = None,
        repair: Callable[[Data], bytes | None] | None = None,
    ) -> None:
        self._type = type_
        self._decoder = msgspec.json.Decoder(type_)
        self._camel_case = camel_case
        self._normalize = normalize
        self._repair = repair

    def decode(self, data: bytes | bytearray) -> Body:
        """Returns the body, and reports its unknown fields. Raises AppError(INVALID)."""
        return self.decode_with_fields(data)[0]

    def decode_with_fields(self, data: bytes | bytearray) -> tuple[Body, Mapping[str, Raw]]:
        """Returns the body and its fields as they were sent. Otherwise like `decode`."""
        try:
            return self._decode_with_fields(data)
        except (*_INVALID_JSON, RecursionError) as error:
            reason = str(error)
        # Raise outside of the handler. Otherwise, the decoder's error, which may hold the whole
        # text, would become the exception's context.
        raise AppError(ErrorKind.INVALID, f"the body is not valid JSON: {reason}")

    def _decode_with_fields(self, data: bytes | bytearray) -> tuple[Body, Mapping[str, Raw]]:
        if self._normalize is not None:
            data = self._normalize(data)
        body = self._decode(data)
        fields = OBJECT_DECODER.decode(data)
        if self._camel_case and (renamed := self._rename(fields)) is not None:
            fields = renamed
            body = self._decode(msgspec.json.encode(fields))
        check_names(fields, self._names)
        return body, fields

    def _decode(self, data: bytes | bytearray) -> Body:
        for _ in range(_MAX_REPAIRS):
            try:
                return self._decoder.decode(data)
            except msgspec.ValidationError as error:
                message = str(error)
            repaired = None
            if "got `float`" in message:
                repaired = _replace_fractions(data, _parse_path(message)[:-1])
            if repaired is None and self._repair is not None:
                repaired = self._repair(data)
            if repaired is None:
                raise self._translate(data, message)
            data = repaired
        raise AppError(ErrorKind.INVALID, "the body has numbers such as 1.0 in too many objects")

    @cached_property
    def _type_info(self) -> inspect.Type:
        return inspect.type_info(self._type)

    @cached_property
    def _names(self) -> ObjectNames:
        names = find_names(self._type_info)
        assert names is not None
        return names.by_tag[None]

    def _rename(self, fields: dict[str, Raw]) -> dict[str, Raw] | None:
        """Renames fields from camel case, unless a field with the documented name is set. Returns
        None if there are none."""
        renamed = {
            name: alias
            for alias in fields
            if alias != alias.lower()
            and (name := re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", alias))
            in self._names.known
        }
        if not renamed:
            return None
        aliases = set(renamed.values())
        replaced = {name: value for name, value in fields.items() if name not in aliases}
        for name, alias in renamed.items():
            if bytes(replaced.get(name, b"null")) == b"null":
                replaced[name] = fields[alias]
        return replaced

    def _translate(self, data: Data, message: str) -> AppError:
        """Returns our error for an error of the decoder: the dotted path of the field, the valid
        values, and the value that was sent."""
        path, reason = _parse_path(message), message.partition(" - at `")[0]
        missing = _MISSING.fullmatch(reason)
        if missing is not None:
            param = _join([*path, missing[1]])
            return invalid_request(param, f"{param} is missing")
        expectation = _find_expectation(self._type_info, path, data)
        value = _find_value(data, path)
        param = _join(path[: expectation.depth])
        shown = param or "the body"
        if expectation.message is not None:
            return invalid_request(
                param, expectation.message.format(name=path[expectation.depth - 1])
            )
        length = _LENGTH.fullmatch(reason)
        if length is not None:
            bound = "at least" if length[1] == ">=" else "at most"
            count = f", not {len(_array_decoder.decode(value))}" if value is not None else ""
            return invalid_request(param, f"{shown} must contain {bound} {length[2]} items{count}")
        if value is None:
            return invalid_request(param, f"{shown} must be {expectation.text}")
        if param and expectation.depth == len(path) and bytes(value) == b"null":
            return invalid_request(param, f"{param} is missing")
        return invalid_request(param, f"{shown} must be {expectation.text}, not {_quote(value)}")


def require(value: Value | None, param: str) -> Value:
    """Returns a value that is required only in some objects of its type. Raises
    AppError(INVALID)."""
    if value is None:
        raise invalid_request(param, f"{param} is missing")
    return value


def is_null(value: Raw) -> bool:
    """Returns whether a field of free JSON is absent or null."""
    return bytes(memoryview(value)[:4]) == b"null"


def decode_json(value: Raw) -> Any:
    """Returns free JSON of a body. Raises AppError(INVALID)."""
    try:
        # orjson rejects NaN, numbers too large for a double and lone surrogates
        return orjson.loads(memoryview(value))
    except orjson.JSONDecodeError as error:
        reason = str(error)
    raise AppError(ErrorKind.INVALID, f"the body is not valid JSON: {reason}")


def decode_object(value: Raw, param: str) -> dict[str, Any] | None:
    """Returns a free JSON object, or None for null. Its nesting depth is limited, so that recursion
    is safe. Raises AppError(INVALID) for any other type."""
    decoded = decode_json(value)
    return None if decoded is None else as_mapping(decoded, param)


def _parse_path(message: str) -> list[str | int]:
    """Returns the path at the end of a message of the decoder, such as `$.messages[0].content`."""
    _, _, path = message.partition(" - at `$")
    return [name or int(index) for name, index in _STEP.findall(path.split("[...]")[0].rstrip("`"))]


def _join(path: Path) -> str:
    return ".".join(map(str, path))


def _is_small(data: Data) -> bool:
    return len(memoryview(data)) <= _MAX_QUOTED_BYTES


def _find_value(data: Data, path: Path) -> Raw | None:
    """Returns the value at a path. Returns None if it is not found, or if the body is large."""
    if not _is_small(data):
        return None
    value = Raw(bytes(data))
    try:
        for step in path:
            if isinstance(step, int):
                value = _array_decoder.decode(value)[step]
            else:
                value = OBJECT_DECODER.decode(value)[step]
    except (*_INVALID_JSON, LookupError, RecursionError):
        return None
    return value


def _quote(value: Raw) -> str:
    """Formats a value for an error message, without parsing the content of containers."""
    text = bytes(value)
    if text[:1] in (b"[", b"{"):
        is_empty = not text[1:-1].strip()
        container: object = [None] * (not is_empty) if text[:1] == b"[" else {}
        return quote_value(container)
    return quote_value(orjson.loads(text))


def _replace_fractions(data: Data, path: Path) -> bytes | None:
    """Replaces numbers such as 1.0 with integers in the object or array at this path, because JSON
    has only one type of number. Returns None if there are none."""
    is_array = bytes(memoryview(data)[:1]) == b"["
    if is_array and not path and not _is_small(data):
        return None
    items: dict[Any, Raw] = (
        dict(enumerate(_array_decoder.decode(data)))
        if is_array
        else dict(OBJECT_DECODER.decode(data))
    )
    changed = False
    for key in path[:1] or list(items):
        nested = _replace_fractions(items[key], path[1:]) if path else _to_integer(items[key])
        if nested is not None:
            items[key], changed = Raw(nested), True
    if not changed:
        return None
    return msgspec.json.encode([*items.values()] if is_array else items)


def _to_integer(value: Raw) -> bytes | None:
    text = bytes(memoryview(value)[:50])
    if not _FRACTION.fullmatch(text) or text.lstrip(b"-").isdigit():
        return None
    integer = as_integer(float(text))
    return None if integer is None else b"%d" % integer


@dataclass(frozen=True, slots=True)
class _Expectation:
    """The valid values of a field. depth: the number of steps of the error's path that lead to the
    field. message: the whole error message, if it is not the usual one."""

    text: str
    depth: int
    message: str | None = None


def _find_expectation(type_: inspect.Type, path: Path, data: Data) -> _Expectation:
    """Finds the declaration of the field at a path. data: the body, which has the tags that select
    the type of an object."""
    for depth, step in enumerate(path):
        if _get_extra(type_, EXPECTED) or _get_extra(type_, MESSAGE):
            return _Expectation(_describe_type(type_), depth, _get_extra(type_, MESSAGE))
        members = _list_members(type_)
        if isinstance(step, int):
            (type_,) = [one.item_type for one in members if isinstance(one, inspect.ListType)]
            continue
        structs = [one for one in members if isinstance(one, inspect.StructType)]
        if step == structs[0].tag_field:
            tags = [str(one.tag) for one in structs]
            at_object = getattr(structs[0].cls, "tag_error_at_object", False)
            text = join_or(map(repr, tags))
            if at_object:
                return _Expectation(f"a part of type {text}", depth)
            return _Expectation(text, depth + 1)
        if len(structs) > 1:
            tag = _find_value(data, [*path[:depth], str(structs[0].tag_field)])
            name = None if tag is None else orjson.loads(memoryview(tag))
            structs = [one for one in structs if one.tag == name] or structs
        fields = {field.encode_name: field.type for one in structs for field in one.fields}
        type_ = fields[step]
    return _Expectation(_describe_type(type_), len(path), _get_extra(type_, MESSAGE))


def _get_extra(type_: inspect.Type, key: str) -> str | None:
    extra = cast("dict[str, str]", getattr(type_, "extra", None) or {})
    return extra.get(key)


def _list_members(type_: inspect.Type) -> list[inspect.Type]:
    """Returns the types of a union, or the type itself, without metadata."""
    if isinstance(type_, inspect.Metadata):
        return _list_members(type_.type)
    if isinstance(type_, inspect.UnionType):
        return [member for one in type_.types for member in _list_members(one)]
    return [type_]


def _describe_type(type_: inspect.Type) -> str:
    if (expected := _get_extra(type_, EXPECTED)) is not None:
        return expected
    members = [one for one in _list_members(type_) if not isinstance(one, inspect.NoneType)]
    return join_or(dict.fromkeys(map(_describe_member, members)))


def _describe_member(type_: inspect.Type) -> str:
    match type_:
        case inspect.IntType(ge=low, le=high):
            return describe_integer_range(
                INT64_MIN if low is None else low, INT64_MAX if high is None else high
            )
        case inspect.FloatType(ge=float() | int() as low, le=float() | int() as high):
            return f"a number from {low:g} to {high:g}"
        case inspect.FloatType():
            return "a number"
        case inspect.StrType(max_length=int() as length):
            return f"a string of 1 to {length} characters"
        case inspect.StrType(min_length=1):
            return "a non-empty string"
        case inspect.StrType():
            return "a string"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return join_or(map(repr, values))
        case inspect.ListType():
            return "an array"
        case _:
            return "an object"
