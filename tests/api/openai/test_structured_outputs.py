"""Formats of answers, in all their spellings."""

import json
from typing import Any

import pytest

from app.api.fields import Fields
from app.api.openai.structured_outputs import read_grammar
from app.core.errors import AppError, ErrorKind
from app.core.requests import ChoiceGrammar, Grammar, JsonSchema, LarkGrammar, Regex

SCHEMA = {"type": "object", "properties": {"b": {"const": "é"}, "a": {"type": "integer"}}}
WRITTEN = '{"type":"object","properties":{"b":{"const":"é"},"a":{"type":"integer"}}}'


def read(**given: Any) -> Grammar | None:
    fields = Fields.from_value(given)
    grammar = read_grammar(fields)
    fields.reject_unknown()
    return grammar


def named(**described: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "given",
    [{}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}],
)
def test_text_has_no_format(given: Any):
    assert read(**given) is None


def test_a_json_object_is_any_object():
    wanted = JsonSchema(text='{"type":"object"}', param="response_format")
    assert read(response_format={"type": "json_object"}) == wanted
    assert read(response_format={"type": "json_object", "json_schema": None}) == wanted


@pytest.mark.parametrize("more", [{}, {"strict": True}, {"strict": False}, {"description": "of"}])
def test_a_named_schema_keeps_the_order_of_its_keys(more: Any):
    assert read(**named(name="thing", schema=SCHEMA, **more)) == JsonSchema(
        text=WRITTEN, param="response_format.json_schema.schema"
    )


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_a_schema_may_come_as_text(schema: Any):
    assert read(guided_json=schema) == JsonSchema(text=WRITTEN, param="guided_json")
    assert read(structured_outputs={"json": schema}) == JsonSchema(
        text=WRITTEN, param="structured_outputs.json"
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
    made: dict[str, Any] = {name: getattr(grammar, name) for name in grammar.__slots__}
    assert read(**{f"guided_{kind}": value}) == type(grammar)(**{**made, "param": f"guided_{kind}"})
    assert read(structured_outputs={kind: value}) == type(grammar)(
        **{**made, "param": f"structured_outputs.{kind}"}
    )


def test_structured_outputs_may_be_any_object():
    param = "structured_outputs.json_object"
    assert read(structured_outputs={"json_object": True}) == JsonSchema(
        text='{"type":"object"}', param=param
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "text"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": ["text"]}}, "response_format.type"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (named(), "response_format.json_schema.name"),
    (named(name="x"), "response_format.json_schema.schema"),
    (named(name="x", schema=[]), "response_format.json_schema.schema"),
    (named(name="x", schema=True), "response_format.json_schema.schema"),
    (named(name="x", schema=nested(400)), "response_format.json_schema.schema"),
    (named(name="x", schema={}, strict="yes"), "response_format.json_schema.strict"),
    (named(name="x", schema={}, more=1), "response_format.json_schema.more"),
    ({"guided_json": "{bad"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_json": []}, "guided_json"),
    ({"guided_json": nested(400)}, "guided_json"),
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
    ({"structured_outputs": {"regex": "a", "yaml": 1}}, "structured_outputs.yaml"),
    (
        {"structured_outputs": {"regex": "a", "structural_tag": "x"}},
        "structured_outputs.structural_tag",
    ),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
]


@pytest.mark.parametrize(("given", "param"), WRONG)
def test_a_wrong_format_is_named(given: Any, param: str):
    with pytest.raises(AppError) as caught:
        read(**given)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)
