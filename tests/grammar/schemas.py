"""JSON Schemas: random ones from a seed, and edge cases.

The random schemas use the keywords that the engine supports; the edge cases follow the
JSON-Schema-Test-Suite, with a schema or two for each keyword.
"""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "tags", "a b", "Größe", 'q"uote', "x/y", "$ref", "type")
TEXTS = ("red", "green", "", 'say "hi"\n', "naïve", "\\", "🙂", "null")
PATTERNS = ("^[a-z]{2,4}$", "^\\d{3}-\\d{2}$", "^(yes|no)$", "b+", '^[^"]{1,3}x?$', "^\\w+$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
# the name of the definition in each schema with one
DEFINITION = "Node"


def random_schema(seed: int) -> Schema:
    """A schema of up to three levels; every tenth refers to itself."""
    rng = random.Random(seed)
    if seed % 10:
        return _schema(rng, 3)
    node = _object(rng, 1)
    node["properties"]["next"] = {"anyOf": [{"$ref": f"#/$defs/{DEFINITION}"}, {"type": "null"}]}
    return {"$defs": {DEFINITION: node}, "$ref": f"#/$defs/{DEFINITION}"}


def _schema(rng: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random], Schema]] = [_string, _number, _integer, _enum, _plain]
    if depth:
        kinds += [lambda r: _object(r, depth - 1)] * 3
        kinds += [lambda r: _array(r, depth - 1), lambda r: _any_of(r, depth - 1)]
        kinds += [lambda r: _map(r, depth - 1), lambda r: _tagged_union(r, depth - 1), _all_of]
    return rng.choice(kinds)(rng)


def _maybe(rng: random.Random, **keywords: Any) -> Schema:
    return {key: value for key, value in keywords.items() if rng.random() < 0.5}


def _string(rng: random.Random) -> Schema:
    low = rng.randint(0, 5)
    lengths = _maybe(rng, minLength=low, maxLength=low + rng.randint(0, 10))
    constraints: list[Schema] = [
        lengths,
        lengths,
        {"pattern": rng.choice(PATTERNS)},
        {"format": rng.choice(FORMATS)},
    ]
    return {"type": "string", **rng.choice(constraints)}


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-1000, 1000)
    high = low + rng.randint(20, 5000)
    return {
        "type": "integer",
        **rng.choice([_maybe(rng, minimum=low), _maybe(rng, exclusiveMinimum=low)]),
        **rng.choice([_maybe(rng, maximum=high), _maybe(rng, exclusiveMaximum=high)]),
        **(rng.choice([{}, {}, {"multipleOf": rng.choice([2, 5, 7, 10])}])),
    }


def _number(rng: random.Random) -> Schema:
    low = round(rng.uniform(-50, 50), rng.randint(0, 3))
    high = round(low + rng.uniform(1, 50), rng.randint(0, 3))
    return {
        "type": "number",
        **rng.choice([_maybe(rng, minimum=low), _maybe(rng, exclusiveMinimum=low)]),
        **rng.choice([_maybe(rng, maximum=high + 1), _maybe(rng, exclusiveMaximum=high + 1)]),
    }


def _enum(rng: random.Random) -> Schema:
    values: list[Any] = [*TEXTS, 1, 2.5, -3, True, None, [1, "a"], {"k": [None]}]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _plain(rng: random.Random) -> Schema:
    return rng.choice(
        [{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {"type": "boolean"}]
    )


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    required = rng.sample(names, rng.randint(0, len(names)))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": required,
        **({"additionalProperties": False} if rng.random() < 0.8 else {}),
    }


def _map(rng: random.Random, depth: int) -> Schema:
    """An object with arbitrary property names."""
    values = _schema(rng, min(depth, 1))
    if rng.random() < 0.5:
        return {"type": "object", "additionalProperties": values, "maxProperties": 2}
    return {
        "type": "object",
        "patternProperties": {"^a[0-9]$": values, "^b": {"type": "boolean"}},
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    counts = _maybe(rng, minItems=low) | {"maxItems": low + rng.randint(0, 3)}
    if rng.random() < 0.3:
        first = [_schema(rng, depth), _schema(rng, depth)]
        return {"type": "array", "prefixItems": first, "items": False, **_maybe(rng, minItems=2)}
    return {"type": "array", "items": _schema(rng, depth), **counts}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def _tagged_union(rng: random.Random, depth: int) -> Schema:
    """A union as pydantic writes it: each branch has a constant as its tag."""
    branches = [_object(rng, depth) for _ in range(rng.randint(2, 3))]
    for i, branch in enumerate(branches):
        branch["properties"] = {"kind": {"const": f"kind{i}"}, **branch["properties"]}
        branch["required"] = ["kind", *branch["required"]]
    return {"oneOf": branches}


def _all_of(rng: random.Random) -> Schema:
    low = rng.randint(0, 20)
    parts: list[Schema] = [{"type": "integer", "minimum": low}, {"maximum": low + 100}]
    return {"allOf": [*parts, *rng.choice([[], [{"multipleOf": 3}]])]}


def _required_object(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


_TREE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "maximum": 99, "minimum": 0},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["value", "children"],
    "additionalProperties": False,
}

