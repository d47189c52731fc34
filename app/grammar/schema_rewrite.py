"""Rewrites JSON Schemas into equivalent schemas that llguidance supports.

Knows: when two schemas are mutually exclusive; the formats, patterns and bounds that zod 4 and
pydantic 2 write. Must not know: llguidance, costs.

llguidance supports `oneOf` if it can detect that the branches are mutually exclusive. However, it
does not follow references, so it would reject all tagged unions that pydantic generates. This
module follows the references. If the branches are disjoint, `oneOf` is equivalent to `anyOf`.
llguidance also rejects unimplemented keywords that have no effect, and accepts values of some
formats that validators reject. A keyword that cannot be rewritten is left as it is, so that the
compiler rejects it by name.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any, cast

from app.grammar.schema import Schema, resolve_pointer

# Formats that allow every string, or none that a pattern could exclude.
_LIBRARY_ANNOTATIONS = frozenset({"binary", "password", "path", "file-path", "directory-path"})

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

# The formats that llguidance implements. Next to a pattern, any other format has no effect: it is
# zod's name for the pattern.
_IMPLEMENTED = frozenset(
    {
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        "uri",
    }
)

# Numbers have no exponent if they are bounded. Larger bounds come from float32 and float64, and
# longer numbers would not be exact either.
_MAX_BOUND = 10**18

# The longest name for which a length becomes a pattern, and the most names that become properties.
_MAX_LENGTH, _MAX_NAMES = 128, 1000

_DESCRIPTIONS = frozenset({"type", "title", "description", "default", "examples", "$comment"})

Resolve = Callable[[Any], Schema | None]
"""Follows references to a schema. Returns None if it is not an object."""

# White space between JSON tokens, in llguidance's options (its docs/json_schema.md). Both rules
# limit it, because a confused model may write white space endlessly. The compact rule allows only
# one space after a colon or a comma. Multi-line JSON takes almost twice as many tokens for the same
# content.
_COMPACT_WHITESPACE: Schema = {
    "item_separator": ",[ ]?",
    "key_separator": ":[ ]?",
    "whitespace_flexible": False,
}
# white space in multi-line JSON: llama.cpp's rule (json-schema-to-grammar.cpp)
_MULTILINE_WHITESPACE: Schema = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}

# the maximum number of branches, because all pairs are compared
_MAX_BRANCHES = 200
# the maximum length of a chain of references, which may be circular
_MAX_REFERENCE_HOPS = 20

# values with which these keywords have no effect
_NO_OP_KEYWORDS: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "not": (False,),
}
# Constraints that llguidance's format patterns lack. RFC 5321 allows 64 octets before the @. RFC
# 3339 allows second 60 only at leap seconds, which no pattern can express.
_STRICTER_FORMATS: dict[str, Schema] = {
    "email": {"pattern": r"^[^@]{1,64}@"},
    "time": {"pattern": r"^[0-9:]{5}:[0-5]"},
    "date-time": {"pattern": r"^[-0-9]{10}.[0-9:]{5}:[0-5]"},
}
# with these keywords, or under allOf, `properties` is not the complete definition of an object
_NOT_CLOSABLE = frozenset(
    {
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"),
        *("$ref", "allOf", "anyOf", "oneOf", "if", "dependentRequired", "dependentSchemas"),
    }
)
# keywords next to a $ref that do not change its meaning
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment"})


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
    if isinstance(pattern, str) or format_ in _LIBRARY_ANNOTATIONS:
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
    # zod writes the pattern of a format next to it
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


def rewrite_schema(document: Schema, *, compact: bool = True) -> Schema:
    """Returns an equivalent schema that llguidance supports. White space is bounded, and no keyword
    is ignored.

    document: a schema returned by `check_schema`. compact: whether the JSON text is on one line.

    An object that lists its properties has no additional properties unless the schema allows them.
    JSON Schema would allow them, and weak models would continue with invented properties. llama.cpp
    and xgrammar interpret schemas in the same way.
    """
    closes = '"allOf"' not in json.dumps(document)
    rewritten = cast(Schema, _rewrite(document, document, closes=closes))
    # added last, so that a client's schema cannot override it
    space = _COMPACT_WHITESPACE if compact else _MULTILINE_WHITESPACE
    rewritten["x-guidance"] = {**space, "lenient": False}
    return rewritten


def _rewrite(schema: Any, document: Schema, *, closes: bool) -> Any:
    """Rewrites a schema and its children. closes: whether objects may be restricted to the
    properties that they list."""
    if not isinstance(schema, dict):
        return schema
    rewritten = {
        key: value for key, value in cast(Schema, schema).items() if not _is_no_op(key, value)
    }
    rewritten = rewrite_library_keywords(rewritten, lambda value: _resolve(value, document))
    if (
        isinstance(rewritten.get("oneOf"), list)
        and "anyOf" not in rewritten
        and _are_exclusive(rewritten, document)
    ):
        rewritten = {
            ("anyOf" if key == "oneOf" else key): value for key, value in rewritten.items()
        }
    if closes and _can_be_closed(rewritten):
        rewritten["additionalProperties"] = False
    for key, value in rewritten.items():
        # closing a branch could make it appear exclusive even if both branches match
        shared = key == "oneOf" or (key == "anyOf" and "properties" in rewritten)
        rewritten[key] = _rewrite_children(key, value, document, closes=closes and not shared)
    narrower = _STRICTER_FORMATS.get(str(rewritten.get("format")))
    if narrower is not None:
        also = rewritten.get("allOf")
        rewritten["allOf"] = [*(cast(list[Any], also) if isinstance(also, list) else []), narrower]
    return rewritten


def _can_be_closed(schema: Schema) -> bool:
    """Returns whether an instance can be restricted to the properties that the schema lists."""
    return (
        isinstance(schema.get("properties"), dict)
        and _NOT_CLOSABLE.isdisjoint(schema)
        and set(_required_names(schema)) <= set(_properties(schema))
    )


def _rewrite_children(key: str, value: Any, document: Schema, *, closes: bool) -> Any:
    match key:
        case "properties" | "patternProperties" | "$defs" | "definitions" if isinstance(
            value, dict
        ):
            named = cast(Schema, value)
            return {name: _rewrite(item, document, closes=closes) for name, item in named.items()}
        case "allOf" | "anyOf" | "oneOf" | "prefixItems" | "items" if isinstance(value, list):
            return [_rewrite(item, document, closes=closes) for item in cast(list[Any], value)]
        case "items" | "additionalItems" | "additionalProperties":
            return _rewrite(value, document, closes=closes)
        case _:
            return value


def _is_no_op(key: str, value: Any) -> bool:
    return any(
        value is neutral or (neutral == {} and value == {})
        for neutral in _NO_OP_KEYWORDS.get(key, ())
    )


def _are_exclusive(schema: Schema, document: Schema) -> bool:
    """Returns whether no instance satisfies two branches of its `oneOf`."""
    branches = [_resolve(branch, document) for branch in schema["oneOf"]]
    if len(branches) > _MAX_BRANCHES or _has_reference_into_one_of(document):
        return False
    return all(_are_disjoint(first, other, document) for first, other in combinations(branches, 2))


def _has_reference_into_one_of(document: Schema) -> bool:
    """Returns whether a reference may point into a `oneOf`. Such a `oneOf` cannot be renamed."""
    return "/oneOf/" in json.dumps(document)


def _resolve(schema: Any, document: Schema) -> Schema | None:
    """Returns the schema that a reference points to, or None if the target is not an object."""
    for _ in range(_MAX_REFERENCE_HOPS):
        if not isinstance(schema, dict):
            return None
        mapping = cast(Schema, schema)
        if not isinstance(mapping.get("$ref"), str) or set(mapping) - _ANNOTATIONS - {"$ref"}:
            return mapping
        target = resolve_pointer(document, mapping["$ref"])
        schema = None if target is None else target[1]
    return None


def _are_disjoint(one: Schema | None, other: Schema | None, document: Schema) -> bool:
    if one is None or other is None:
        return False
    if not _possible_types(one) & _possible_types(other):
        return True
    values, other_values = _listed_values(one), _listed_values(other)
    if values is not None and other_values is not None:
        return not values & other_values
    return any(
        _tags_differ(one, other, name, document)
        for name in {*_required_names(one), *_required_names(other)}
    )


def _tags_differ(one: Schema, other: Schema, name: str, document: Schema) -> bool:
    """Returns whether both schemas are objects in which the property `name` cannot have a common
    value."""
    if _possible_types(one) | _possible_types(other) != {"object"}:
        return False
    tags = [_resolve(_properties(each).get(name), document) for each in (one, other)]
    values, other_values = (None if tag is None else _listed_values(tag) for tag in tags)
    return values is not None and other_values is not None and not values & other_values


def _possible_types(schema: Schema) -> set[str]:
    """Returns the types that an instance may have. Integers count as numbers."""
    declared = schema.get("type")
    names = set[Any](cast(list[Any], declared) if isinstance(declared, list) else [declared])
    all_types = {"null", "boolean", "number", "integer", "string", "array", "object"}
    if not names <= all_types:
        return all_types - {"integer"}
    return {"number" if name == "integer" else cast(str, name) for name in names}


def _listed_values(schema: Schema) -> frozenset[str] | None:
    """Returns the values that an instance may have, or None if they are not listed. 1 and 1.0 are
    equal."""
    if "const" in schema:
        return frozenset(_canonical_json([schema["const"]]))
    listed = schema.get("enum")
    return frozenset(_canonical_json(cast(list[Any], listed))) if isinstance(listed, list) else None


def _canonical_json(values: list[Any]) -> Iterator[str]:
    for value in values:
        is_integer = isinstance(value, float) and value.is_integer()
        yield json.dumps(int(value) if is_integer else value, sort_keys=True)


def _required_names(schema: Schema) -> list[str]:
    names = schema.get("required")
    return [n for n in cast(list[Any], names) if isinstance(n, str)] if _is_list(names) else []


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _properties(schema: Schema) -> Schema:
    named = schema.get("properties")
    return cast(Schema, named) if isinstance(named, dict) else {}
