"""Schemas that the grammar of Gemma's notation can enforce."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from app.core.requests import Tool
from app.text.families.gemma import FAMILIES
from app.text.syntax.gemma_calls import build_gemma_grammar
from tests.rows import rows
from tests.text.families.walking import Walk, arguments_of, check_walks, grammar, spell

FAMILY = FAMILIES["gemma4"]
QUOTE = '<|"|>'

SUPPORTED = {
    "nothing": {},
    "an object of anything": {"type": "object"},
    "choices": {
        "properties": {
            "one": {"enum": ["a", "b c", 1, True, None]},
            "two": {"const": "x"},
            "three": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "four": {"type": ["boolean", "null"]},
        },
        "required": ["one", "two", "three", "four"],
    },
    "lists of a size": {
        "properties": {
            "few": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
            "two": {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
            "none": {"type": "array", "maxItems": 0},
            "any": {"type": "array"},
        },
        "required": ["few", "two", "none", "any"],
    },
    "numbers within bounds": {
        "properties": {"n": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["n"],
    },
    "only optional parameters": {
        "properties": {name: {"type": "boolean"} for name in "abc"},
        "additionalProperties": False,
    },
    "a definition that leads to itself": {
        "properties": {"tree": {"$ref": "#/$defs/tree"}},
        "required": ["tree"],
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "name": {"type": "boolean"},
                    "parts": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                },
                "required": ["name"],
                "additionalProperties": False,
            }
        },
    },
}

LEFT_TO_JSON = {
    "a pattern": {"type": "string", "pattern": "^a$"},
    "a length": {"type": "string", "minLength": 1},
    "a format": {"type": "string", "format": "date"},
    "exactly one": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    "a condition": {"not": {"type": "string"}},
    "a reference that leads nowhere": {"$ref": "#/$defs/none"},
    "a keyword beside a choice": {"anyOf": [{"type": "string"}], "maxLength": 3},
    "a string that contains the quote": {"const": f"a{QUOTE}b"},
    "a list of different ones": {"type": "array", "uniqueItems": True},
    "keys of a form": {"type": "object", "patternProperties": {"^a": {}}},
    "nonsense": {"type": 5},
}


def tool(parameters):
    return Tool(name="f", description=None, parameters={"type": "object", **parameters})


@pytest.mark.parametrize("parameters", SUPPORTED.values(), ids=SUPPORTED)
def test_grammar_output_satisfies_the_schema(parameters):
    check_walks(FAMILY, [tool(parameters)], times=10, endings=(QUOTE,))


@rows("schema", LEFT_TO_JSON.values(), ids=LEFT_TO_JSON)
def test_unsupported_schemas_are_left_to_json(schema):
    for parameters in ({"properties": {"a": schema}}, {"properties": {"a": {"items": schema}}}):
        tools = [tool({**parameters, "required": ["a"]})]
        assert FAMILY.build_tool_call_grammar(tools, spell, arguments_of) is None


@pytest.mark.parametrize("keyword", ["anyOf", "minProperties", "dependentRequired"])
def test_keywords_of_the_object_are_left_to_json(keyword):
    assert FAMILY.build_tool_call_grammar([tool({keyword: []})], spell, arguments_of) is None


def test_each_optional_parameter_may_be_left_out():
    parameters = SUPPORTED["only optional parameters"]
    walk = Walk(FAMILY, [tool(parameters)])
    for inside in ("", "a:true", "b:true", "c:true", "a:true,c:false", "a:true,b:true,c:true"):
        assert walk.accepts(f"<|tool_call>call:f{{{inside}}}<tool_call|>"), inside
    for inside in ("b:true,a:true", "a:true,", ",a:true", "a:true b:true"):
        assert not walk.accepts(f"<|tool_call>call:f{{{inside}}}<tool_call|>"), inside


def test_quotes_may_be_tokens(shared):
    """The markers of another tokenizer replace those of Gemma."""
    file = shared / "tokenizers" / "qwen3" / "tokenizer.json"
    tokenizer = LLTokenizer(file.read_text("utf-8"))
    ids = {
        text: tokenizer.tokenize_str(text, parse_special=True)[0]
        for text in ("<|im_start|>", "<|im_end|>", "<|box_start|>")
    }
    open, close, quote = ids

    def write_literal(text):
        for marker, id in ids.items():
            text = text.replace(marker, f'" <[{id}]> "')
        return f'"{text}"'.replace('"" ', "").replace(' ""', "")

    tools = [tool({"properties": {"a": {"type": "string"}}, "required": ["a"]})]
    syntax = build_gemma_grammar(
        tools, write_literal, arguments_of, open=open, close=close, quote=quote
    )
    assert syntax is not None
    matcher = LLMatcher(tokenizer, grammar(syntax), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    text = 'say "hi" {}<'
    expected = [
        *(ids[open], *tokenizer.tokenize_str("call:f{a:"), ids[quote]),
        *(*tokenizer.tokenize_str(text), ids[quote]),
        *(*tokenizer.tokenize_str("}"), ids[close]),
    ]
    assert matcher.try_consume_tokens(expected) == len(expected)
    assert matcher.is_accepting()
