"""Checks for all families with calls between tags."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from app.core.requests import Tool
from app.text.syntax.tagged_calls import TaggedFamily
from tests.text.families.reading import Call, check_text, collect_calls, join_content
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


def add_default_tools(rows: Iterable[Row]) -> Iterator[Row]:
    """Adds a tool to rows with calls but without tools, from sources that do not require tools."""
    return (row if row.tools or not row.calls else replace(row, tools=(ANY,)) for row in rows)


def parse_calls(family: TaggedFamily, text: str, *, tools: Sequence[Tool] = TOOLS) -> list[Call]:
    """The calls in text without content."""
    pieces = check_text(family, text, tools=tools)
    assert join_content(pieces) == ""
    return collect_calls(pieces)


def check_syntax(family: TaggedFamily, rows: Sequence[Row], *, begin: str | None = None) -> None:
    """Output of the family's grammar is parsed as calls that satisfy their schemas, and the grammar
    accepts the outputs of models from `begin` on, usually the tag. Calls with string patterns are
    JSON; if one tag encloses all calls, they have no grammar."""
    check_walks(family, TOOLS, endings=[family.call_tags.value_suffix])
    assert rows
    for row in rows:
        start = row.output.index(begin or family.call_tags.before)
        assert Walk(family, row.tools).accepts(row.output[start:].rstrip()), row.id
    if family.call_tags.grouped:
        assert family.build_tool_call_grammar([WEATHER, FORMS], spell, arguments_of) is None
    else:
        check_walks(family, (WEATHER, FORMS), endings=[family.call_tags.value_suffix])
