"""Text that is read as it arrives, by code that is written as if it were all there."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.syntax.reader import Reader, Resumable
from tests.text.families.reading import cut

MARKS = ("<a>", "<ab>", "<a", "b>", "\n\n")


def run(chunks: Iterable[str], parse: Callable[[Reader], Resumable[Any]]) -> tuple[Any, str]:
    """What the parser says of a text that arrives so, and what it left."""
    reader = Reader()
    parser = parse(reader)
    try:
        next(parser)
        for chunk in chunks:
            reader.push(chunk)
            next(parser)
        reader.end()
        while True:
            next(parser)
    except StopIteration as stop:
        rest = "".join(chunks)[reader.at :]
        assert rest.startswith(reader.ahead)
        return stop.value, rest


texts = st.lists(st.sampled_from((*MARKS, "<", ">", "a", "b", " ", "\n", "é"))).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(texts)
    return text, cut(text, draw(st.lists(st.integers(0, len(text)))))


@given(cut_texts())
def test_text_until_a_mark_is_handed_on_whole_and_the_mark_is_taken(given_):
    text, chunks = given_
    handed: list[tuple[str, int]] = []

    def parse(reader: Reader) -> Resumable[str | None]:
        return (
            yield from reader.read_until(*MARKS, on_text=lambda text, at: handed.append((text, at)))
        )

    mark, rest = run(chunks, parse)
    # of two marks that begin together the longer one counts
    found = re.search("<ab>|<a>|<a|b>|\n\n", text)
    assert mark == (found and found[0])
    before = text[: found.start()] if found else text
    assert "".join(piece for piece, _ in handed) == before
    assert all(text[at : at + len(piece)] == piece for piece, at in handed)
    assert rest == (text[found.end() :] if found else "")


def test_what_can_be_no_part_of_a_mark_is_handed_on_at_once():
    handed: list[str] = []
    reader = Reader()
    parser = reader.read_until("<call>", "</call>", on_text=lambda text, _: handed.append(text))
    for chunk, so_far in (("a <", "a "), ("c", "a "), ("at", "a <cat"), (" </call", "a <cat ")):
        reader.push(chunk)
        next(parser)
        assert "".join(handed) == so_far


@given(cut_texts())
def test_a_mark_that_is_not_to_be_taken_is_left(given_):
    text, chunks = given_

    def parse(reader: Reader) -> Resumable[str | None]:
        return (yield from reader.read_before(*MARKS, on_text=lambda text, _: None))

    mark, rest = run(chunks, parse)
    assert rest.startswith(mark or "")
    assert (mark is None) == (re.search("<a|b>|\n\n", text) is None)


@given(cut_texts())
def test_it_is_told_which_of_some_texts_comes_the_longest_one(given_):
    text, chunks = given_

    def parse(reader: Reader) -> Resumable[tuple[str | None, str | None]]:
        met = yield from reader.peek_any(*MARKS)
        return met, (yield from reader.accept(*MARKS))

    (met, accepted), rest = run(chunks, parse)
    assert met == accepted
    assert met == max((mark for mark in MARKS if text.startswith(mark)), key=len, default=None)
    assert rest == text[len(met or "") :]


@given(cut_texts())
def test_white_space_is_taken_as_far_as_it_goes(given_):
    text, chunks = given_
    space, rest = run(chunks, lambda reader: reader.skip_space())
    assert space + rest == text
    assert rest == text.lstrip()


@given(cut_texts())
def test_a_pattern_matches_as_much_as_there_is_and_takes_nothing(given_):
    text, chunks = given_
    found = re.match(r"<[<ab]*", text)
    assert run(chunks, lambda reader: reader.match(re.compile(r"<[<ab]*"))) == (
        found[0] if found else "",
        text,
    )


@pytest.mark.parametrize(("length", "found"), [(4096, 4096), (4097, 0)])
@pytest.mark.parametrize("end", ["", "!"])
def test_a_word_that_does_not_end_is_none(length, found, end):
    """Matched again with every piece of it, 80,000 letters behind a marker took 17 seconds."""
    text = "a" * length + end
    for chunks in ([text], list(text)):
        word, _ = run(chunks, lambda reader: reader.match(re.compile("a+")))
        assert len(word) == found


@given(cut_texts())
def test_a_text_can_be_read_again_from_where_it_was_held(given_):
    text, chunks = given_

    def parse(reader: Reader) -> Resumable[tuple[str, str]]:
        _, mark = yield from reader.read_text_until("b")
        held = reader.hold()
        first, _ = yield from reader.read_text_until()
        # the mark in front of it may turn out to be text as well
        assert reader.settled == held - len(mark or "")
        reader.rewind(held)
        again, _ = yield from reader.read_text_until()
        return first, again

    (first, again), rest = run(chunks, parse)
    assert first == again == text.partition("b")[2]
    assert not rest


def test_at_the_end_there_is_no_next_character():
    assert run([], lambda reader: reader.peek()) == ("", "")
    assert run(["", "a"], lambda reader: reader.peek()) == ("a", "a")
    assert run(["a"], lambda reader: reader.wait_for_more()) == (True, "a")
    assert run([], lambda reader: reader.wait_for_more()) == (False, "")


def test_text_that_was_taken_is_forgotten_unless_it_is_held():
    reader = Reader()
    reader.push("abc")
    reader.take(2)
    held = reader.hold()
    reader.take(1)
    reader.push("def")
    reader.rewind(held)
    assert reader.ahead == "cdef"
    reader.take(4)
    with pytest.raises(AssertionError):
        reader.rewind(held)
