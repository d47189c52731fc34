"""Rewriting of schemas for the engine: equivalent forms, and unchanged schemas."""

import json
import re
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.errors import AppError
from app.core.requests import JsonSchema
from app.grammar.schema_rewrite import _LOOK_AROUND, rewrite_schema
from tests import tiny
from tests.engine.harness import grammar_compiler
from tests.grammar.library_schemas import FILE
from tests.grammar.test_llguidance_backend import accepts
from tests.rows import rows

LIBRARIES: dict[str, dict[str, list[Any]]] = json.loads(FILE.read_text("utf-8"))
SCHEMAS = [
    (library, name, schema)
    for library, types in LIBRARIES.items()
    for name, schemas in types.items()
    for schema in schemas
]

# types whose values no grammar of this kind describes, with the rejected keyword
REJECTED = {
    ("zod", "jwt"): "format",
    ("zod", "never"): "not",
    ("pydantic", "IPv4Network"): "format",
    ("pydantic", "IPv6Network"): "format",
    ("pydantic", "IPv6Interface"): "format",
    ("pydantic", "IPvAnyNetwork"): "format",
    ("pydantic", "IPvAnyInterface"): "format",
    ("pydantic", "PostgresDsn"): "format",
    ("pydantic", "MongoDsn"): "format",
    ("pydantic", "NatsDsn"): "format",
    ("pydantic", "Pattern"): "format",
    ("pydantic", "set"): "uniqueItems",
    ("pydantic", "short set"): "uniqueItems",
    ("pydantic", "dict by date"): "propertyNames",
}


def compile_schema(schema: Any) -> None:
    grammar = JsonSchema(text=json.dumps(schema), param="schema")
    grammar_compiler().compile(grammar, frozenset({tiny.END}))


@rows(("library", "name", "schema"), SCHEMAS, ids=str)
def test_each_type_is_honored_or_rejected_by_the_name_of_its_keyword(
    library: str, name: str, schema: Any
):
    keyword = REJECTED.get((library, name))
    if keyword is None:
        compile_schema(schema)
        return
    with pytest.raises(AppError) as caught:
        compile_schema(schema)
    assert (caught.value.param or "").endswith(f".{keyword}")


def test_each_rejected_type_is_listed():
    assert REJECTED.keys() <= {(library, name) for library, name, _ in SCHEMAS}


RECORD = {"type": "object", "additionalProperties": {"type": "integer"}}
UUID = "123e4567-e89b-42d3-a456-426614174000"


