"""Calls after a marker in the text."""

import pytest

from app.core.requests import Tool
from app.text.syntax.json_calls import parse_call_object, parse_calls
from app.text.syntax.marked_calls import MarkedFamily, parse_marked_call
from app.text.syntax.output_parser import OutputBuilder, OutputParser
from app.text.syntax.reader import Reader, Resumable
from tests.text.families.reading import collect_calls, join_content, join_reasoning

TOOL = Tool(name="f", description=None, parameters={})


def parse_text(
    text: str, *, close: str | None = None, other_opens: tuple[str, ...] = (), tools=(TOOL,)
):
    class Family(MarkedFamily):
        call_markers = ("<c>", *other_opens)
        call_close = close

        def parse_marked(self, reader, output, tools):
            return (yield from parse_calls(reader, output))

    def build_parser() -> OutputParser:
        return Family().build_parser(tools=tools, tags=None, in_reasoning=False)

    parser = build_parser()
    pieces = [*parser.feed(text), *parser.flush()]
    streaming_parser = build_parser()
    streamed = [
        *(piece for letter in text for piece in streaming_parser.feed(letter)),
        *streaming_parser.flush(),
    ]
    assert join_content(streamed) == join_content(pieces)
    assert collect_calls(streamed) == collect_calls(pieces)
    return join_content(pieces), [(call.name, call.arguments) for call in collect_calls(pieces)]


F = '{"name": "f", "arguments": {"a": 1}}'
EXPECTED_CALL = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "close", "expected_content", "expected_calls"),
    [
        (f"a <c> {F} </c> b", "</c>", "a  b", [EXPECTED_CALL]),
        (f"<c>{F}<c>{F}", "</c>", "", [EXPECTED_CALL, EXPECTED_CALL]),
        (f"<c>{F} b", None, "b", [EXPECTED_CALL]),
        ("a <c> b", None, "a <c> b", []),
        (f"<c><c>{F}", None, "<c>", [EXPECTED_CALL]),
        (f"<c>[{F}, {F}]</c>", "</c>", "", [EXPECTED_CALL, EXPECTED_CALL]),
        # a broken call ends with its own brace, its marker, the next one, or the text
        ('<c>{"name": "f", "arguments": {oh}} </c> b', "</c>", "b", [("f", "{oh}")]),
        ('<c>{"name": "f", "arguments": {oh </c> b', "</c>", "b", [("f", "{oh ")]),
        ('<c>{"name": "f", "arguments": {oh}<c>b', "</c>", "<c>b", [("f", "{oh}")]),
        ('<c>{"name": "f", "arguments": {oh b', None, "", [("f", "{oh b")]),
    ],
)
def test_calls_follow_a_marker(text, close, expected_content, expected_calls):
    assert parse_text(text, close=close) == (expected_content, expected_calls)


def test_other_markers_may_begin_calls():
    assert parse_text(f"<d>{F}<c>{F}", other_opens=("<d>",)) == ("", [EXPECTED_CALL, EXPECTED_CALL])


def test_without_tools_all_is_text():
    assert parse_text(f"<c>{F}", tools=()) == (f"<c>{F}", [])


def test_a_marker_without_a_call_goes_to_on_text():
    def parse(reader: Reader, pieces: OutputBuilder) -> Resumable[None]:
        while (yield from reader.read_until("<c>", on_text=pieces.add_reasoning)) is not None:
            yield from parse_marked_call(
                reader, pieces, parse=parse_call_object, open="<c>", on_text=pieces.add_reasoning
            )

    parser = OutputParser(parse)
    pieces = [*parser.feed("a<c>b"), *parser.flush()]
    assert join_reasoning(pieces) == "a<c>b"