EDGE_CASES: dict[str, Schema] = {
    "anything": {},
    "any object": {"type": "object"},
    "enum of all types": {"enum": ["a", 1, 1.5, True, None, [], {}, {"a": [1]}]},
    "enum and type": {"enum": ["a", 1, 2], "type": "integer"},
    "const null": {"const": None},
    "const object": {"const": {"b": [1, {"a": "ü"}], "a": 'q"'}},
    "const with controls": {"const": "\u0000\u001f\u007f\u2028"},
    "anyOf of types": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    "anyOf beside type": {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": -5}]},
    "oneOf by type": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    "oneOf through references": {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            "cat": _required_object(kind={"const": "cat"}, lives={"type": "integer"}),
            "dog": _required_object(kind={"enum": ["dog"]}, good={"type": "boolean"}),
        },
    },
    "allOf of objects": {
        "allOf": [
            _required_object(a={"type": "integer"}) | {"additionalProperties": True},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "properties": {"c": {"type": "null"}},
    },
    "allOf narrows": {
        "properties": {"a": {"type": "string", "maxLength": 6}},
        "allOf": [{"properties": {"a": {"minLength": 2, "pattern": "^[a-f]+$"}}}],
        "type": "object",
        "required": ["a"],
    },
    "a tree that refers to its root": _TREE,
    "definitions that refer to each other": {
        "$ref": "#/definitions/ping",
        "definitions": {
            "ping": {"type": "object", "properties": {"pong": {"$ref": "#/definitions/pong"}}},
            "pong": {"type": "array", "items": {"$ref": "#/definitions/ping"}, "maxItems": 1},
        },
    },
    "reference with escapes": {
        "$ref": "#/$defs/a~1b%20c~0",
        "$defs": {"a/b c~": {"type": "integer"}},
    },
    "reference beside keywords": {
        "$ref": "#/$defs/n",
        "maximum": 7,
        "$defs": {"n": {"type": "integer", "minimum": 3}},
    },
    "pattern anywhere": {"type": "string", "pattern": "b"},
    "pattern of a class": {"type": "string", "pattern": "^[\\w.+-]{1,8}@\\w{1,8}$"},
    "pattern and lengths": {
        "type": "string",
        "pattern": "^[ab]*$",
        "minLength": 3,
        "maxLength": 4,
    },
    "lengths in code points": {"type": "string", "minLength": 2, "maxLength": 2},
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in (*FORMATS, "ipv6", "duration", "hostname", "uri")
    },
    "minimum and maximum": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "exclusive integers": {"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    "fractions as bounds of integers": {"type": "integer", "minimum": 1.2, "maximum": 3.8},
    "bounds of large integers": {"type": "integer", "minimum": 10**15, "maximum": 10**15 + 5},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 50},
    "multiples of fractions": {"type": "number", "multipleOf": 0.25, "minimum": -2, "maximum": 2},
    "bounds without a type": {"minimum": 5, "maxLength": 2, "maxItems": 1, "maxProperties": 1},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "no items": {"type": "array", "maxItems": 0},
    "prefixItems alone": {"type": "array", "prefixItems": [{"const": 1}], "maxItems": 2},
    "prefixItems and items": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "null"}],
        "items": {"type": "integer"},
        "minItems": 3,
        "maxItems": 4,
    },
    "additionalProperties": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "additionalProperties": {"type": "integer"},
        "maxProperties": 2,
        "required": ["a"],
    },
    "patternProperties": {
        "type": "object",
        "properties": {"x1": {"minimum": 5}},
        "patternProperties": {"^x[0-9]$": {"type": "integer"}, "^y": {"type": "boolean"}},
        "additionalProperties": False,
        "required": ["x1"],
    },
    "required but not in properties": {
        "type": "object",
        "required": ["b", "a"],
        "additionalProperties": {"type": "integer"},
    },
    "one property at least": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "additionalProperties": False,
        "minProperties": 1,
    },
    "an optional property that cannot be": {
        "type": "object",
        "properties": {"a": False, "b": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "boolean schemas": {
        "type": "object",
        "properties": {"a": True},
        "required": ["a"],
        "additionalProperties": False,
    },
    "keywords that forbid nothing": {
        "type": "array",
        "items": {"type": "integer"},
        "uniqueItems": False,
        "maxItems": 2,
        "deprecated": True,
        "x-note": 1,
        "title": "T",
        "examples": [1],
        "default": None,
    },
    "odd names": _required_object(**{name: {"type": "null"} for name in NAMES}),
    "several types": {"type": ["integer", "null", "array"], "items": {"const": 1}, "maxItems": 2},
    "draft 7 tuples": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "integer"}, {"type": "null"}],
        "additionalItems": False,
    },
    "draft 4 exclusive": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 3,
        "maximum": 4,
        "exclusiveMinimum": True,
    },
}
