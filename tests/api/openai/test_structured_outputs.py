"""Response formats and grammars, in all their spellings."""

import json
from typing import Any

import pytest

from app.api.openai.structured_outputs import build_grammar
from app.api.schema.decode import BodyDecoder
from app.api.schema.openai import CommonFields
from app.core.errors import AppError, ErrorKind
from app.core.requests import ChoiceGrammar, Grammar, JsonSchema, LarkGrammar, Regex
from tests.rows import rows

DECODER = BodyDecoder(CommonFields)
SCHEMA = {"type": "object", "properties": {"b": {"const": "é"}, "a": {"type": "integer"}}}
SERIALIZED = '{"type":"object","properties":{"b":{"const":"é"},"a":{"type":"integer"}}}'


def read(**body: Any) -> Grammar | None:
    return build_grammar(DECODER.decode(json.dumps(body).encode()))


def named_schema(**json_schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def build_nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "body",
    [{}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}],
)
def test_text_has_no_grammar(body: Any):
    assert read(**body) is None


def test_json_object_allows_any_object():
    expected = JsonSchema(text='{"type":"object"}', param="response_format")
    assert read(response_format={"type": "json_object"}) == expected
    assert read(response_format={"type": "json_object", "json_schema": None}) == expected


def test_a_json_object_may_have_a_schema():
    """The form of llama.cpp and of LM Studio."""
    body = {"response_format": {"type": "json_object", "schema": {"required": ["a"]}}}
    assert read(**body) == JsonSchema(text='{"required":["a"]}', param="response_format.schema")


@pytest.mark.parametrize("more", [{}, {"strict": True}, {"strict": False}, {"description": "of"}])
def test_a_named_schema_keeps_the_order_of_its_keys(more: Any):
    assert read(**named_schema(name="thing", schema=SCHEMA, **more)) == JsonSchema(
        text=SERIALIZED, param="response_format.json_schema.schema"
    )


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_a_schema_may_be_a_string(schema: Any):
    assert read(guided_json=schema) == JsonSchema(text=SERIALIZED, param="guided_json")
    assert read(structured_outputs={"json": schema}) == JsonSchema(
        text=SERIALIZED, param="structured_outputs.json"
    )


@pytest.mark.parametrize(
    ("kind", "value", "grammar"),
    [
        ("regex", "a+", Regex(pattern="a+")),
        ("grammar", "start: /a/", LarkGrammar(text="start: /a/")),
        ("choice", ["yes", "no", "yes"], ChoiceGrammar(options=("yes", "no"))),
    ],
)
def test_each_kind_has_two_spellings(kind: str, value: Any, grammar: Any):
    attributes: dict[str, Any] = {name: getattr(grammar, name) for name in grammar.__slots__}
    assert read(**{f"guided_{kind}": value}) == type(grammar)(
        **{**attributes, "param": f"guided_{kind}"}
    )
    assert read(structured_outputs={kind: value}) == type(grammar)(
        **{**attributes, "param": f"structured_outputs.{kind}"}
    )


def test_structured_outputs_may_allow_any_object():
    param = "structured_outputs.json_object"
    assert read(structured_outputs={"json_object": True}) == JsonSchema(
        text='{"type":"object"}', param=param
    )


def test_the_fields_of_llama_cpp_are_constraints():
    at = {"schema": {"const": "42"}}
    assert read(response_format={"type": "json_object", **at}) == JsonSchema(
        text='{"const":"42"}', param="response_format.schema"
    )
    assert read(response_format={"type": "json_schema", "json_schema": at}) == JsonSchema(
        text='{"const":"42"}', param="response_format.json_schema.schema"
    )
    assert read(json_schema={"const": 1}) == JsonSchema(text='{"const":1}', param="json_schema")
    grammar = 'root ::= "a"'
    assert read(grammar=grammar) == LarkGrammar(text=grammar, param="grammar")
    assert read(grammar="") is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "text"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": ["text"]}}, "response_format.type"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (named_schema(), "response_format.json_schema.schema"),
    (named_schema(name=5, schema={}), "response_format.json_schema.name"),
    ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
    ({"grammar": 5}, "grammar"),
    ({"grammar": "root ::= x", "json_schema": {}}, "grammar"),
    (named_schema(name="x"), "response_format.json_schema.schema"),
    (named_schema(name="x", schema=[]), "response_format.json_schema.schema"),
    (named_schema(name="x", schema=True), "response_format.json_schema.schema"),
    (named_schema(name="x", schema=build_nested_schema(400)), "response_format.json_schema.schema"),
    (named_schema(name="x", schema={}, strict="yes"), "response_format.json_schema.strict"),
    (named_schema(name="x", schema={}, schemas={}), "response_format.json_schema.schemas"),
    ({"guided_json": "{bad"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_json": []}, "guided_json"),
    ({"guided_json": build_nested_schema(400)}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_choice": ["yes", ""]}, "guided_choice.1"),
    ({"guided_choice": [5]}, "guided_choice.0"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice.0"),
    ({"structured_outputs": {"regex": "a", "choices": 1}}, "structured_outputs.choices"),
    (
        {"structured_outputs": {"regex": "a", "structural_tag": "x"}},
        "structured_outputs.structural_tag",
    ),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
]


@rows(("body", "param"), WRONG)
def test_an_invalid_format_is_named(body: Any, param: str):
    with pytest.raises(AppError) as caught:
        read(**body)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)