@rows(
    ("schema", "accepted", "rejected"),
    [
        (RECORD | {"propertyNames": {"type": "string"}}, ['{"x":1}'], ['{"x":"y"}']),
        (
            RECORD | {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "required": ["a"]},
            ['{"a":1}', '{"a":1,"b":2}'],
            ["{}", '{"b":2}', '{"a":1,"c":2}', '{"a":"x"}'],
        ),
        (RECORD | {"propertyNames": {"enum": ["a", [], 1]}}, ["{}", '{"a":1}'], ['{"1":1}']),
        (RECORD | {"propertyNames": {"const": "a"}}, ["{}", '{"a":1}'], ['{"b":1}']),
        (
            RECORD | {"propertyNames": {"anyOf": [{"const": "a"}, {"enum": ["b"]}]}},
            ['{"a":1,"b":2}'],
            ['{"c":1}'],
        ),
        (
            RECORD | {"propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"enum": ["a", "b"]}}},
            ['{"b":1}'],
            ['{"c":1}'],
        ),
        (
            {"properties": {"a": {"const": 1}}, "propertyNames": {"enum": ["a", "b"]}},
            ['{"a":1}', '{"b":[]}'],
            ['{"a":2}', '{"c":1}'],
        ),
        (RECORD | {"propertyNames": {"pattern": r"^k\d$"}}, ['{"k1":1}'], ['{"k":1}', '{"k1":""}']),
        (RECORD | {"propertyNames": {"minLength": 2}}, ['{"ab":1}'], ['{"a":1}']),
        (
            RECORD | {"propertyNames": {"minLength": 1, "maxLength": 2}},
            ['{"ab":1}'],
            ['{"":1}', '{"abc":1}'],
        ),
        (
            {"type": "string", "format": "starts_with", "pattern": "^a.*"},
            ['"ab"'],
            ['"b"'],
        ),
        ({"type": "string", "format": "binary"}, ['"é"'], ["1"]),
        ({"type": "string", "format": "uuid4"}, [f'"{UUID}"'], [f'"{UUID.replace("-42", "-12")}"']),
        ({"type": "string", "format": "base64"}, ['"QUI="', '""'], ['"QUI"', '"="']),
        ({"type": "string", "format": "ipvanyaddress"}, ['"1.2.3.4"', '"::1"'], ['"1.2.3"']),
        ({"type": "string", "format": "ipv4interface"}, ['"1.2.3.4/24"'], ['"1.2.3.4/33"']),
        ({"type": "string", "format": "fraction"}, ['"-1/3"', '"0.5"'], ['"1/0"']),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[]", "[1]"], ["[1,1]"]),
        (
            {"type": "number", "minimum": -3.4e38, "maximum": 3.4e38},
            ["-123456.5", "1000000000000000000"],
            ["1" + "0" * 39],
        ),
    ],
    ids=str,
)
def test_a_keyword_allows_exactly_its_values(schema: Any, accepted: list[str], rejected: list[str]):
    grammar = JsonSchema(text=json.dumps(schema))
    for text in accepted:
        assert accepts(grammar, text), text
    for text in rejected:
        assert not accepts(grammar, text), text


@rows(
    "schema",
    [
        RECORD | {"propertyNames": {"type": "integer"}},
        RECORD | {"propertyNames": {"format": "date"}},
        RECORD | {"propertyNames": {"maxLength": 3}},
        RECORD | {"propertyNames": {"minLength": 10**9}},
        RECORD | {"propertyNames": {"enum": ["a"]}, "required": ["b"]},
        RECORD | {"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a": {}}},
        RECORD | {"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}},
        RECORD | {"propertyNames": {"enum": [f"n{n}" for n in range(1001)]}},
        RECORD | {"propertyNames": {"enum": "a"}},
        {"type": "string", "format": "jwt"},
        {"type": "number", "minimum": 1e30},
    ],
)
def test_what_cannot_be_rewritten_is_left_to_be_rejected(schema: Any):
    rewritten = rewrite_schema(schema)
    assert {name: rewritten[name] for name in schema} == schema


DATES = [pattern for pattern in _LOOK_AROUND if pattern.startswith("^P")]
HOSTS = [pattern for pattern in _LOOK_AROUND if "253" in pattern]


@pytest.mark.parametrize(
    ("pattern", "letters"), [(DATES[0], "PTWYMDHS.,01"), (HOSTS[0], "a0-.")], ids=["date", "host"]
)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_pattern_without_look_around_matches_the_same_texts(
    pattern: str, letters: str, data: Any
):
    pieces = st.sampled_from(["P", "T", "1Y", "2M", "3D", "4H", "5M", "6.7S", "8W", *letters])
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    equivalent = _LOOK_AROUND[pattern]["pattern"]
    assert bool(re.search(equivalent, text)) == bool(re.search(pattern, text)), text


def branch(kind: Any, **more: Any) -> dict[str, Any]:
    closed = {"additionalProperties": False}
    return {"type": "object", "properties": {"kind": kind}, "required": ["kind"], **closed, **more}


CAT, DOG = branch({"const": "cat"}), branch({"enum": ["dog", "wolf"]})
DEFINITIONS = {"$defs": {"cat": CAT, "dog": {"$ref": "#/$defs/wolf"}, "wolf": DOG}}

EXCLUSIVE = {
    "types": [{"type": "integer"}, {"type": ["string", "null"]}],
    "constants": [{"const": 1}, {"const": "1"}, {"enum": [True, None]}],
    "tags": [CAT, DOG],
    "tags through references": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "a tag that only one requires": [CAT, {**DOG, "required": []}],
}
OVERLAPPING = {
    "a number may be an integer": [{"type": "integer"}, {"type": "number"}],
    "one value, written twice": [{"const": 1}, {"enum": [1.0, 2]}],
    "no tag is required": [{**CAT, "required": []}, {**DOG, "required": []}],
    "no branch is an object only": [{**CAT, "type": ["object", "null"]}, DOG],
    "a value in common": [CAT, branch({"enum": ["cat", "dog"]})],
    "an empty branch": [CAT, {}],
    "a boolean": [CAT, True],
    "a dangling reference": [CAT, {"$ref": "#/$defs/missing"}],
    "a reference to itself": [CAT, {"$ref": "#/$defs/ring"}],
    "an unknown type": [{"type": "dict"}, {"type": "string"}],
}


@pytest.mark.parametrize("branches", EXCLUSIVE.values(), ids=EXCLUSIVE)
def test_one_of_with_exclusive_branches_becomes_any_of(branches: list[Any]) -> None:
    rewritten = rewrite_schema({"oneOf": branches, "title": "T", **DEFINITIONS})
    assert rewritten["anyOf"] == branches
    assert "oneOf" not in rewritten


@rows("branches", OVERLAPPING.values(), ids=OVERLAPPING)
def test_one_of_with_overlapping_branches_is_unchanged(branches: list[Any]) -> None:
    circular = {"$defs": {**DEFINITIONS["$defs"], "ring": {"$ref": "#/$defs/ring"}}}
    assert rewrite_schema({"oneOf": branches, **circular})["oneOf"] == branches


def test_objects_in_overlapping_branches_are_not_closed() -> None:
    """If closed, each branch would exclude the other, and values that satisfy both would pass."""
    one, other = ({"type": "object", "properties": {name: {}}} for name in "ab")
    assert rewrite_schema({"oneOf": [one, other]})["oneOf"] == [one, other]
    closed = {"additionalProperties": False}
    assert rewrite_schema({"anyOf": [one, other]})["anyOf"] == [one | closed, other | closed]


def test_an_object_is_closed_if_it_lists_all_required_properties() -> None:
    listed = {"type": "object", "properties": {"a": {}, "b": {}}}
    for required, closed in ((["a"], True), (["a", "b"], True), (["a", "c"], False)):
        rewritten = rewrite_schema({**listed, "required": required})
        assert ("additionalProperties" in rewritten) == closed, required


def test_one_of_is_kept_when_a_reference_goes_through_it() -> None:
    schema = {"oneOf": [CAT, DOG], "items": {"$ref": "#/oneOf/0"}}
    assert "oneOf" in rewrite_schema(schema)


def test_one_of_is_kept_beside_any_of() -> None:
    assert "oneOf" in rewrite_schema({"oneOf": [CAT, DOG], "anyOf": [{}]})


def test_keywords_without_effect_are_removed_at_every_level() -> None:
    inner = {"uniqueItems": False, "items": {"type": "null", "propertyNames": {}}}
    rewritten = rewrite_schema(
        {"properties": {"a": inner}, "allOf": [inner], "additionalProperties": inner}
    )
    cleaned = {"items": {"type": "null"}}
    assert rewritten["properties"]["a"] == cleaned
    assert rewritten["allOf"] == [cleaned]
    assert rewritten["additionalProperties"] == cleaned


@pytest.mark.parametrize("keyword", [{"uniqueItems": True}, {"uniqueItems": 0}, {"not": {}}])
def test_keywords_with_an_effect_and_invalid_ones_are_kept(keyword: dict[str, Any]) -> None:
    assert keyword.items() <= rewrite_schema(keyword).items()


def test_values_are_unchanged() -> None:
    value = {"uniqueItems": False, "oneOf": [{"const": 1}, {"const": 2}]}
    assert rewrite_schema({"const": value, "enum": [value]})["const"] == value


def test_a_schema_cannot_set_leniency() -> None:
    assert rewrite_schema({"x-guidance": {"lenient": True}})["x-guidance"]["lenient"] is False


VALUES = st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from(["a", "b"])
BRANCHES = st.lists(
    st.one_of(
        st.builds(lambda value: {"const": value}, VALUES),
        st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
        st.builds(
            lambda types: {"type": types},
            st.lists(
                st.sampled_from(["integer", "string", "null", "number", "boolean"]),
                min_size=1,
                max_size=2,
                unique=True,
            ),
        ),
        st.builds(lambda value: branch({"const": value}), VALUES),
    ),
    min_size=1,
    max_size=3,
)


@given(BRANCHES, VALUES | st.builds(lambda value: {"kind": value}, VALUES))
def test_a_rewritten_schema_accepts_the_same_values(branches: list[Any], value: Any) -> None:
    schema = {"oneOf": branches}
    rewritten = {key: child for key, child in rewrite_schema(schema).items() if key != "x-guidance"}
    assert jsonschema_rs.is_valid(schema, value) == jsonschema_rs.is_valid(rewritten, value)
