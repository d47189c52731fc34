"""Rewrites the keywords that zod 4 and pydantic 2 write into equivalent ones that llguidance
supports.

Knows: the formats, patterns and bounds in the output of both libraries. Must not know: llguidance,
costs, references other than those that name a schema.

A keyword that cannot be rewritten is left as it is, so that the compiler rejects it by name.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from app.grammar.schema import Schema

# Formats that allow every string, or none that a pattern could exclude.
_ANNOTATIONS = frozenset({"binary", "password", "path", "file-path", "directory-path"})

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"

# Formats of pydantic without a pattern, and their equivalents.
_FORMATS: Mapping[str, Schema] = {
    "base64": {
        "pattern": r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    },
    "base64url": {
        "pattern": r"^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$",
    },
    "fraction": {"pattern": r"^-?[0-9]+(?:/[1-9][0-9]*|\.[0-9]+)?$"},
    "ipv4interface": {"pattern": rf"^(?:{_OCTET}\.){{3}}{_OCTET}(?:/(?:3[0-2]|[12]?[0-9]))?$"},
    "ipvanyaddress": {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]},
    **{
        f"uuid{version}": {
            "pattern": rf"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}"
            r"-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"
        }
        for version in (1, 3, 4, 5, 6, 7, 8)
    },
}

_SECONDS = r"(?:\d+(?:[.,]\d+)?S)"
_TIME = rf"T(?:\d+H(?:\d+M)?{_SECONDS}?|\d+M{_SECONDS}?|{_SECONDS})"
_DATE = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_EMOJI = r"[\p{Extended_Pictographic}\p{Emoji_Component}]*"

# The patterns of zod with look-around, without their anchors, and their equivalents without it.
_LOOK_AROUND: Mapping[str, Schema] = {
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": {
        "pattern": rf"^P(?:\d+W|{_DATE}(?:{_TIME})?|{_TIME})$"
    },
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$": {
        "pattern": rf"^{_LABEL}(?:\.{_LABEL})*\.?$",
        "maxLength": 253,
    },
    r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])"
    r"[\p{Extended_Pictographic}\p{Emoji_Component}]+$": {
        "pattern": rf"^{_EMOJI}[\p{{Extended_Pictographic}}\p{{Regional_Indicator}}\u20E3]{_EMOJI}$"
    },
}

# The formats that llguidance implements. Beside a pattern, any other format has no effect: it is
# zod's name for the pattern.
_IMPLEMENTED = frozenset(
    {
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        "uri",
    }
)

# Numbers have no exponent if they are bounded. Bounds beyond this are those of float32 and float64,
# and longer numbers would not be exact either.
_MAX_BOUND = 10**18

# The longest name for which a length becomes a pattern, and the most names that become properties.
_MAX_LENGTH, _MAX_NAMES = 128, 1000

_DESCRIPTIONS = frozenset({"type", "title", "description", "default", "examples", "$comment"})

Resolve = Callable[[Any], Schema | None]
"""Follows references to a schema. Returns None if it is not an object."""


def rewrite_library_keywords(schema: Schema, resolve: Resolve) -> Schema:
    """Returns the schema with its own keywords rewritten, but not those of its children."""
    if schema.get("uniqueItems") is True and schema.get("maxItems") in (0, 1):
        schema = {key: value for key, value in schema.items() if key != "uniqueItems"}
    return _rewrite_names(_narrow_bounds(_rewrite_format(schema)), resolve)


def _rewrite_format(schema: Schema) -> Schema:
    pattern, format_ = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str) and pattern in _LOOK_AROUND:
        schema = {**schema, **_merge_max_length(schema, _LOOK_AROUND[pattern])}
    if not isinstance(format_, str) or format_ in _IMPLEMENTED:
        return schema
    rest = {key: value for key, value in schema.items() if key != "format"}
    if isinstance(pattern, str) or format_ in _ANNOTATIONS:
        return rest
    equivalent = _FORMATS.get(format_)
    if equivalent is None or not equivalent.keys().isdisjoint(rest):
        return schema
    return {**rest, **equivalent}


def _merge_max_length(schema: Schema, equivalent: Schema) -> Schema:
    given, limit = schema.get("maxLength"), equivalent.get("maxLength")
    if limit is None or not isinstance(given, int):
        return equivalent
    return {**equivalent, "maxLength": min(given, limit)}


def _narrow_bounds(schema: Schema) -> Schema:
    narrowed: Schema = {}
    for name, sign in (
        ("minimum", -1),
        ("exclusiveMinimum", -1),
        ("maximum", 1),
        ("exclusiveMaximum", 1),
    ):
        bound = schema.get(name)
        is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
        if is_number and sign * cast(float, bound) > _MAX_BOUND:
            narrowed[name] = sign * _MAX_BOUND
    return {**schema, **narrowed} if narrowed else schema


def _rewrite_names(schema: Schema, resolve: Resolve) -> Schema:
    """Rewrites `propertyNames`: names that are listed become properties, and a pattern or a length
    becomes `patternProperties`."""
    names = resolve(schema.get("propertyNames"))
    if names is None:
        return schema
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    constraints = _rewrite_format(names).keys() - _DESCRIPTIONS
    if not constraints:
        return rest if names.get("type", "string") == "string" else schema
    value = schema.get("additionalProperties", True)
    listed = _list_names(names, resolve)
    if listed is not None:
        return _list_properties(schema, rest, listed, value)
    pattern = _find_name_pattern(_rewrite_format(names))
    if pattern is None or not {"properties", "patternProperties"}.isdisjoint(schema):
        return schema
    return {**rest, "patternProperties": {pattern: value}, "additionalProperties": False}


def _list_properties(schema: Schema, rest: Schema, listed: list[str], value: Any) -> Schema:
    declared = schema.get("properties", {})
    required = schema.get("required", [])
    if (
        len(listed) > _MAX_NAMES
        or "patternProperties" in schema
        or not isinstance(declared, dict)
        or not isinstance(required, list)
        or not set(cast(list[Any], required)) <= set(listed)
    ):
        return schema
    own = cast(Schema, declared)
    properties = {name: own.get(name, value) for name in listed}
    return {**rest, "properties": properties, "additionalProperties": False}


def _list_names(names: Schema, resolve: Resolve) -> list[str] | None:
    """Returns the names that are allowed, or None if they are not listed."""
    if names.keys() - _DESCRIPTIONS == {"anyOf"} and isinstance(names["anyOf"], list):
        branches = [resolve(branch) for branch in cast(list[Any], names["anyOf"])]
        parts = [None if branch is None else _list_names(branch, resolve) for branch in branches]
        if any(part is None for part in parts):
            return None
        return list(dict.fromkeys(name for part in parts if part for name in part))
    if names.keys() - _DESCRIPTIONS == {"const"}:
        values: Any = [names["const"]]
    elif names.keys() - _DESCRIPTIONS == {"enum"}:
        values = names["enum"]
    else:
        return None
    if not isinstance(values, list):
        return None
    return list(dict.fromkeys(name for name in cast(list[Any], values) if isinstance(name, str)))


def _find_name_pattern(names: Schema) -> str | None:
    """Returns the pattern of the names, or None if they have other constraints."""
    constraints = names.keys() - _DESCRIPTIONS
    pattern = names.get("pattern")
    # zod writes the pattern of a format beside it
    if isinstance(pattern, str) and constraints <= {"pattern", "format"}:
        return pattern
    if names.get("format") == "uuid" and constraints == {"format"}:
        return r"^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
    minimum, high = names.get("minLength"), names.get("maxLength", _MAX_LENGTH)
    if constraints <= {"minLength", "maxLength"} and _is_length(minimum) and _is_length(high):
        maximum = high if "maxLength" in names else ""
        return rf"^[\s\S]{{{minimum},{maximum}}}$"
    return None


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_LENGTH
