"""Calls between tags, in Qwen3-Coder's syntax, which stands for the others."""

import json

import pytest

from app.core.requests import Tool
from app.text.families.glm import Family as Glm
from app.text.families.qwen_coder import Family
from app.text.syntax.output_parser import ToolCallArguments, ToolCallStart
from tests.text.families.reading import calls, check_text, content, read

FAMILY = Family()
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


def called(*parameters: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{raw}\n</parameter>\n" for key, raw in parameters)
    return f"<tool_call>\n<function=write>\n{inner}</function>\n</tool_call>"


def arguments(text: str) -> str:
    (call,) = calls(check_text(FAMILY, text, tools=[TOOL]))
    assert call.name == "write"
    return call.arguments


def test_a_name_is_given_before_any_of_the_arguments_is_known():
    pieces = read(FAMILY, ["<tool_call>\n<function=write>"], tools=[TOOL])
    assert pieces == [ToolCallStart(name="write")]


@pytest.mark.parametrize(
    ("key", "begin", "rest"),
    [("text", "A long te", "xt"), ("edits", '[{"old": "x', '"}]'), ("other", "prose", ".")],
)
def test_a_long_value_comes_piece_by_piece(key, begin, rest):
    head, tail = called((key, f"{begin}|{rest}")).split("|")
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
def test_a_tag_ends_a_value_only_where_something_follows_that_can(text):
    assert json.loads(arguments(called(("text", text), ("count", "3")))) == {
        "text": text,
        "count": 3,
    }


def test_a_tag_within_a_string_of_a_list_ends_nothing():
    edits = ["</parameter>\n</function>\n</tool_call>"]
    assert json.loads(arguments(called(("edits", json.dumps(edits))))) == {"edits": edits}


def test_a_value_without_an_end_of_its_own_ends_with_the_call():
    text = called(("text", "abc")).replace("\n</parameter>", "")
    assert arguments(text) == '{"text": "abc"}'


def test_a_call_without_an_end_of_its_own_ends_with_the_outer_tag():
    text = called(("count", "1")).replace("</function>\n", "")
    assert arguments(text) == '{"count": 1}'


def test_a_call_may_be_written_in_json_instead():
    text = '<tool_call>{"name": "write", "arguments": {"text": "</tool_call>"}}</tool_call>'
    assert arguments(text) == '{"text": "</tool_call>"}'


def test_arguments_may_be_written_in_json_instead():
    inner = '{"text": "</function>"}'
    text = f"<tool_call>\n<function=write>\n{inner}\n</function>\n</tool_call>"
    assert arguments(text) == inner


def test_what_is_no_parameter_is_handed_on_as_it_is():
    text = called(("count", "1")).replace("<parameter", "stray <b>text</b> <parameter")
    assert arguments(text) == "stray <b>text</b> <parameter=count>\n1\n</parameter>\n"
    text = called(("edits", "[1]")).replace("</function>", "stray <b>text</b> </function>")
    assert arguments(text) == '{"edits": [1]stray <b>text</b> '


def test_an_object_that_is_broken_is_handed_on_as_it_is():
    assert arguments(called(("edits", "[1, oops"), ("count", "2"))) == (
        '{"edits": [1, oops, "count": 2}'
    )


@pytest.mark.parametrize(
    ("cut", "there"),
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
def test_what_is_cut_stays_as_it_is(cut, there):
    text = called(("text", "Hello"))
    text = text[: text.index(cut) + len(cut)]
    assert arguments(text) == there
    assert content(read(FAMILY, [text], tools=[TOOL])) == ""


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
def test_what_has_no_name_stays_text(text):
    pieces = check_text(FAMILY, text, tools=[TOOL])
    assert (content(pieces), calls(pieces)) == (text, [])


def test_a_call_behind_what_is_none_is_read():
    pieces = check_text(FAMILY, f"<tool_call> is a tag. {called()}", tools=[TOOL])
    assert content(pieces) == "<tool_call> is a tag."
    assert [call.arguments for call in calls(pieces)] == ["{}"]


def test_the_same_holds_where_the_name_has_no_tag():
    text = (
        "<tool_call>write<arg_key>text</arg_key><arg_value>a</arg_value>b</arg_value></tool_call>"
    )
    (call,) = calls(check_text(Glm(), text, tools=[TOOL]))
    assert call.arguments == '{"text": "a</arg_value>b"}'
    for text in ("<tool_call>two words\n</tool_call>", "<tool_call>write", "<tool_call>write\nx"):
        assert content(check_text(Glm(), text, tools=[TOOL])) == text
