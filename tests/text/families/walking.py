"""Random walks through what a family's `syntax` allows, for a check that the family reads it back.

They go a byte at a time, so that they need no model's tokenizer; markers are text in them.
"""

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import jsonschema_rs
from llguidance import LLMatcher, LLTokenizer

from app.core.requests import Tool
from app.grammar.constraint import ToolCallGrammar
from app.text.family import ChatFamily
from tests.text.families.reading import calls, check_text, content
from tests.text.families.rows import Row


def _tool(name: str, *required: str, **properties: Any) -> Tool:
    return Tool(
        name=name,
        description=None,
        parameters={
            "type": "object",
            "properties": properties,
            "required": list(required),
            "additionalProperties": False,
        },
    )


WEATHER = _tool(
    "get_weather",
    "city",
    city={"type": "string"},
    unit={"enum": ["celsius", "fahrenheit"]},
    days={"type": "integer"},
)

# nothing to say
NOW = _tool("now")

TYPES = _tool(
    "all-types_2",
    *("text", "count", "share", "on", "tags", "more", "either"),
    text={"type": "string"},
    count={"type": "integer"},
    share={"type": "number"},
    on={"type": "boolean"},
    tags={"type": "array", "items": {"type": "string"}},
    more={
        "type": "object",
        "properties": {"x": {"type": ["string", "null"]}},
        "required": ["x"],
        "additionalProperties": False,
    },
    either={"anyOf": [{"type": "string"}, {"type": "integer"}]},
)

# strings that are held to a form
FORMS = _tool(
    "book",
    "code",
    "key",
    code={"type": "string", "pattern": "^[A-Z]{3}$"},
    key={"type": "string", "format": "uuid"},
)

TOOLS = (WEATHER, NOW, TYPES, FORMS)

# as `app/grammar/constraint.py` bounds white space, but narrower: walks are to be short
_OPTIONS = {"x-guidance": {"whitespace_pattern": "[ ]?"}}


def spell(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def arguments_of(tool: Tool) -> str:
    return f"%json {json.dumps({**tool.parameters, **_OPTIONS})}"


def grammar(syntax: ToolCallGrammar) -> str:
    """The Lark grammar of an answer that holds calls."""
    parts = [syntax.before, "call"]
    if syntax.between is not None:
        parts.append(f"({syntax.between} call)*")
    parts.append(syntax.after)
    rules = (f"start: {' '.join(filter(None, parts))}", f"call: {' | '.join(syntax.calls)}")
    return "\n".join((*rules, syntax.rules))


class Walk:
    """Through the syntax of these tools, which the family must have. endings: what ends free text,
    which would hardly come up by chance."""

    def __init__(
        self, family: ChatFamily, tools: Sequence[Tool], *, endings: Sequence[str] = ()
    ) -> None:
        self._endings = [list(ending.encode()) for ending in endings]
        syntax = family.build_tool_call_grammar(tools, spell, arguments_of)
        assert syntax is not None
        self._matcher = LLMatcher(LLTokenizer("byte"), grammar(syntax), log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def accepts(self, text: str) -> bool:
        """Whether the text is one that the syntax produces, from beginning to end."""
        self._matcher.reset()
        ids = list(text.encode())
        return self._matcher.try_consume_tokens(ids) == len(ids) and self._matcher.is_accepting()

    def text(self, draw: random.Random, *, most: int = 2000) -> str:
        """A text that it produces, of so many bytes at most."""
        self._matcher.reset()
        taken = bytearray()
        hurry = False
        while not (self._matcher.is_stopped() or self._ends(draw, hurry=hurry)):
            hurry = len(taken) > most // 2
            next = self._ending(draw, hurry=hurry) or [self._next(draw, hurry=hurry)]
            assert self._matcher.consume_tokens(next), self._matcher.get_error()
            taken.extend(next)
            assert len(taken) < most, taken
        return taken.decode()

    def _ends(self, draw: random.Random, *, hurry: bool) -> bool:
        return self._matcher.is_accepting() and (hurry or draw.random() < 0.4)

    def _ending(self, draw: random.Random, *, hurry: bool) -> list[int]:
        """Of free text, if this is some, now and then."""
        if draw.random() < (0.5 if hurry else 0.9):
            return []
        valid = [e for e in self._endings if self._matcher.validate_tokens(e) == len(e)]
        return draw.choice(valid) if valid else []

    def _next(self, draw: random.Random, *, hurry: bool) -> int:
        mask = self._matcher.compute_bitmask()
        allowed = [id for id in range(256) if mask[id // 8] >> id % 8 & 1]
        closing = [id for id in allowed if id in b'"]}<']
        if closing and (hurry or draw.random() < 0.25):
            return draw.choice(closing)
        # what marks something in one syntax or another comes up more often than by chance
        marking = [id for id in allowed if id in b"<>[]{}|\\\n\"'"]
        return draw.choice(marking if marking and draw.random() < 0.2 else allowed)


def check_walks(
    family: ChatFamily, tools: Sequence[Tool], *, times: int = 20, endings: Sequence[str] = ()
) -> None:
    """What the syntax produces is read back as calls of these tools, of each of them, whose
    arguments satisfy the schema, and as nothing else."""
    walk = Walk(family, tools, endings=endings)
    validators = {
        tool.name: jsonschema_rs.validator_for(dict(tool.parameters), validate_formats=True)
        for tool in tools
    }
    draw = random.Random(type(family).__module__)
    seen: set[str] = set()
    for _ in range(times):
        text = walk.text(draw)
        pieces = check_text(family, text, tools=tools)
        assert not content(pieces), text
        assert calls(pieces), text
        for call in calls(pieces):
            seen.add(call.name)
            arguments = json.loads(call.arguments, parse_float=_finite)
            assert validators[call.name].is_valid(arguments), text
    assert seen == set(validators)


def check_spelling(family: ChatFamily, rows: Iterable[Row], *, begin: str) -> None:
    """What templates write for these rows is what the syntax allows for their tools. begin: what
    calls begin with; more may stand before it."""
    for row in rows:
        at = row.output.index(begin)
        assert Walk(family, row.tools).accepts(row.output[at:]), row.id


def _finite(number: str) -> float:
    """JSON has numbers that Python takes for infinite."""
    return max(-1e300, min(float(number), 1e300))
