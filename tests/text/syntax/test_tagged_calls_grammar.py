"""Schemas that the grammar of a tag syntax can enforce."""

import re
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from app.core.requests import Tool
from app.text.families.tagged_calls import FAMILIES
from tests.rows import rows
from tests.text.families.walking import NOW, Walk, arguments_of, check_walks, grammar, spell

FAMILY = FAMILIES["qwen_coder"]


def tool(schema: Any, **root: Any) -> Tool:
    parameters = {"type": "object", "properties": {"p": schema}, "required": ["p"], **root}
    return Tool(name="f", description=None, parameters=parameters)


@rows(
    "schema",
    [
        {"type": "string", "description": "any"},
        {"type": ["string", "null"], "default": None},
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {},
        True,
        {"type": "string", "enum": ["a b", "<c>"]},
        {"$ref": "#/$defs/Unit", "description": "by name"},
        {"enum": [1, 2]},
        {"type": "integer", "minimum": 3, "maximum": 40},
        {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        {"type": "array", "items": {"$ref": "#/$defs/Unit"}, "minItems": 1, "maxItems": 2},
        {"type": "object", "properties": {"x": {"type": "string", "pattern": "^a{2}$"}}},
    ],
)
def test_grammar_output_satisfies_the_schema(schema):
    tools = [tool(schema, **{"$defs": {"Unit": {"enum": ["c", "f"]}}})]
    check_walks(FAMILY, tools, times=8, endings=[FAMILY.call_tags.value_suffix])


@rows(
    "tool",
    [
        tool({"type": "string", "minLength": 1}),
        tool({"type": "string", "pattern": "a"}),
        tool({"type": "string", "format": "date"}),
        tool({"type": ["string", "integer"], "minimum": 3}),
        tool({"enum": ["a", None]}),
        tool({"enum": ["", "a"]}),
        tool({"enum": ["x</parameter>"]}),
        tool(False),
        tool({"type": "array", "items": {"$ref": "#/properties/p"}}),
        tool({"$ref": "#/$defs/Name", "minLength": 3}, **{"$defs": {"Name": {"type": "string"}}}),
        tool({"type": "string"}, minProperties=2),
        tool({"type": "string"}, required=["q"]),
        tool({"type": "string"}, properties={"a>b": {}}, required=[]),
        Tool(name="f", description=None, parameters={"anyOf": [{"type": "object"}]}),
    ],
)
def test_an_unsupported_schema_gives_json_between_the_tags(tool):
    syntax = FAMILY.build_tool_call_grammar([tool], spell, arguments_of)
    assert syntax is not None
    [call] = syntax.calls
    assert call.startswith(spell('<tool_call>\n{"name": "f", "arguments": '))
    assert call.endswith(spell("}\n</tool_call>"))


def test_calls_in_json_and_in_tags_can_be_mixed():
    tools = [tool({"type": "string", "pattern": "^a{2}$"}), NOW]
    check_walks(FAMILY, tools, times=8)
    walk = Walk(FAMILY, tools)
    json_call = '<tool_call>\n{"name": "f", "arguments": {"p": "aa"}}\n</tool_call>'
    assert walk.accepts(f"{json_call}\n<tool_call>\n<function=now>\n</function>\n</tool_call>")


def test_optional_parameters_may_be_left_out():
    walk = Walk(FAMILY, [tool({"type": "string"}, required=[])])
    assert walk.accepts("<tool_call>\n<function=f>\n</function>\n</tool_call>")


def test_a_string_cannot_contain_its_closing_tag():
    walk = Walk(FAMILY, [tool({"type": "string"})])
    call = "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert walk.accepts(call.format("<b>\n</b>"))
    assert not walk.accepts(call.format("</parameter>"))
    assert not walk.accepts(call.format("</function>"))


def test_tags_that_are_tokens_are_produced_as_tokens(shared):
    """If a closing tag is a token, text cannot merge with it, and text may not contain it."""
    path = shared / "tokenizers" / "qwen3" / "tokenizer.json"
    tokenizer = LLTokenizer(path.read_text("utf-8"))
    # GLM's tokenizer is not in the test data: another token replaces its tag
    tokens = {"</arg_value>": "</think>"} | {tag: tag for tag in ("<tool_call>", "</tool_call>")}
    ids = {tag: tokenizer.tokenize_str(token) for tag, token in tokens.items()}
    assert all(len(of) == 1 for of in ids.values())

    def split_tags(text: str) -> list[str]:
        return [part for part in re.split(f"({'|'.join(tokens)})", text) if part]

    def write_literal(text: str) -> str:
        return " ".join(f"<{ids[p]}>" if p in ids else spell(p) for p in split_tags(text))

    def encode(text: str) -> list[int]:
        return [id for p in split_tags(text) for id in ids.get(p) or tokenizer.tokenize_str(p)]

    syntax = FAMILIES["glm"].build_tool_call_grammar(
        [tool({"type": "string"})], write_literal, arguments_of
    )
    assert syntax is not None
    matcher = LLMatcher(tokenizer, grammar(syntax))
    assert not matcher.is_error(), matcher.get_error()
    for text in ("", "Oslo", "a < b"):
        matcher.reset()
        call = f"<tool_call>f<arg_key>p</arg_key><arg_value>{text}</arg_value></tool_call>"
        assert matcher.try_consume_tokens(encode(call)) == len(encode(call)), text
        assert matcher.is_accepting()
    matcher.reset()
    as_text = [
        *encode("<tool_call>f<arg_key>p</arg_key><arg_value>"),
        *tokenizer.tokenize_str("</arg_value>"),
    ]
    assert matcher.try_consume_tokens(as_text) < len(as_text)
