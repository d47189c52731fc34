"""Calls between tags, with Qwen3-Coder's syntax as the example."""

import json

import pytest

from app.core.requests import Tool
from app.text.families.tagged_calls import FAMILIES
from app.text.syntax.output_parser import ToolCallArguments, ToolCallStart
from tests.text.families.reading import check_text, collect_calls, join_content, read

FAMILY = FAMILIES["qwen_coder"]
TOOL = Tool(
    name="write",
    description=None,
    parameters={
        "properties": {
            "text": {"type": "string"},
            "edits": {"type": "array"},
            "count": {"type": "integer"},
        }
    },
)


def render_call(*parameters: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{raw}\n</parameter>\n" for key, raw in parameters)
    return f"<tool_call>\n<function=write>\n{inner}</function>\n</tool_call>"


def parse_arguments(text: str) -> str:
    (call,) = collect_calls(check_text(FAMILY, text, tools=[TOOL]))
    assert call.name == "write"
    return call.arguments


def test_the_name_is_streamed_before_the_arguments():
    pieces = read(FAMILY, ["<tool_call>\n<function=write>"], tools=[TOOL])
    assert pieces == [ToolCallStart(name="write")]


@pytest.mark.parametrize(
    ("key", "begin", "rest"),
    [("text", "A long te", "xt"), ("edits", '[{"old": "x', '"}]'), ("other", "prose", ".")],
)
def test_a_long_value_is_streamed(key, begin, rest):
    head, tail = render_call((key, f"{begin}|{rest}")).split("|")
    parser = FAMILY.build_parser(tools=[TOOL], tags=None, in_reasoning=False)
    early = "".join(p.text for p in parser.feed(head) if isinstance(p, ToolCallArguments))
    assert early.endswith(begin)
    late = "".join(
        p.text for p in [*parser.feed(tail), *parser.flush()] if isinstance(p, ToolCallArguments)
    )
    assert json.loads(early + late)


@pytest.mark.parametrize(
    "text",
    [
        "<p></parameter></p>",
        "</parameter>\nand more",
        "</function> </tool>",
        "</function>\n</tool_call",
        "<tool_call><function=other><parameter=x>",
        "line\n",
        "\n",
        "",
    ],
)
def test_a_tag_ends_a_value_only_before_a_valid_continuation(text):
    assert json.loads(parse_arguments(render_call(("text", text), ("count", "3")))) == {
        "text": text,
        "count": 3,
    }


def test_a_tag_within_a_string_of_a_list_does_not_end_the_value():
    edits = ["</parameter>\n</function>\n</tool_call>"]
    assert json.loads(parse_arguments(render_call(("edits", json.dumps(edits))))) == {
        "edits": edits
    }


def test_a_value_without_a_closing_tag_ends_with_the_call():
    text = render_call(("text", "abc")).replace("\n</parameter>", "")
    assert parse_arguments(text) == '{"text": "abc"}'


def test_a_call_without_a_closing_tag_ends_with_the_outer_tag():
    text = render_call(("count", "1")).replace("</function>\n", "")
    assert parse_arguments(text) == '{"count": 1}'


def test_a_call_may_be_written_in_json_instead():
    text = '<tool_call>{"name": "write", "arguments": {"text": "</tool_call>"}}</tool_call>'
    assert parse_arguments(text) == '{"text": "</tool_call>"}'


def test_arguments_may_be_written_in_json_instead():
    inner = '{"text": "</function>"}'
    text = f"<tool_call>\n<function=write>\n{inner}\n</function>\n</tool_call>"
    assert parse_arguments(text) == inner


def test_text_outside_parameters_is_passed_through():
    text = render_call(("count", "1")).replace("<parameter", "stray <b>text</b> <parameter")
    assert parse_arguments(text) == "stray <b>text</b> <parameter=count>\n1\n</parameter>\n"
    text = render_call(("edits", "[1]")).replace("</function>", "stray <b>text</b> </function>")
    assert parse_arguments(text) == '{"edits": [1]stray <b>text</b> '


def test_invalid_json_is_passed_through():
    assert parse_arguments(render_call(("edits", "[1, oops"), ("count", "2"))) == (
        '{"edits": [1, oops, "count": 2}'
    )


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("<function=write>\n", ""),
        ("<parameter=te", '{"te'),
        ("<parameter=text>\n", '{"text": "'),
        ("Hello", '{"text": "Hello'),
        ("Hello\n</parameter>\n", '{"text": "Hello"'),
        ("Hello\n</parameter>\n</func", '{"text": "Hello"'),
        ("</function>", '{"text": "Hello"}'),
        ("</function>\n</tool_c", '{"text": "Hello"}'),
    ],
)
def test_a_truncated_call_is_passed_on(end, expected):
    text = render_call(("text", "Hello"))
    text = text[: text.index(end) + len(end)]
    assert parse_arguments(text) == expected
    assert join_content(read(FAMILY, [text], tools=[TOOL])) == ""


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\nnothing",
        "<tool_call>\n<function=",
        "<tool_call>\n<function=>\n</function>",
        "<tool_call>\n<function=a\nb>",
        "<function=unknown>\n</function>",
        "<tool_call>{} </tool_call>",
    ],
)
def test_a_call_without_a_name_is_text(text):
    pieces = check_text(FAMILY, text, tools=[TOOL])
    assert (join_content(pieces), collect_calls(pieces)) == (text, [])


def test_a_call_after_a_stray_tag_is_parsed():
    pieces = check_text(FAMILY, f"<tool_call> is a tag. {render_call()}", tools=[TOOL])
    assert join_content(pieces) == "<tool_call> is a tag."
    assert [call.arguments for call in collect_calls(pieces)] == ["{}"]


def test_names_without_a_tag_follow_the_same_rules():
    text = (
        "<tool_call>write<arg_key>text</arg_key><arg_value>a</arg_value>b</arg_value></tool_call>"
    )
    (call,) = collect_calls(check_text(FAMILIES["glm"], text, tools=[TOOL]))
    assert call.arguments == '{"text": "a</arg_value>b"}'
    for text in ("<tool_call>two words\n</tool_call>", "<tool_call>write", "<tool_call>write\nx"):
        assert join_content(check_text(FAMILIES["glm"], text, tools=[TOOL])) == text
