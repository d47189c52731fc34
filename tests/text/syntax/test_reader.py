"""The reader: parsers of a complete text run on streamed text."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.syntax.reader import Reader, Resumable
from tests.text.families.reading import split_at

MARKS = ("<a>", "<ab>", "<a", "b>", "\n\n")


def run(chunks: Iterable[str], parse: Callable[[Reader], Resumable[Any]]) -> tuple[Any, str]:
    """The result of the parser for text in these chunks, and the rest of the text."""
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
    return text, split_at(text, draw(st.lists(st.integers(0, len(text)))))


@given(cut_texts())
def test_read_until_passes_on_the_text_and_consumes_the_mark(case):
    text, chunks = case
    output: list[tuple[str, int]] = []

    def parse(reader: Reader) -> Resumable[str | None]:
        return (
            yield from reader.read_until(*MARKS, on_text=lambda text, at: output.append((text, at)))
        )

    mark, rest = run(chunks, parse)
    # of two marks with one start the longer one wins
    expected = re.search("<ab>|<a>|<a|b>|\n\n", text)
    assert mark == (expected and expected[0])
    before = text[: expected.start()] if expected else text
    assert "".join(piece for piece, _ in output) == before
    assert all(text[at : at + len(piece)] == piece for piece, at in output)
    assert rest == (text[expected.end() :] if expected else "")


def test_text_that_cannot_be_part_of_a_mark_is_passed_on_at_once():
    output: list[str] = []
    reader = Reader()
    parser = reader.read_until("<call>", "</call>", on_text=lambda text, _: output.append(text))
    for chunk, so_far in (("a <", "a "), ("c", "a "), ("at", "a <cat"), (" </call", "a <cat ")):
        reader.push(chunk)
        next(parser)
        assert "".join(output) == so_far


@given(cut_texts())
def test_read_before_does_not_consume_the_mark(case):
    text, chunks = case

    def parse(reader: Reader) -> Resumable[str | None]:
        return (yield from reader.read_before(*MARKS, on_text=lambda text, _: None))

    mark, rest = run(chunks, parse)
    assert rest.startswith(mark or "")
    assert (mark is None) == (re.search("<a|b>|\n\n", text) is None)


@given(cut_texts())
def test_peek_any_returns_the_longest_match(case):
    text, chunks = case

    def parse(reader: Reader) -> Resumable[tuple[str | None, str | None]]:
        peeked = yield from reader.peek_any(*MARKS)
        return peeked, (yield from reader.accept(*MARKS))

    (peeked, accepted), rest = run(chunks, parse)
    assert peeked == accepted
    assert peeked == max((mark for mark in MARKS if text.startswith(mark)), key=len, default=None)
    assert rest == text[len(peeked or "") :]


@given(cut_texts())
def test_skip_space_consumes_all_white_space(case):
    text, chunks = case
    space, rest = run(chunks, lambda reader: reader.skip_space())
    assert space + rest == text
    assert rest == text.lstrip()


@given(cut_texts())
def test_match_is_greedy_and_consumes_nothing(case):
    text, chunks = case
    expected = re.match(r"<[<ab]*", text)
    assert run(chunks, lambda reader: reader.match(re.compile(r"<[<ab]*"))) == (
        expected[0] if expected else "",
        text,
    )


@pytest.mark.parametrize(("length", "expected"), [(4096, 4096), (4097, 0)])
@pytest.mark.parametrize("end", ["", "!"])
def test_the_length_of_a_match_is_limited(length, expected, end):
    """Without the limit, 80,000 letters after a marker took 17 s: each chunk was matched again."""
    text = "a" * length + end
    for chunks in ([text], list(text)):
        word, _ = run(chunks, lambda reader: reader.match(re.compile("a+")))
        assert len(word) == expected


@given(cut_texts())
def test_text_can_be_read_again_after_a_rewind(case):
    text, chunks = case

    def parse(reader: Reader) -> Resumable[tuple[str, str]]:
        _, mark = yield from reader.read_text_until("b")
        position = reader.hold()
        first, _ = yield from reader.read_text_until()
        # the mark before it may also turn out to be text
        assert reader.settled == position - len(mark or "")
        reader.rewind(position)
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


def test_consumed_text_is_dropped_unless_it_is_held():
    reader = Reader()
    reader.push("abc")
    reader.take(2)
    position = reader.hold()
    reader.take(1)
    reader.push("def")
    reader.rewind(position)
    assert reader.ahead == "cdef"
    reader.take(4)
    with pytest.raises(AssertionError):
        reader.rewind(position)
