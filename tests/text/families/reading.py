"""Checks for every chat family: the parts that it must find in a text, for any chunks of the text,
and the characters that it may remove.

A family's test takes its rows from `rows.py`, reads them with `check_row`, reads random texts with
`check_text`, and the output of its grammar with `walking.py`.
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

# Each split parses the full text. Every row is also parsed character by character.
MAX_SPLITS = 40


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
    """The parts that a family finds in a text that arrives in these chunks."""
    parser = family.build_parser(tools=tools, tags=tags, in_reasoning=in_reasoning)
    return [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.flush()


def join_content(pieces: Iterable[OutputPart]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def join_reasoning(pieces: Iterable[OutputPart]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))


def collect_calls(pieces: Iterable[OutputPart]) -> list[Call]:
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


def merge_pieces(pieces: Iterable[OutputPart]) -> list[tuple[type[OutputPart], str, str | None]]:
    """Adjacent pieces of one type are merged, so the result does not depend on the chunks."""
    merged: list[tuple[type[OutputPart], str, str | None]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallStart):
            merged.append((ToolCallStart, piece.name, piece.id))
        elif merged and merged[-1][0] is type(piece):
            merged[-1] = (type(piece), merged[-1][1] + piece.text, None)
        else:
            merged.append((type(piece), piece.text, None))
    return merged


def split_at(text: str, positions: Iterable[int]) -> list[str]:
    """The text in chunks that end at these positions."""
    return [text[start:end] for start, end in pairwise(sorted({0, len(text), *positions}))]


def random_chunks(text: str, *, times: int) -> Iterator[list[str]]:
    """Random chunks, the same for the same text."""
    rng = random.Random(text)
    for _ in range(times):
        count = rng.randrange(1, 2 + len(text) // 3)
        yield split_at(text, (rng.randrange(len(text) + 1) for _ in range(count)))


def find_gaps(text: str, pieces: Iterable[OutputPart]) -> list[str]:
    """The parts of the text that are neither content nor reasoning: markers, calls, and white space
    next to them. Content and reasoning must be slices of the text, in order and without overlap."""
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
    """The family claims the template of the row and finds the expected parts in its output: as one
    text, by character, in two chunks with any split, and in random chunks."""
    assert row.template is None or family.matches(row.template), row.id
    tags = family.reasoning_tags(row.template or "<think></think>") if row.tagged else None
    in_reasoning = row.in_reasoning
    if in_reasoning is None:
        in_reasoning = tags is not None and family.ends_in_reasoning(row.prompt, tags)
    pieces = check_text(family, row.output, tools=row.tools, tags=tags, in_reasoning=in_reasoning)
    if row.content is not None:
        assert join_content(pieces) == row.content, row.id
    if row.reasoning is not None:
        assert join_reasoning(pieces) == row.reasoning, row.id
    if row.calls is not None:
        found = collect_calls(pieces)
        assert [call.name for call in found] == [call["name"] for call in row.calls], row.id
        for call, expected in zip(found, row.calls, strict=True):
            _check_call(call, expected, row.id)
    expected = merge_pieces(pieces)
    for position in _split_positions(row):
        chunks = split_at(row.output, [position])
        result = read(family, chunks, tools=row.tools, tags=tags, in_reasoning=in_reasoning)
        assert merge_pieces(result) == expected, (row.id, chunks)


def _split_positions(row: Row) -> Sequence[int]:
    """The positions of splits: all, or a sample in a long output. Sources repeat outputs of other
    sources; each repetition has different positions."""
    positions = range(1, len(row.output))
    if len(positions) <= MAX_SPLITS:
        return positions
    return random.Random(row.id).sample(positions, MAX_SPLITS)


def check_text(
    family: ChatFamily,
    text: str,
    *,
    tools: Sequence[Tool],
    tags: ReasoningTags | None = None,
    in_reasoning: bool = False,
    syntax: Sequence[str] = (),
) -> list[OutputPart]:
    """Any text can be parsed, with one result for all chunks, and content and reasoning are slices
    of it. syntax: if given, each removed part contains one of these or only white space. Returns
    the pieces of the full text."""
    pieces = read(family, [text], tools=tools, tags=tags, in_reasoning=in_reasoning)
    expected = merge_pieces(pieces)
    for gap in find_gaps(text, pieces):
        marks = (*syntax, *family.markers)
        assert not syntax or not gap.strip() or any(mark in gap for mark in marks), (gap, text)
    for chunks in (list(text), *random_chunks(text, times=3)):
        result = read(family, chunks, tools=tools, tags=tags, in_reasoning=in_reasoning)
        assert merge_pieces(result) == expected, chunks
        find_gaps(text, result)
    return pieces


def check_prose(
    family: ChatFamily, text: str, *, tools: Sequence[Tool], tags: ReasoningTags | None = None
) -> None:
    """A text without calls is all content. Only markers that can only be special tokens, and white
    space next to them at the start and end, are removed."""
    pieces = check_text(family, text, tools=tools, tags=tags)
    assert all(isinstance(piece, Content) for piece in pieces)
    plain = remove_markers(family, text)
    content = join_content(pieces)
    assert content == text if plain == text else content.strip() == plain.strip()


def remove_markers(family: ChatFamily, text: str) -> str:
    """A text without the markers that can only be special tokens."""
    for marker in family.markers:
        if "|" in marker or "｜" in marker or marker.strip("[]_/").isupper():
            text = text.replace(marker, "")
    return text


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
    """Texts of complete and partial markers, JSON fragments and prose, in any order."""
    parts = [marker[:size] for marker in markers for size in (1, len(marker) // 2) if size]
    piece = st.one_of(
        st.sampled_from(markers or _PROSE),
        st.sampled_from((*_JSON, *_BROKEN)),
        st.sampled_from((*_PROSE, *parts)),
    )
    return st.lists(piece, max_size=14).map("".join)


def prose(*markers: str) -> st.SearchStrategy[str]:
    """Texts without these markers."""
    return st.text(max_size=60).filter(lambda text: not any(mark in text for mark in markers))
