"""Pieces of an answer, and white space next to markers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
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
from tests.rows import rows
from tests.text.families.reading import (
    find_gaps,
    join_content,
    join_reasoning,
    merge_pieces,
    split_at,
)


def _parse(reader: Reader, pieces: OutputBuilder) -> Resumable[None]:
    """A syntax of one-letter markers: T begins reasoning, S content, C a call, M nothing."""
    on_text = pieces.add_content
    while (mark := (yield from reader.read_until("T", "S", "C", "M", on_text=on_text))) is not None:
        match mark:
            case "T" | "S":
                pieces.add_marker()
                on_text = pieces.add_reasoning if mark == "T" else pieces.add_content
            case "C":
                pieces.start_tool_call("f")
                pieces.add_arguments("{}")
                pieces.add_marker()
            case _:
                pieces.add_marker()


def parse_chunks(*chunks: str) -> list[OutputPart]:
    parser = OutputParser(_parse)
    return [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.flush()


@rows(
    ("text", "expected_content", "expected_reasoning"),
    [
        ("", "", ""),
        ("  a  b \n", "  a  b \n", ""),  # beside no marker
        (" \n ", " \n ", ""),
        ("a \nC\n", "a", ""),
        ("a \nC\n b ", "a \n\n b ", ""),
        ("a M b", "a  b", ""),
        ("a CC C", "a", ""),
        (" C b", "b", ""),
        ("a T x S\nb", "a\nb", "x"),
        ("T\nhm \n hm\n\nS\n\nso", "so", "hm \n hm"),
        (" T x ", "", "x "),  # cut within reasoning
        ("MM \n M", "", ""),
        ("T S \n", "", ""),
        ("a\u00a0C\u2003b", "a\u00a0\u2003b", ""),
    ],
)
def test_white_space_between_a_marker_and_the_edge_of_a_text_belongs_to_the_marker(
    text, expected_content, expected_reasoning
):
    pieces = parse_chunks(text)
    assert join_content(pieces) == expected_content
    assert join_reasoning(pieces) == expected_reasoning
    find_gaps(text, pieces)


def test_pieces_come_in_order_with_their_positions():
    assert parse_chunks("ab C cd") == [
        Content(text="ab", at=0),
        ToolCallStart(name="f"),
        ToolCallArguments(text="{}"),
        Content(text=" ", at=2),
        Content(text=" ", at=4),
        Content(text="cd", at=5),
    ]
    assert parse_chunks("T a S b") == [Reasoning(text="a", at=2), Content(text="b", at=6)]


@given(st.text(alphabet="TSCMab \n", max_size=30), st.lists(st.integers(0, 30), max_size=8))
def test_pieces_do_not_depend_on_chunk_boundaries(text, positions):
    positions = [position for position in positions if position <= len(text)]
    assert merge_pieces(parse_chunks(*split_at(text, positions))) == merge_pieces(
        parse_chunks(text)
    )
    # only markers and white space are removed
    assert all(not gap.strip(" \nTSCM") for gap in find_gaps(text, parse_chunks(text)))


@given(st.text(alphabet="ab \n", max_size=30))
def test_text_without_markers_is_unchanged(text):
    assert join_content(parse_chunks(*text)) == text


def test_unambiguous_text_is_emitted_at_once_and_the_rest_is_held_back():
    parser = OutputParser(_parse)
    assert parser.feed("ab ") == [Content(text="ab", at=0)]
    assert parser.settled == 2
    assert parser.feed("c") == [Content(text=" ", at=2), Content(text="c", at=3)]
    assert parser.settled == 4
    assert parser.flush() == []


@given(
    st.lists(st.sampled_from(("<|x|>", "<|", "|>", "<t>", "</t>", "a", " ", "C", "S", "T"))),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_hidden_markers_are_removed_from_any_chunks(parts, positions):
    text = "".join(parts)
    hidden = ("<|x|>", "<t>", "</t>")

    def parse(*chunks: str) -> list[OutputPart]:
        parser = OutputParser(_parse, hidden=hidden, tags=ReasoningTags(open="<t>", close="</t>"))
        return [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.flush()

    pieces = parse(text)
    for shown in (join_content(pieces), join_reasoning(pieces)):
        assert not any(mark in shown for mark in hidden)
    chunks = split_at(text, [position for position in positions if position <= len(text)])
    assert merge_pieces(parse(*chunks)) == merge_pieces(pieces)


@rows(
    ("text", "expected_content", "expected_reasoning"),
    [
        ("a<t>b</t>c", "ac", "b"),
        ("a<t>bCc</t>d", "acd", "b"),  # a call ends the reasoning
        ("a</t>b", "ab", ""),
        ("a<t>b", "a", "b"),
    ],
)
def test_text_between_hidden_reasoning_tags_is_reasoning(
    text, expected_content, expected_reasoning
):
    tags = ReasoningTags(open="<t>", close="</t>")
    parser = OutputParser(_parse, hidden=("<t>", "</t>"), tags=tags)
    pieces = [*parser.feed(text), *parser.flush()]
    assert (join_content(pieces), join_reasoning(pieces)) == (expected_content, expected_reasoning)


def test_reasoning_tags_are_recognized_after_a_marker_and_are_text_elsewhere():
    tags = ReasoningTags(open="<t>", close="</t>")
    parser = OutputParser(_parse, tags=tags)
    pieces = [*parser.feed("a<t>b C <t> c </t> d</t>"), *parser.flush()]
    assert join_reasoning(pieces) == "c"
    assert join_content(pieces) == "a<t>b d</t>"


def test_a_parser_that_does_not_read_to_the_end_is_a_programming_error():
    def lazy(reader: Reader, pieces: OutputBuilder) -> Resumable[None]:
        yield from reader.peek()

    parser = OutputParser(lazy)
    with pytest.raises(AssertionError, match="ended too early"):
        parser.feed("a")
