"""Types of parameters, and conversion of their text."""

import json

from app.core.requests import Tool
from app.text.families.tagged_calls import FAMILIES
from app.text.syntax.parameter_types import STRING_TYPE, get_parameter_types, to_json
from tests.rows import rows
from tests.text.families.reading import check_text, collect_calls

# rows of ollama's table of values that do not apply
EXCLUDED = {
    "null value lowercase": "a string stays a string: a file may contain the word null",
    "invalid boolean falls back to false": "an invalid boolean stays a string",
    "invalid JSON array falls back to string": "it is streamed before it turns out to be invalid",
    "invalid JSON object falls back to string": "it is streamed before it turns out to be invalid",
}


def test_values_have_the_types_of_their_schema(shared):
    lines = (shared / "output_parsing" / "qwen3_coder_value_types.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in lines.splitlines()]
    assert set(EXCLUDED) <= {row["desc"] for row in rows}
    for row in rows:
        if row["desc"] in EXCLUDED:
            continue
        schema = {"type": row["type"]} if row["type"] else {}
        value = read(row["raw"], schema)
        assert value == row["want"], row
        assert type(value) is type(row["want"]) or isinstance(value, int | float), row


def read(raw: str, schema: dict[str, object]) -> object:
    tool = Tool(name="f", description=None, parameters={"properties": {"p": schema}})
    text = f"<tool_call><function=f><parameter=p>{raw}</parameter></function></tool_call>"
    (call,) = collect_calls(check_text(FAMILIES["qwen_coder"], text, tools=[tool]))
    return json.loads(call.arguments)["p"]


@rows(
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
def test_the_types_of_a_parameter_come_from_its_schema(schema, types):
    defs = {"Unit": {"enum": ["c", "f"]}, "Loop": {"$ref": "#/$defs/Loop"}}
    found = get_parameter_types({"properties": {"p": schema}, "$defs": defs}, "p")
    all_types = {"string", "integer", "number", "null", "boolean", "array", "object"}
    assert found == types or (types is None and found == all_types)


def test_a_parameter_is_searched_in_all_parts_of_the_schema():
    root = {
        "$ref": "#/$defs/Base",
        "anyOf": [{"properties": {"q": {"type": "integer"}}}, {"required": ["p"]}],
        "$defs": {"Base": {"properties": {"p": {"type": "string"}}}},
    }
    assert get_parameter_types(root, "p") == STRING_TYPE
    assert get_parameter_types(root, "q") == {"integer"}
    assert get_parameter_types(root, "r") is None
    assert get_parameter_types({"additionalProperties": {"type": "boolean"}}, "r") == {"boolean"}


@rows(
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
def test_a_value_is_converted_to_one_of_its_types_if_possible(raw, types, text):
    assert to_json(raw, None if types is None else frozenset(types)) == text
