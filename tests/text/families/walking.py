"""Random walks through the grammar of a family, to check that the family parses the result.

A step of a walk is a byte, so no model's tokenizer is needed; markers are plain text.
"""

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import jsonschema_rs
from llguidance import LLMatcher, LLTokenizer

from app.core.requests import Tool
from app.grammar.constraint import ToolCallGrammar
from app.text.family import ChatFamily, load_families
from tests.text.families.reading import check_text, collect_calls, join_content
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

# without parameters
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

# strings with a pattern or a format
FORMS = _tool(
    "book",
    "code",
    "key",
    code={"type": "string", "pattern": "^[A-Z]{3}$"},
    key={"type": "string", "format": "uuid"},
)

TOOLS = (WEATHER, NOW, TYPES, FORMS)

# narrower than the white space of `app/grammar/constraint.py`, to keep walks short
_OPTIONS = {"x-guidance": {"whitespace_pattern": "[ ]?"}}


def spell(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def arguments_of(tool: Tool) -> str:
    return f"%json {json.dumps({**tool.parameters, **_OPTIONS})}"


def grammar(syntax: ToolCallGrammar) -> str:
    """The Lark grammar of an answer with calls."""
    parts = [syntax.before, "call"]
    if syntax.between is not None:
        parts.append(f"({syntax.between} call)*")
    parts.append(syntax.after)
    rules = (f"start: {' '.join(filter(None, parts))}", f"call: {' | '.join(syntax.calls)}")
    return "\n".join((*rules, syntax.rules))


class Walk:
    """Walks through the grammar of these tools, which the family must have. endings: texts that end
    free text, which are unlikely at random."""

    def __init__(
        self, family: ChatFamily, tools: Sequence[Tool], *, endings: Sequence[str] = ()
    ) -> None:
        self._endings = [list(ending.encode()) for ending in endings]
        syntax = family.build_tool_call_grammar(tools, spell, arguments_of)
        assert syntax is not None
        self._matcher = LLMatcher(LLTokenizer("byte"), grammar(syntax), log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def accepts(self, text: str) -> bool:
        """Whether the grammar accepts the complete text."""
        self._matcher.reset()
        ids = list(text.encode())
        return self._matcher.try_consume_tokens(ids) == len(ids) and self._matcher.is_accepting()

    def text(self, rng: random.Random, *, max_bytes: int = 2000) -> str:
        """A random text of the grammar, of less than `max_bytes` bytes."""
        self._matcher.reset()
        output = bytearray()
        hurry = False
        while not (self._matcher.is_stopped() or self._should_stop(rng, hurry=hurry)):
            hurry = len(output) > max_bytes // 2
            step = self._sample_ending(rng, hurry=hurry) or [self._sample_byte(rng, hurry=hurry)]
            assert self._matcher.consume_tokens(step), self._matcher.get_error()
            output.extend(step)
            assert len(output) < max_bytes, output
        return output.decode()

    def _should_stop(self, rng: random.Random, *, hurry: bool) -> bool:
        return self._matcher.is_accepting() and (hurry or rng.random() < 0.4)

    def _sample_ending(self, rng: random.Random, *, hurry: bool) -> list[int]:
        """Sometimes an ending of free text, where one is allowed."""
        if rng.random() < (0.5 if hurry else 0.9):
            return []
        valid = [e for e in self._endings if self._matcher.validate_tokens(e) == len(e)]
        return rng.choice(valid) if valid else []

    def _sample_byte(self, rng: random.Random, *, hurry: bool) -> int:
        mask = self._matcher.compute_bitmask()
        allowed = [id for id in range(256) if mask[id // 8] >> id % 8 & 1]
        closing = [id for id in allowed if id in b'"]}<']
        if closing and (hurry or rng.random() < 0.25):
            return rng.choice(closing)
        # characters of markers are more frequent than at random
        markers = [id for id in allowed if id in b"<>[]{}|\\\n\"'"]
        return rng.choice(markers if markers and rng.random() < 0.2 else allowed)


def check_walks(
    family: ChatFamily, tools: Sequence[Tool], *, times: int = 20, endings: Sequence[str] = ()
) -> None:
    """Output of the grammar is parsed as calls of all these tools, with arguments that satisfy the
    schema, and without content."""
    walk = Walk(family, tools, endings=endings)
    validators = {
        tool.name: jsonschema_rs.validator_for(dict(tool.parameters), validate_formats=True)
        for tool in tools
    }
    name = next((name for name, known in load_families().items() if known is family), "")
    rng = random.Random(f"app.text.families.{name}" if name else type(family).__module__)
    names: set[str] = set()
    for _ in range(times):
        text = walk.text(rng)
        pieces = check_text(family, text, tools=tools)
        assert not join_content(pieces), text
        assert collect_calls(pieces), text
        for call in collect_calls(pieces):
            names.add(call.name)
            arguments = json.loads(call.arguments, parse_float=_finite)
            assert validators[call.name].is_valid(arguments), text
    assert names == set(validators)


def check_spelling(family: ChatFamily, rows: Iterable[Row], *, begin: str) -> None:
    """The grammar accepts the template output of these rows. begin: the start of the calls; text
    before it is ignored."""
    for row in rows:
        at = row.output.index(begin)
        assert Walk(family, row.tools).accepts(row.output[at:]), row.id


def _finite(number: str) -> float:
    """Clips numbers that overflow to infinity in Python."""
    return max(-1e300, min(float(number), 1e300))
