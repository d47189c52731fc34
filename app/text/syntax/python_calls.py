"""Calls as Python writes them, `get_weather(city="Oslo", days=3)`, as they are being written.

Knows: how a call and its arguments are written, and what holds them to a schema. Must not know:
what stands around the calls, which is a family's affair; how values are written.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from app.core.requests import CalledTool, Tool
from app.text.family import CallSyntax, Json, Spell
from app.text.syntax.call_list import call_list
from app.text.syntax.call_object import Outcome
from app.text.syntax.keyword_rules import Rules, keyword_rules, standing_alone
from app.text.syntax.nested_values import nested_pairs
from app.text.syntax.pieces import Pieces
from app.text.syntax.python_values import PYTHON, written
from app.text.syntax.reader import Reader, Wait

_NAME = re.compile(r"[^\W\d][\w.-]*")


def python_list(
    reader: Reader, pieces: Pieces, *, names: Collection[str] | None = None
) -> Wait[Outcome]:
    """Read `[f(…), g(…)]`, as `call_list`. names, and what the caller does before and after: as
    `call_object`."""
    return (yield from call_list(reader, pieces, partial(python_call, names=names)))


def python_calls(
    reader: Reader, pieces: Pieces, *, names: Collection[str] | None = None
) -> Wait[Outcome]:
    """Read `f(…)`, and others behind commas or white space; else as `python_list`."""
    outcome = yield from python_call(reader, pieces, names=names)
    while outcome == "whole":
        held = reader.hold()
        yield from reader.space()
        yield from reader.accept(",")
        outcome = yield from python_call(reader, pieces, names=names)
        if outcome == "none":
            reader.rewind(held)
            return "whole"
    return outcome


def python_call(
    reader: Reader, pieces: Pieces, *, names: Collection[str] | None = None, method: str = ""
) -> Wait[Outcome]:
    """Read one call, white space before it skipped. Its arguments are by name, each converted as it
    comes. method: what may stand behind a name and is no part of it."""
    yield from reader.space()
    written = yield from reader.match(_NAME)
    name = written.removesuffix(method)
    if not name or (names is not None and name not in names):
        return "none"
    reader.take(len(written))
    if (yield from reader.accept("(")) is None:
        return "none"
    pieces.call(name)
    reader.release()
    pieces.arguments("{")
    whole = yield from nested_pairs(PYTHON, reader, pieces.arguments, key=_keyword, close=")")
    return "whole" if whole else "broken"


def python_syntax(
    tools: Sequence[Tool],
    spell: Spell,
    json_of: Json,
    *,
    before: str,
    between: str,
    after: str,
    trigger: str,
) -> CallSyntax | None:
    """As `ChatFamily.syntax`, with these texts around the calls. None where a schema asks for more
    than names and values of parameters. JSON's values are Python's to `python_call`, so that the
    grammar of JSON holds each to its schema."""
    calls: list[str] = []
    rules: list[str] = []
    for place, tool in enumerate(tools):
        arguments = _argument_rules(tool, spell, json_of, prefix=f"tool{place}arg")
        if arguments is None or not _NAME.fullmatch(tool.name):
            return None
        calls.append(f"{spell(f'{tool.name}(')} {arguments.expression} {spell(')')}")
        rules += arguments.rules
    return CallSyntax(
        before=spell(before),
        calls=tuple(calls),
        between=spell(between),
        after=spell(after),
        trigger=trigger,
        rules="\n".join(rules),
    )


def written_call(call: CalledTool) -> str:
    """One call, whose arguments must be a JSON object."""
    arguments: dict[str, Any] = json.loads(call.arguments.strip() or "{}")
    pairs = (f"{name}={written(value)}" for name, value in arguments.items())
    return f"{call.name}({', '.join(pairs)})"


def _argument_rules(tool: Tool, spell: Spell, json_of: Json, *, prefix: str) -> Rules | None:
    root = tool.parameters

    def pair(name: str, schema: Any) -> str | None:
        value = standing_alone(schema, root)
        if value is None or not _NAME.fullmatch(name):
            return None
        return f"{spell(f'{name}=')} {json_of(replace(tool, parameters=value))}"

    return keyword_rules(root, prefix, between=spell(", "), pair=pair)


def _keyword(reader: Reader) -> Wait[str | None]:
    held = reader.hold()
    name = yield from reader.match(_NAME)
    reader.take(len(name))
    yield from reader.space()
    if not name or (yield from reader.accept("=")) is None:
        reader.rewind(held)
        return None
    reader.release()
    return json.dumps(name, ensure_ascii=False)
