"""Checks that are the same for every family whose calls stand between tags."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from app.core.requests import Tool
from app.text.syntax.tagged_family import TaggedFamily
from tests.text.families.reading import Call, calls, check_text, content
from tests.text.families.rows import ANY, Row
from tests.text.families.walking import (
    FORMS,
    NOW,
    TYPES,
    WEATHER,
    Walk,
    arguments_of,
    check_walks,
    spell,
)

TOOLS = (WEATHER, NOW, TYPES)


def offered(rows: Iterable[Row]) -> Iterator[Row]:
    """Sources that read calls without asking for tools do not name any."""
    return (row if row.tools or not row.calls else replace(row, tools=(ANY,)) for row in rows)


def calls_in(family: TaggedFamily, text: str, *, tools: Sequence[Tool] = TOOLS) -> list[Call]:
    """Those of a text that holds nothing else."""
    pieces = check_text(family, text, tools=tools)
    assert content(pieces) == ""
    return calls(pieces)


def check_syntax(family: TaggedFamily, rows: Sequence[Row], *, begin: str | None = None) -> None:
    """What the family's grammar produces is read back as calls that satisfy their schemas; it
    accepts what models write from `begin` on, mostly the tag. Calls whose strings must be of a
    certain form are JSON, but there is no grammar of those where one tag is around all calls."""
    check_walks(family, TOOLS, endings=[family.call_tags.value_suffix])
    assert rows
    for row in rows:
        start = row.output.index(begin or family.call_tags.before)
        assert Walk(family, row.tools).accepts(row.output[start:].rstrip()), row.id
    if family.call_tags.grouped:
        assert family.build_tool_call_grammar([WEATHER, FORMS], spell, arguments_of) is None
    else:
        check_walks(family, (WEATHER, FORMS), endings=[family.call_tags.value_suffix])
