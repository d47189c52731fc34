"""The diagnosis finds the keyword that the compiler rejects, in few trials."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.errors import AppError
from app.core.requests import JsonSchema
from app.grammar import schema_diagnosis
from app.grammar.schema import Schema, SchemaPath, resolve_pointer, walk_schemas
from app.grammar.schema_diagnosis import find_unsupported_keyword
from tests import tiny
from tests.engine.harness import grammar_compiler
from tests.grammar.schemas import random_schema
from tests.rows import rows

ENDS = frozenset({tiny.END})


def find_rejected_param(schema: Any) -> str | None:
    with pytest.raises(AppError) as caught:
        grammar_compiler().compile(JsonSchema(text=json.dumps(schema), param="schema"), ENDS)
    return caught.value.param


@rows(
    ("schema", "keyword"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"type": "dict"}, "type"),
        ({"type": "array", "items": {"minimum": "3"}}, "items.minimum"),
        (
            {"properties": {"tags": {"type": "array", "uniqueItems": True}}},
            "properties.tags.uniqueItems",
        ),
        ({"anyOf": [{"type": "null"}, {"not": {}}]}, "anyOf.1.not"),
        ({"prefixItems": [True, {"contains": {}}]}, "prefixItems.1.contains"),
        ({"patternProperties": {"^a": {"if": {}}}}, "patternProperties.^a.if"),
        (
            {"additionalProperties": {"propertyNames": {"maxLength": 1}}},
            "additionalProperties.propertyNames",
        ),
        (
            {"type": "object", "properties": {"a": False}, "required": ["a"]},
            "required",
        ),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "properties.a.pattern"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "properties.a.pattern"),
        ({"properties": {"a": {"type": "string", "format": "iri"}}}, "properties.a.format"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"properties": {"a": 1}}, "properties.a"),
        ({"properties": []}, "properties"),
        ({"$schema": "colour"}, "$schema"),
        ({"properties": {"a": {"$ref": "#/$defs/missing"}}}, "properties.a.$ref"),
        ({"$ref": "https://example.com/schema"}, "$ref"),
    ],
)
def test_an_unsupported_keyword_is_named(schema: Any, keyword: str) -> None:
    assert find_rejected_param(schema) == f"schema.{keyword}"


def test_one_of_several_contradicting_keywords_is_named() -> None:
    assert find_rejected_param({"type": "integer", "minimum": 2, "maximum": 1}) == "schema.minimum"
    assert find_rejected_param({"const": "a", "type": "integer"}) == "schema.const"
    optional = {"properties": {"a": {}, "b": {}}, "additionalProperties": True}
    limited = {"type": "object", "maxProperties": 1, **optional}
    assert find_rejected_param(limited) == "schema.maxProperties"


def test_a_fault_behind_a_reference_is_named_in_its_definition() -> None:
    node = {
        "type": "object",
        "properties": {
            "next": {"type": "array", "items": {"$ref": "#/$defs/a~1b c"}},
            "tags": {"type": "array", "uniqueItems": True},
        },
    }
    schema = {"properties": {"first": {"$ref": "#/$defs/a~1b c"}}, "$defs": {"a/b c": node}}
    assert find_rejected_param(schema) == "schema.$defs.a/b c.properties.tags.uniqueItems"


def test_an_anchor_does_not_mislead_the_search() -> None:
    schema = {
        "properties": {"a": {"$ref": "#here"}, "b": {"not": {}}},
        "$defs": {"x": {"$anchor": "here", "type": "null"}},
    }
    assert find_rejected_param(schema) == "schema.properties.b.not"


def test_circular_references_end_the_search() -> None:
    circular = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    }
    assert (find_rejected_param(circular) or "").startswith("schema.$defs.")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {}, "x-guidance": {"lenient": True}}, "not is not supported: remove it"),
        ({"oneOf": [{}, {}]}, "use anyOf"),
        ({"$ref": "#/$defs/missing"}, r"Pointer '/\$defs/missing' does not exist"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, r"minimum \(2\) is greater than maximum"),
        ({"const": "\ud800"}, "it contains an unpaired surrogate"),
    ],
)
def test_the_reason_is_about_the_schema_of_the_request(schema: Any, reason: str) -> None:
    with pytest.raises(AppError, match=reason) as caught:
        grammar_compiler().compile(JsonSchema(text=json.dumps(schema)), ENDS)
    assert "\n" not in caught.value.message
    assert "whole" not in caught.value.message


FAULTS = [{"uniqueItems": True}, {"not": {"type": "null"}}, {"type": "dict"}, {"minimum": "3"}]


@given(st.integers(0, 499), st.randoms(use_true_random=False), st.sampled_from(FAULTS))
@settings(max_examples=60)
def test_a_fault_planted_anywhere_is_found(seed: int, rng: Any, fault: Schema) -> None:
    """In one of 500 schemas, at any position, also in optional properties: the path is exact."""
    document = random_schema(seed)
    path, schema = rng.choice([*walk_schemas(document)])
    (keyword,) = fault
    schema.clear()
    schema.update(fault)
    assert find_rejected_param(document) == ".".join(("schema", *path, keyword))


def test_the_search_in_a_wide_schema_takes_logarithmically_many_trials() -> None:
    trials = list[Schema]()
    fault_path: SchemaPath = ("properties", "p777")

    def refusal(document: Schema) -> str | None:
        """Rejects documents that contain the fault outside $defs."""
        trials.append(document)
        visible = json.dumps({key: value for key, value in document.items() if key != "$defs"})
        return "wrong" if "p777" in visible or '"bad"' in visible else None

    document = {"properties": {f"p{i}": {"type": "null"} for i in range(2000)}}
    document["properties"]["p777"] = {"type": "bad"}
    assert find_unsupported_keyword(document, refusal, "wrong").path == (*fault_path, "type")
    assert len(trials) < 40


def test_a_search_on_a_busy_machine_is_not_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is CPU time: a thread that waits for a core finds the same keyword."""
    monkeypatch.setattr(schema_diagnosis, "_CPU_SECONDS", 0.5)

    def refusal(document: Schema) -> str | None:
        time.sleep(0.05)
        visible = json.dumps({key: value for key, value in document.items() if key != "$defs"})
        return "wrong" if "p777" in visible or '"bad"' in visible else None

    document = {"properties": {f"p{i}": {"type": "null"} for i in range(1000)}}
    document["properties"]["p777"] = {"type": "bad"}
    began = time.monotonic()
    found = find_unsupported_keyword(document, refusal, "wrong")
    assert time.monotonic() - began > 0.5
    assert found.path == ("properties", "p777", "type")


def test_a_search_that_takes_too_long_names_its_best_match() -> None:
    def refusal(document: Schema) -> str | None:
        found = resolve_pointer(document, document.get("$ref", "#/missing"))
        return "wrong" if found is None or "x" in json.dumps(found[1]) else None

    document: Schema = {"type": "x"}
    for _ in range(90):
        document = {"items": document, "prefixItems": [{"a": i} for i in range(4)]}
    blame = find_unsupported_keyword(document, refusal, "wrong")
    assert blame.reason == "wrong"
    assert set(blame.path) <= {"items", "prefixItems", "0", "1", "2", "3", "type"}
