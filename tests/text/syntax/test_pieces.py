"""What an answer is made of, and the white space beside markers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.syntax.pieces import Arguments, Called, Piece, Pieces, Said, Splitter, Thought
from app.text.syntax.reader import Reader, Wait
from tests.text.families.reading import content, cut, gaps, joined, reasoning


def _parse(reader: Reader, pieces: Pieces) -> Wait[None]:
    """A language of one letter markers: T thinks, S speaks, C calls, M is nothing but a marker."""
    take = pieces.say
    while (mark := (yield from reader.until("T", "S", "C", "M", take=take))) is not None:
        match mark:
            case "T" | "S":
                pieces.mark()
                take = pieces.think if mark == "T" else pieces.say
            case "C":
                pieces.call("f")
                pieces.arguments("{}")
                pieces.mark()
            case _:
                pieces.mark()


def split(*chunks: str) -> list[Piece]:
    splitter = Splitter(_parse)
    return [piece for chunk in chunks for piece in splitter.feed(chunk)] + splitter.flush()


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
        Said(text="ab", at=0),
        Called(name="f"),
        Arguments(text="{}"),
        Said(text="cd", at=5),
    ]
    assert split("T a S b") == [Thought(text="a", at=2), Said(text="b", at=6)]


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
    splitter = Splitter(_parse)
    assert splitter.feed("ab ") == [Said(text="ab", at=0)]
    assert splitter.settled == 2
    assert splitter.feed("c") == [Said(text=" ", at=2), Said(text="c", at=3)]
    assert splitter.settled == 4
    assert splitter.flush() == []


def test_a_parser_that_does_not_read_to_the_end_is_our_mistake():
    def lazy(reader: Reader, pieces: Pieces) -> Wait[None]:
        yield from reader.peek()

    splitter = Splitter(lazy)
    with pytest.raises(AssertionError, match="ended too early"):
        splitter.feed("a")
