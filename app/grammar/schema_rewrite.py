"""Rewrites JSON Schemas into equivalent schemas that llguidance supports.

Knows: when two schemas are mutually exclusive. Must not know: llguidance,
costs.

llguidance supports `oneOf` if it can detect that the branches are mutually exclusive. However, it
does not follow references, so it would reject all tagged unions that pydantic generates. This
module follows the references. If the branches are disjoint, `oneOf` is equivalent to `anyOf`.
llguidance also rejects unimplemented keywords that have no effect, and accepts values of some
formats that validators reject. library_keywords.py rewrites what zod and pydantic write.
"""

import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any, cast

from app.grammar.library_keywords import rewrite_library_keywords
from app.grammar.schema import Schema, resolve_pointer

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
# keywords beside a $ref that do not change its meaning
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment"})


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
