"""Reads parameter types from a tool's schema, and converts unquoted values to these types.

Knows: the JSON Schema keywords that determine the type of a value. Must not know: the markers of
parameters in a family.

This module only checks the type. Grammars enforce that a value satisfies its schema.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from app.text.syntax.literal_reader import convert_literal, escape_json

JsonTypes = frozenset[str]
"""The allowed types of a value, as a subset of JSON Schema's seven types."""

STRING_TYPE: JsonTypes = frozenset({"string"})
ALL_TYPES: JsonTypes = STRING_TYPE | {"number", "integer", "boolean", "null", "object", "array"}

# keywords that do not constrain a value
ANNOTATION_KEYWORDS = frozenset(
    {"title", "description", "default", "example", "examples", "$comment"}
    | {"deprecated", "readOnly", "writeOnly"}
)

_NUMBER = re.compile(r"([+-]?)0*([0-9]+)((?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_MAX_REFERENCE_DEPTH = 16  # maximum length of a chain of references

# maps the first character of a value to its possible types, other than string
_TYPES_BY_FIRST_CHARACTER = {
    **dict.fromkeys("0123456789+-", frozenset({"number", "integer"})),
    **dict.fromkeys("tTfF", frozenset({"boolean"})),
    **dict.fromkeys("nN", frozenset({"null"})),
    "{": frozenset({"object"}),
    "[": frozenset({"array"}),
}


def get_parameter_types(parameters: Mapping[str, Any], name: str) -> JsonTypes | None:
    """Returns the allowed types of one parameter, or None if the schema does not restrict them."""
    return _property_types(parameters, name, parameters, _MAX_REFERENCE_DEPTH)


def get_schema_types(schema: Any, root: Mapping[str, Any]) -> JsonTypes | None:
    """Returns the types that a schema allows, or None if it does not restrict them. root: the
    document that its references refer to."""
    return _schema_types(schema, root, _MAX_REFERENCE_DEPTH)


def resolve_reference(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns the target of a reference within its document. Returns the schema itself if it is not
    a reference, has other keywords, or refers to a target that does not exist."""
    target = schema
    for _ in range(_MAX_REFERENCE_DEPTH):
        if not isinstance(target, Mapping):
            return schema if target is None else target
        target = cast(Mapping[str, Any], target)
        if "$ref" not in target or not target.keys() <= ANNOTATION_KEYWORDS | {"$ref"}:
            return target
        target = _resolve_pointer(root, target["$ref"])
    return schema


def may_be_non_string(first: str, types: JsonTypes | None) -> bool:
    """Returns whether a value that begins with this character can have a type other than string."""
    if types == STRING_TYPE:
        return False
    if types is not None and "string" not in types:
        return True
    if first.isspace() or not first or (types is None and first == '"'):
        return True
    return bool(
        _TYPES_BY_FIRST_CHARACTER.get(first, frozenset[str]())
        & (ALL_TYPES if types is None else types)
    )


def to_json(raw: str, types: JsonTypes | None) -> str:
    """Converts an unquoted value to JSON text. The value is converted to one of these types if
    possible, and otherwise to a string. If string and other types are allowed, the other types take
    precedence, because otherwise the schema would not list them.

    Without types, a value that is valid JSON is used unchanged.
    """
    text = raw.strip()
    if types is None:
        return _convert_untyped(text) or _to_json_string(raw)
    return (_convert_typed(text, types) if types != STRING_TYPE else None) or _to_json_string(raw)


def _convert_untyped(text: str) -> str | None:
    """Converts a value to the type suggested by the text. Returns None if only a string is
    possible."""
    if _is_json(text):
        return text
    if text[:1] in ("{", "[") or text in ("True", "False", "None"):
        written = convert_literal(text)
        return written if _is_json(written) else None
    return None


def _convert_typed(text: str, types: JsonTypes) -> str | None:
    """Converts a value to one of the given types except string. Returns None if it matches none of
    them."""
    word = text.lower()
    # if strings are not allowed, "null" can only mean null
    if word in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if "boolean" in types and word in ("true", "false"):
        return word
    if types & {"number", "integer"} and (match := _NUMBER.fullmatch(text)):
        sign, integer, rest = match.groups()
        if not rest or "number" in types or "string" not in types:
            return ("-" if sign == "-" else "") + integer + rest
    kind = {"{": "object", "[": "array"}.get(text[:1])
    if kind in types and _is_json(written := convert_literal(text)):
        return written
    return None


def _to_json_string(text: str) -> str:
    return f'"{escape_json(text)}"'


def _is_json(text: str) -> bool:
    try:
        # json.loads also accepts constants that are not valid JSON
        json.loads(text, parse_constant=_reject_constant, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return True


def _reject_constant(name: str) -> None:
    raise ValueError(name)


def _property_types(
    schema: Any, name: str, root: Mapping[str, Any], depth: int
) -> JsonTypes | None:
    """Returns the types of a property, combined from all parts of an object's schema."""
    if depth == 0 or not isinstance(schema, Mapping):
        return None
    schema = cast(Mapping[str, Any], schema)
    result: JsonTypes | None = None
    declared = schema.get("properties")
    if isinstance(declared, Mapping) and name in declared:
        result = _schema_types(cast(Mapping[str, Any], declared)[name], root, depth - 1)
    elif isinstance(schema.get("additionalProperties"), Mapping):
        result = _schema_types(schema["additionalProperties"], root, depth - 1)
    if "$ref" in schema:
        result = _intersect_types(
            result, _property_types(_resolve_pointer(root, schema["$ref"]), name, root, depth - 1)
        )
    for part in _as_schema_list(schema.get("allOf")):
        result = _intersect_types(result, _property_types(part, name, root, depth - 1))
    for keyword in ("anyOf", "oneOf"):
        constraints = [
            _property_types(part, name, root, depth - 1)
            for part in _as_schema_list(schema.get(keyword))
        ]
        # alternatives without the property do not restrict its type
        result = _intersect_types(
            result, _union_types(types for types in constraints if types is not None)
        )
    return result


def _schema_types(schema: Any, root: Mapping[str, Any], depth: int) -> JsonTypes | None:
    if depth == 0 or not isinstance(schema, Mapping):
        return None
    schema = cast(Mapping[str, Any], schema)
    result = _declared_types(schema)
    if "$ref" in schema:
        result = _intersect_types(
            result, _schema_types(_resolve_pointer(root, schema["$ref"]), root, depth - 1)
        )
    for part in _as_schema_list(schema.get("allOf")):
        result = _intersect_types(result, _schema_types(part, root, depth - 1))
    for keyword in ("anyOf", "oneOf"):
        result = _intersect_types(
            result,
            _union_types(
                _schema_types(p, root, depth - 1) for p in _as_schema_list(schema.get(keyword))
            ),
        )
    if result is not None and schema.get("nullable") is True:  # OpenAPI 3.0
        result |= {"null"}
    return result


def _declared_types(schema: Mapping[str, Any]) -> JsonTypes | None:
    """Returns the types that the schema itself declares."""
    declared = schema.get("type")
    if isinstance(declared, str):
        declared = [declared]
    if isinstance(declared, list):
        return (
            ALL_TYPES & {name for name in cast(list[Any], declared) if isinstance(name, str)}
        ) or None
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_type_of, schema["enum"])) or None
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    if isinstance(schema.get("properties"), Mapping):
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else None


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "number"
        case None:
            return "null"
        case list():
            return "array"
        case _:
            return "object"


def _intersect_types(one: JsonTypes | None, other: JsonTypes | None) -> JsonTypes | None:
    """Returns the types that both sets allow. If the sets are disjoint, returns the first set."""
    if one is None or other is None:
        return other if one is None else one
    return (_add_integer(one) & _add_integer(other)) or one


def _add_integer(types: JsonTypes) -> JsonTypes:
    return types | {"integer"} if "number" in types else types


def _union_types(parts: Iterable[JsonTypes | None]) -> JsonTypes | None:
    """Returns the types that any of the parts allows. Returns None if a part is unrestricted or
    there are no parts."""
    union: JsonTypes = frozenset()
    for part in parts:
        if part is None:
            return None
        union |= part
    return union or None


def _as_schema_list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


def _resolve_pointer(root: Mapping[str, Any], reference: Any) -> Any:
    """Returns the target of a reference within the document, or None if it does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or step not in target:
            return None
        target = cast(Mapping[str, Any], target)[step]
    return target
