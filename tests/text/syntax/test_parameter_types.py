"""What type a parameter is of, and what its text is then."""

import json

import pytest

from app.core.requests import Tool
from app.text.families.qwen_coder import Family
from app.text.syntax.parameter_types import STRING_TYPE, get_parameter_types, to_json
from tests.text.families.reading import calls, check_text

# ollama's table of values: where it is no law
LEFT_OUT = {
    "null value lowercase": "what is to be a string stays one: a file may hold the word null",
    "invalid boolean falls back to false": "what is no boolean stays what it is, a string",
    "invalid JSON array falls back to string": "it was handed on before it turned out to be none",
    "invalid JSON object falls back to string": "it was handed on before it turned out to be none",
}


def test_values_are_read_as_the_types_that_their_schema_gives_them(shared):
    lines = (shared / "output_parsing" / "qwen3_coder_value_types.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in lines.splitlines()]
    assert set(LEFT_OUT) <= {row["desc"] for row in rows}
    for row in rows:
        if row["desc"] in LEFT_OUT:
            continue
        schema = {"type": row["type"]} if row["type"] else {}
        found = read(row["raw"], schema)
        assert found == row["want"], row
        assert type(found) is type(row["want"]) or isinstance(found, int | float), row


def read(raw: str, schema: dict[str, object]) -> object:
    tool = Tool(name="f", description=None, parameters={"properties": {"p": schema}})
    text = f"<tool_call><function=f><parameter=p>{raw}</parameter></function></tool_call>"
    (call,) = calls(check_text(Family(), text, tools=[tool]))
    return json.loads(call.arguments)["p"]


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, None),
        (True, None),
        ({"type": "str"}, None),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"anyOf": [{"type": "integer"}, {}]}, None),
        ({"oneOf": [{"type": "integer"}, {"const": "auto"}]}, {"integer", "string"}),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "number"}]}, {"integer"}),
        ({"enum": ["a", 1, 2.5, None, True, [], {}]}, None),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"$ref": "#/$defs/Unit"}, {"string"}),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"$ref": "elsewhere"}, None),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
    ],
)
def test_a_schema_says_of_what_types_a_value_may_be(schema, types):
    defs = {"Unit": {"enum": ["c", "f"]}, "Loop": {"$ref": "#/$defs/Loop"}}
    found = get_parameter_types({"properties": {"p": schema}, "$defs": defs}, "p")
    everything = {"string", "integer", "number", "null", "boolean", "array", "object"}
    assert found == types or (types is None and found == everything)


def test_a_parameter_is_looked_for_in_all_parts_of_the_schema():
    root = {
        "$ref": "#/$defs/Base",
        "anyOf": [{"properties": {"q": {"type": "integer"}}}, {"required": ["p"]}],
        "$defs": {"Base": {"properties": {"p": {"type": "string"}}}},
    }
    assert get_parameter_types(root, "p") == STRING_TYPE
    assert get_parameter_types(root, "q") == {"integer"}
    assert get_parameter_types(root, "r") is None
    assert get_parameter_types({"additionalProperties": {"type": "boolean"}}, "r") == {"boolean"}


@pytest.mark.parametrize(
    ("raw", "types", "text"),
    [
        ("007", None, '"007"'),
        ("True", None, "true"),
        ("NaN", None, '"NaN"'),
        ("{'a': None}", None, '{"a": null}'),
        ("{not one}", None, '"{not one}"'),
        ("[" * 100_000, None, f'"{"[" * 100_000}"'),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ("+07", {"integer"}, "7"),
        ("42.0", {"integer", "string"}, '"42.0"'),
        ("None", {"string", "null"}, "null"),
        ("None", {"string"}, '"None"'),
        (" 5 ", {"string", "integer"}, "5"),
        (" x ", {"string", "integer"}, '" x "'),
    ],
)
def test_a_value_is_of_one_of_its_types_if_it_can_be(raw, types, text):
    assert to_json(raw, None if types is None else frozenset(types)) == text
