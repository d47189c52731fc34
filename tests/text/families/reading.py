"""The checks that every chat family has to stand: what it must find in a text, however that text
was cut, and what it may do to the characters of any text.

A family's test takes its rows from `rows.py`, reads them with `check_row`, reads random texts with
`check_text`, and what its own grammar produces with `walking.py`.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from app.core.requests import Tool
from app.grammar.constraint import ReasoningTags
from app.text.family import ChatFamily
from app.text.syntax.output_parser import (
    Content,
    OutputPart,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from tests.text.families.rows import Row

# Each costs a reading of the whole; character by character, a row is read in any case.
MOST_PARTINGS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    name: str
    id: str | None
    arguments: str


def read(
    family: ChatFamily,
    chunks: Iterable[str],
    *,
    tools: Sequence[Tool],
    tags: ReasoningTags | None = None,
    in_reasoning: bool = False,
) -> list[OutputPart]:
    """What a family finds in a text that arrives so."""
    parser = family.build_parser(tools=tools, tags=tags, in_reasoning=in_reasoning)
    return [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.flush()


def content(pieces: Iterable[OutputPart]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def reasoning(pieces: Iterable[OutputPart]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))


def calls(pieces: Iterable[OutputPart]) -> list[Call]:
    found: list[Call] = []
    for piece in pieces:
        match piece:
            case ToolCallStart():
                found.append(Call(name=piece.name, id=piece.id, arguments=""))
            case ToolCallArguments():
                found[-1] = replace(found[-1], arguments=found[-1].arguments + piece.text)
            case _:
                pass
    return found


def joined(pieces: Iterable[OutputPart]) -> list[tuple[type[OutputPart], str, str | None]]:
    """Pieces without their cuts: what is the same however the text was cut."""
    whole: list[tuple[type[OutputPart], str, str | None]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallStart):
            whole.append((ToolCallStart, piece.name, piece.id))
        elif whole and whole[-1][0] is type(piece):
            whole[-1] = (type(piece), whole[-1][1] + piece.text, None)
        else:
            whole.append((type(piece), piece.text, None))
    return whole


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces that end at these places."""
    return [text[start:end] for start, end in pairwise(sorted({0, len(text), *places}))]


def random_cuts(text: str, *, times: int) -> Iterator[list[str]]:
    """The same ones for the same text."""
    draw = random.Random(text)
    for _ in range(times):
        count = draw.randrange(1, 2 + len(text) // 3)
        yield cut(text, (draw.randrange(len(text) + 1) for _ in range(count)))


def gaps(text: str, pieces: Iterable[OutputPart]) -> list[str]:
    """What of the text is neither content nor reasoning: markers, calls, white space beside them.
    Those in it must be verbatim slices of it, in order and without overlap."""
    found: list[str] = []
    last = 0
    for piece in pieces:
        if isinstance(piece, Content | Reasoning):
            assert piece.text
            assert piece.at >= last, (piece, text)
            found.append(text[last : piece.at])
            last = piece.at + len(piece.text)
            assert text[piece.at : last] == piece.text, (piece, text)
    return [gap for gap in (*found, text[last:]) if gap]


def check_row(family: ChatFamily, row: Row) -> None:
    """The family claims the row's template and finds in its output what is expected: whole,
    character by character, in two pieces that part wherever they may, and in random pieces."""
    assert row.template is None or family.matches(row.template), row.id
    tags = family.reasoning_tags(row.template or "<think></think>") if row.tagged else None
    in_reasoning = row.in_reasoning
    if in_reasoning is None:
        in_reasoning = tags is not None and family.ends_in_reasoning(row.prompt, tags)
    pieces = check_text(family, row.output, tools=row.tools, tags=tags, in_reasoning=in_reasoning)
    if row.content is not None:
        assert content(pieces) == row.content, row.id
    if row.reasoning is not None:
        assert reasoning(pieces) == row.reasoning, row.id
    if row.calls is not None:
        found = calls(pieces)
        assert [call.name for call in found] == [call["name"] for call in row.calls], row.id
        for call, expected in zip(found, row.calls, strict=True):
            _check_call(call, expected, row.id)
    whole = joined(pieces)
    for place in _partings(row):
        chunks = cut(row.output, [place])
        again = read(family, chunks, tools=row.tools, tags=tags, in_reasoning=in_reasoning)
        assert joined(again) == whole, (row.id, chunks)


def _partings(row: Row) -> Sequence[int]:
    """Where a row is cut in two: everywhere, or in as many places of a long one. Sources repeat
    each other's outputs; each repetition is cut elsewhere."""
    places = range(1, len(row.output))
    if len(places) <= MOST_PARTINGS:
        return places
    return random.Random(row.id).sample(places, MOST_PARTINGS)


def check_text(
    family: ChatFamily,
    text: str,
    *,
    tools: Sequence[Tool],
    tags: ReasoningTags | None = None,
    in_reasoning: bool = False,
    syntax: Sequence[str] = (),
) -> list[OutputPart]:
    """Any text can be read, however it is cut with the same result, and what is said and thought
    are slices of it. syntax: where given, nothing but white space is taken away without one of
    these in it. What was found in the whole."""
    pieces = read(family, [text], tools=tools, tags=tags, in_reasoning=in_reasoning)
    whole = joined(pieces)
    for gap in gaps(text, pieces):
        assert not syntax or not gap.strip() or any(mark in gap for mark in syntax), (gap, text)
    for chunks in (list(text), *random_cuts(text, times=3)):
        again = read(family, chunks, tools=tools, tags=tags, in_reasoning=in_reasoning)
        assert joined(again) == whole, chunks
        gaps(text, again)
    return pieces


def check_prose(
    family: ChatFamily, text: str, *, tools: Sequence[Tool], tags: ReasoningTags | None = None
) -> None:
    """A text without markers is what is said, every character of it."""
    pieces = check_text(family, text, tools=tools, tags=tags)
    assert content(pieces) == text
    assert all(isinstance(piece, Content) for piece in pieces)


def _check_call(call: Call, expected: Mapping[str, Any], id: str) -> None:
    if expected.get("id"):
        assert call.id == expected["id"], id
    if "arguments_text" in expected:
        assert call.arguments == expected["arguments_text"], id
    if "arguments" in expected:
        # as text, so that 1, 1.0 and true differ
        found = json.dumps(json.loads(call.arguments), sort_keys=True)
        assert found == json.dumps(expected["arguments"], sort_keys=True), id


_JSON = (
    '{"',
    '"}',
    '{"name": "get_weather", ',
    '"arguments": ',
    '{"city": "Oslo"}',
    "{}",
    "[",
    "]",
)
_BROKEN = ("}", ",", ":", '"', "\\", "[{", '"name"', "get_weather", "null", "-1.5e3", '{"a": [1, "')
_PROSE = ("Hello", " ", "\n", "\n\n", "3 < 4 ", "<", ">", "[", "日本", "🙂", "e\u0301", "\t", "|")


def mixtures(*markers: str) -> st.SearchStrategy[str]:
    """Texts of these markers, whole and in part, of bits of JSON and of prose, in any order."""
    parts = [marker[:size] for marker in markers for size in (1, len(marker) // 2) if size]
    piece = st.one_of(
        st.sampled_from(markers or _PROSE),
        st.sampled_from((*_JSON, *_BROKEN)),
        st.sampled_from((*_PROSE, *parts)),
    )
    return st.lists(piece, max_size=14).map("".join)


def prose(*markers: str) -> st.SearchStrategy[str]:
    """Texts that hold none of these markers."""
    return st.text(max_size=60).filter(lambda text: not any(mark in text for mark in markers))
