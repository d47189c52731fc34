"""Text in which calls stand behind a marker."""

import pytest

from app.core.requests import Tool
from app.text.syntax.json_calls import parse_call_object
from app.text.syntax.marked_calls import parse_marked_call, parse_marked_calls
from app.text.syntax.output_parser import OutputBuilder, OutputParser
from app.text.syntax.reader import Reader, Resumable
from tests.text.families.reading import calls, content, reasoning

TOOL = Tool(name="f", description=None, parameters={})


def split(text: str, *, close: str | None = None, also: tuple[str, ...] = (), tools=(TOOL,)):
    def parse(reader: Reader, pieces: OutputBuilder) -> Resumable[None]:
        yield from parse_marked_calls(
            reader,
            pieces,
            tools,
            parse=parse_call_object,
            open="<c>",
            close=close,
            other_opens=also,
        )

    whole = OutputParser(parse)
    pieces = [*whole.feed(text), *whole.flush()]
    single = OutputParser(parse)
    again = [*(piece for letter in text for piece in single.feed(letter)), *single.flush()]
    assert content(again) == content(pieces)
    assert calls(again) == calls(pieces)
    return content(pieces), [(call.name, call.arguments) for call in calls(pieces)]


F = '{"name": "f", "arguments": {"a": 1}}'
CALLED = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "close", "said", "found"),
    [
        (f"a <c> {F} </c> b", "</c>", "ab", [CALLED]),
        (f"<c>{F}<c>{F}", "</c>", "", [CALLED, CALLED]),
        (f"<c>{F} b", None, "b", [CALLED]),
        ("a <c> b", None, "a <c> b", []),
        (f"<c><c>{F}", None, "<c>", [CALLED]),
        # a broken call ends with its marker, with the next one, or with the text
        ('<c>{"name": "f", "arguments": {oh}} </c> b', "</c>", "b", [("f", "{oh}} ")]),
        ('<c>{"name": "f", "arguments": {oh}<c>b', "</c>", "<c>b", [("f", "{oh}")]),
        ('<c>{"name": "f", "arguments": {oh}} b', None, "", [("f", "{oh}} b")]),
    ],
)
def test_calls_stand_behind_a_marker(text, close, said, found):
    assert split(text, close=close) == (said, found)


def test_others_may_begin_calls_too():
    assert split(f"<d>{F}<c>{F}", also=("<d>",)) == ("", [CALLED, CALLED])


def test_without_tools_all_is_text():
    assert split(f"<c>{F}", tools=()) == (f"<c>{F}", [])


def test_a_marker_without_a_call_goes_to_whom_text_goes_to():
    def parse(reader: Reader, pieces: OutputBuilder) -> Resumable[None]:
        while (yield from reader.read_until("<c>", on_text=pieces.add_reasoning)) is not None:
            yield from parse_marked_call(
                reader, pieces, parse=parse_call_object, open="<c>", on_text=pieces.add_reasoning
            )

    parser = OutputParser(parse)
    pieces = [*parser.feed("a<c>b"), *parser.flush()]
    assert reasoning(pieces) == "a<c>b"
