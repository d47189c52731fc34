"""JSON Schemas as documents: parsing and limits."""

import json
from typing import Any

import pytest

from app.grammar.schema import (
    MAX_ENTRIES,
    MAX_OPTIONAL_PROPERTIES,
    MAX_SCHEMA_LENGTH,
    UnsupportedGrammarError,
    parse_schema,
    resolve_pointer,
    walk_schemas,
)


def refusal(schema: Any) -> UnsupportedGrammarError:
    with pytest.raises(UnsupportedGrammarError) as caught:
        parse_schema(schema if isinstance(schema, str) else json.dumps(schema))
    return caught.value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ('{"const": NaN}', "NaN is not a JSON number"),
        ('{"maximum": 1e999}', "too large"),
        ("9" * 5000, "not valid JSON"),
        ("[1]", "JSON object"),
        ("false", "JSON object"),
        ('{"const": "' + "a" * MAX_SCHEMA_LENGTH + '"}', "longer than"),
        ('{"items":' * 99 + "[[]]" + "}" * 99, "nested deeper"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "nested deeper"),
    ],
)
def test_an_invalid_schema_is_rejected_with_the_reason(text: str, reason: str) -> None:
    assert reason in refusal(text).reason


def test_true_is_an_empty_schema() -> None:
    assert parse_schema("true") == {}


def test_entries_are_counted_at_every_level() -> None:
    entries = {f"p{i}": {} for i in range(MAX_ENTRIES // 3)}
    assert parse_schema(
        json.dumps({"properties": {"a": {"properties": entries}, "b": {"enum": [1]}}})
    )
    values = list(range(MAX_ENTRIES - len(entries)))
    more = {"items": {"properties": entries}, "$defs": {"a": {"enum": values}}}
    assert "more than" in refusal(more).reason


def test_the_optional_properties_of_an_object_are_limited() -> None:
    allowed = {f"p{i}": {} for i in range(MAX_OPTIONAL_PROPERTIES)}
    assert parse_schema(json.dumps({"properties": allowed}))
    required = {"properties": {**allowed, "more": {}}, "required": ["more"]}
    assert parse_schema(json.dumps(required))
    combined = {"allOf": [{"properties": allowed}, {"properties": {"more": {}}}]}
    for schema in ({"properties": {**allowed, "more": {}}}, combined):
        assert "optional properties: make some required" in refusal(schema).reason


@pytest.mark.parametrize(
    "multiples", [[0.01, 0.25, 5, 12, 1000], [99_991], [0], [-3], [1e-20], ["x"], [True]]
)
def test_multiples_of_a_usual_size_are_accepted(multiples: list[Any]) -> None:
    """Invalid values of multipleOf are rejected by the compiler."""
    assert parse_schema(json.dumps({"anyOf": [{"multipleOf": multiple} for multiple in multiples]}))


@pytest.mark.parametrize("multiples", [[1_000_003], [9973, 9967], [1.000001], [1e300]])
def test_multiples_that_need_a_large_table_are_rejected(multiples: list[float]) -> None:
    """With 9973 and 9967 in an allOf, native code took more than 20 s and all memory."""
    path = refusal({"allOf": [{"multipleOf": multiple} for multiple in multiples]}).path
    assert path[0] == "allOf"
    assert path[-1] == "multipleOf"


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"pattern": "(a{101}){100}"}}}, "properties.a.pattern"),
        ({"patternProperties": {"a{10001}": {}}}, "patternProperties.a{10001}"),
        ({"items": {"minProperties": 2, "required": []}}, "items.minProperties"),
        ({"$defs": {"a": {"minProperties": 3, "required": ["a"]}}}, "$defs.a.minProperties"),
    ],
)
def test_a_keyword_beyond_a_limit_is_named(schema: Any, path: str) -> None:
    assert ".".join(refusal(schema).path) == path


def test_values_are_not_taken_for_schemas() -> None:
    value = {"properties": {"a": {"pattern": "a{99999}", "multipleOf": 1_000_003}}}
    assert parse_schema(json.dumps({"const": value, "default": value, "enum": [value]}))


def test_every_schema_is_found_with_its_path() -> None:
    document = {
        "properties": {"a/b": {"items": [{}, True]}},
        "$defs": {"x": {"anyOf": [{"not": {}}]}},
        "enum": [{"items": {}}],
    }
    found = {"/".join(path) for path, _ in walk_schemas(document)}
    assert found == {
        "",
        "properties/a/b",
        "properties/a/b/items/0",
        "$defs/x",
        "$defs/x/anyOf/0",
        "$defs/x/anyOf/0/not",
    }


def test_a_reference_within_the_document_is_resolved() -> None:
    document = {"$defs": {"a/b ~%": {"items": [1, {"const": 2}]}}}
    assert resolve_pointer(document, "#") == ((), document)
    pointer = "#/$defs/a~1b%20~0%25/items/1"
    assert resolve_pointer(document, pointer) == (("$defs", "a/b ~%", "items", "1"), {"const": 2})
    for other in ("#/$defs/missing", "#/$defs/a~1b%20~0%25/items/2", "#anchor", "https://x/#/a"):
        assert resolve_pointer(document, other) is None
