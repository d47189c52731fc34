"""Schemas in the words that the engine follows, where others say the same.

Knows: when no instance can satisfy two schemas at once. Must not know: llguidance, costs.

llguidance takes `oneOf` where it can see that its branches exclude each other, but does not look
through references: so the tagged unions that pydantic writes would all be refused. Where branches
are seen to be apart, with references followed, `oneOf` says what `anyOf` says. And it refuses
keywords that it does not implement even where they forbid nothing, and lets one format through that
validators do not.
"""

import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any, cast

from app.grammar.schema import Schema, resolve_pointer

# White space between two parts of a JSON text, in llguidance's options (its docs/json_schema.md).
# Both rules bound it, or a model that has lost its way writes white space for ever.
# compact: none but one space after a colon or comma. JSON over several lines takes almost twice the
# tokens and says nothing more.
_COMPACT_WHITESPACE: Schema = {
    "item_separator": ",[ ]?",
    "key_separator": ":[ ]?",
    "whitespace_flexible": False,
}
# over lines: llama.cpp's rule (json-schema-to-grammar.cpp)
_MULTILINE_WHITESPACE: Schema = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}

# branches beside each other are compared in pairs
_MAX_BRANCHES = 200
# references behind one another, which may form a ring
_MAX_REFERENCE_HOPS = 20

# keywords that forbid nothing by themselves, and what they say then; any other value does
_NO_OP_KEYWORDS: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "not": (False,),
}
# what llguidance's patterns for a format leave out: RFC 5321 has 64 octets before the @, and RFC
# 3339 has second 60 only where a leap second was, which no pattern can know
_STRICTER_FORMATS: dict[str, Schema] = {
    "email": {"pattern": r"^[^@]{1,64}@"},
    "time": {"pattern": r"^[0-9:]{5}:[0-5]"},
    "date-time": {"pattern": r"^[-0-9]{10}.[0-9:]{5}:[0-5]"},
}
# beside these, or under allOf, properties are not all that an object is told about
_NOT_CLOSABLE = frozenset(
    {
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"),
        *("$ref", "allOf", "anyOf", "oneOf", "if", "dependentRequired", "dependentSchemas"),
    }
)
# what does not keep a reference from being all that its schema says
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment"})


def rewrite_schema(document: Schema, *, compact: bool = True) -> Schema:
    """The same schema, as llguidance takes it; white space between its parts is bounded, and
    nothing that it says is ignored. document: as `schema.checked` gives it. compact: the JSON text
    is on one line.

    An object that lists its properties has no others, unless it says so: JSON Schema would let a
    model go on inventing some, and weak ones do. llama.cpp and xgrammar read schemas so too."""
    closes = '"allOf"' not in json.dumps(document)
    rewritten = cast(Schema, _rewrite(document, document, closes=closes))
    # last, so that no schema has a say in how strictly it is taken
    space = _COMPACT_WHITESPACE if compact else _MULTILINE_WHITESPACE
    rewritten["x-guidance"] = {**space, "lenient": False}
    return rewritten


def _rewrite(schema: Any, document: Schema, *, closes: bool) -> Any:
    """closes: whether an object here may be held to the properties that it lists."""
    if not isinstance(schema, dict):
        return schema
    held = {key: value for key, value in cast(Schema, schema).items() if not _is_no_op(key, value)}
    if (
        isinstance(held.get("oneOf"), list)
        and "anyOf" not in held
        and _are_exclusive(held, document)
    ):
        held = {("anyOf" if key == "oneOf" else key): value for key, value in held.items()}
    if closes and _can_be_closed(held):
        held["additionalProperties"] = False
    for key, value in held.items():
        # of branches that may both hold, one that is closed could seem to be the only one
        shared = key == "oneOf" or (key == "anyOf" and "properties" in held)
        held[key] = _rewrite_children(key, value, document, closes=closes and not shared)
    narrower = _STRICTER_FORMATS.get(str(held.get("format")))
    if narrower is not None:
        also = held.get("allOf")
        held["allOf"] = [*(cast(list[Any], also) if isinstance(also, list) else []), narrower]
    return held


