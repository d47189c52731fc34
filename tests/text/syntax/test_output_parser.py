"""What an answer is made of, and the white space beside markers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.syntax.output_parser import (
    Content,
    OutputBuilder,
    OutputParser,
    OutputPart,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from app.text.syntax.reader import Reader, Resumable
from tests.text.families.reading import content, cut, gaps, joined, reasoning


def _parse(reader: Reader, pieces: OutputBuilder) -> Resumable[None]:
    """A language of one letter markers: T thinks, S speaks, C calls, M is nothing but a marker."""
    take = pieces.add_content
    while (mark := (yield from reader.read_until("T", "S", "C", "M", on_text=take))) is not None:
        match mark:
            case "T" | "S":
                pieces.add_marker()
                take = pieces.add_reasoning if mark == "T" else pieces.add_content
            case "C":
                pieces.start_tool_call("f")
                pieces.add_arguments("{}")
                pieces.add_marker()
            case _:
                pieces.add_marker()


def split(*chunks: str) -> list[OutputPart]:
    parser = OutputParser(_parse)
    return [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.flush()


@pytest.mark.parametrize(
    ("text", "said", "thought"),
    [
        ("", "", ""),
        ("  a  b \n", "  a  b \n", ""),  # beside no marker
        (" \n ", " \n ", ""),
        ("a \nC\n", "a", ""),
        ("a \nC\n b ", "ab ", ""),
        ("a M b", "ab", ""),
        ("T\nhm \n hm\n\nS\n\nso", "so", "hm \n hm"),
        (" T x ", "", "x "),  # cut within reasoning
        ("MM \n M", "", ""),
        ("T S \n", "", ""),
        ("a\u00a0C\u2003b", "ab", ""),
    ],
)
def test_white_space_beside_a_marker_belongs_to_it(text, said, thought):
    pieces = split(text)
    assert content(pieces) == said
    assert reasoning(pieces) == thought
    gaps(text, pieces)


def test_pieces_come_in_order_with_their_places():
    assert split("ab C cd") == [
        Content(text="ab", at=0),
        ToolCallStart(name="f"),
        ToolCallArguments(text="{}"),
        Content(text="cd", at=5),
    ]
    assert split("T a S b") == [Reasoning(text="a", at=2), Content(text="b", at=6)]


@given(st.text(alphabet="TSCMab \n", max_size=30), st.lists(st.integers(0, 30), max_size=8))
def test_pieces_do_not_depend_on_how_the_text_was_cut(text, places):
    places = [place for place in places if place <= len(text)]
    assert joined(split(*cut(text, places))) == joined(split(text))
    # nothing but markers and white space is taken away
    assert all(not gap.strip(" \nTSCM") for gap in gaps(text, split(text)))


@given(st.text(alphabet="ab \n", max_size=30))
def test_text_without_markers_stays_as_it_is(text):
    assert content(split(*text)) == text


def test_what_is_clear_is_given_out_at_once_and_the_rest_is_known_to_be_held():
    parser = OutputParser(_parse)
    assert parser.feed("ab ") == [Content(text="ab", at=0)]
    assert parser.settled == 2
    assert parser.feed("c") == [Content(text=" ", at=2), Content(text="c", at=3)]
    assert parser.settled == 4
    assert parser.flush() == []


def test_a_parser_that_does_not_read_to_the_end_is_our_mistake():
    def lazy(reader: Reader, pieces: OutputBuilder) -> Resumable[None]:
        yield from reader.peek()

    parser = OutputParser(lazy)
    with pytest.raises(AssertionError, match="ended too early"):
        parser.feed("a")