def _can_be_closed(schema: Schema) -> bool:
    """Whether the properties that it lists can be all that an instance has."""
    return (
        isinstance(schema.get("properties"), dict)
        and _NOT_CLOSABLE.isdisjoint(schema)
        and set(_required(schema)) <= set(_properties(schema))
    )


def _rewrite_children(key: str, value: Any, document: Schema, *, closes: bool) -> Any:
    match key:
        case "properties" | "patternProperties" | "$defs" | "definitions" if isinstance(
            value, dict
        ):
            named = cast(Schema, value)
            return {name: _rewrite(each, document, closes=closes) for name, each in named.items()}
        case "allOf" | "anyOf" | "oneOf" | "prefixItems" | "items" if isinstance(value, list):
            return [_rewrite(each, document, closes=closes) for each in cast(list[Any], value)]
        case "items" | "additionalItems" | "additionalProperties":
            return _rewrite(value, document, closes=closes)
        case _:
            return value


def _is_no_op(key: str, value: Any) -> bool:
    return any(
        value is said or (said == {} and value == {}) for said in _NO_OP_KEYWORDS.get(key, ())
    )


def _are_exclusive(schema: Schema, document: Schema) -> bool:
    """Whether no instance satisfies two branches of its `oneOf`."""
    branches = [_resolve(each, document) for each in schema["oneOf"]]
    if len(branches) > _MAX_BRANCHES or _has_reference_into_one_of(document):
        return False
    return all(_are_disjoint(one, other, document) for one, other in combinations(branches, 2))


def _has_reference_into_one_of(document: Schema) -> bool:
    """Whether a reference may lead through a `oneOf`, whose name must stay then."""
    return "/oneOf/" in json.dumps(document)


def _resolve(schema: Any, document: Schema) -> Schema | None:
    """What a reference refers to; None for what is no schema with keywords."""
    for _ in range(_MAX_REFERENCE_HOPS):
        if not isinstance(schema, dict):
            return None
        held = cast(Schema, schema)
        if not isinstance(held.get("$ref"), str) or set(held) - _ANNOTATIONS - {"$ref"}:
            return held
        found = resolve_pointer(document, held["$ref"])
        schema = None if found is None else found[1]
    return None


def _are_disjoint(one: Schema | None, other: Schema | None, document: Schema) -> bool:
    if one is None or other is None:
        return False
    if not _possible_types(one) & _possible_types(other):
        return True
    values, others = _listed_values(one), _listed_values(other)
    if values is not None and others is not None:
        return not values & others
    return any(
        _tags_differ(one, other, name, document) for name in {*_required(one), *_required(other)}
    )


def _tags_differ(one: Schema, other: Schema, name: str, document: Schema) -> bool:
    """Whether both are objects whose property of this name cannot be the same in both."""
    if _possible_types(one) | _possible_types(other) != {"object"}:
        return False
    tags = [_resolve(_properties(each).get(name), document) for each in (one, other)]
    values, others = (None if tag is None else _listed_values(tag) for tag in tags)
    return values is not None and others is not None and not values & others


def _possible_types(schema: Schema) -> set[str]:
    """The types an instance may have, integers being numbers."""
    said = schema.get("type")
    names = set[Any](cast(list[Any], said) if isinstance(said, list) else [said])
    known = {"null", "boolean", "number", "integer", "string", "array", "object"}
    if not names <= known:
        return known - {"integer"}
    return {"number" if name == "integer" else cast(str, name) for name in names}


def _listed_values(schema: Schema) -> frozenset[str] | None:
    """The values an instance may have, where they are listed. 1 and 1.0 are one value."""
    if "const" in schema:
        return frozenset(_canonical_json([schema["const"]]))
    listed = schema.get("enum")
    return frozenset(_canonical_json(cast(list[Any], listed))) if isinstance(listed, list) else None


def _canonical_json(values: list[Any]) -> Iterator[str]:
    for value in values:
        whole = isinstance(value, float) and value.is_integer()
        yield json.dumps(int(value) if whole else value, sort_keys=True)


def _required(schema: Schema) -> list[str]:
    names = schema.get("required")
    return [n for n in cast(list[Any], names) if isinstance(n, str)] if _is_list(names) else []


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _properties(schema: Schema) -> Schema:
    named = schema.get("properties")
    return cast(Schema, named) if isinstance(named, dict) else {}
