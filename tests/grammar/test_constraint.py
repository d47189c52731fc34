"""What an answer must follow: walks at random through the grammars that requests come to, read back
as the answers would be.

The vocabulary is bytes and a few markers, which are tokens as in real models, or are not.
"""

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from app.core.errors import AppError
from app.core.requests import (
    ChoiceGrammar,
    Grammar,
    JsonSchema,
    LarkGrammar,
    NamedToolChoice,
    Regex,
    Tool,
    ToolChoice,
)
from app.grammar.constraint import (
    AnswerStart,
    Constraint,
    OutputRequirements,
    ReasoningTags,
    build_constraint,
)
from app.text.families import glm, harmony, hermes, llama3, minimax
from app.text.family import ChatFamily
from app.text.generic_tool_calls import GenericFamily
from app.text.syntax.output_parser import (
    Content,
    OutputPart,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from app.text.tokenizer import Tokenizer
from tests import tiny

THINK = ReasoningTags(open="<think>", close="</think>")
MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *harmony.Family.markers,
)
END = tiny.END


def tool(name: str, *, strict: bool = False, **properties: Any) -> Tool:
    return Tool(
        name=name,
        description=None,
        strict=strict,
        param=f"tools.{name}.function",
        parameters={
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        },
    )


COUNT = tool("count", to={"type": "integer", "minimum": 1, "maximum": 9})
PAINT = tool("paint", colour={"enum": ["red", "green"]})
TOOLS = (COUNT, PAINT)
ANSWER = JsonSchema(
    text=json.dumps(
        {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
    ),
    param="response_format.json_schema.schema",
)


class Writer:
    """Writes what a constraint allows, and reads it as the server would."""

    def __init__(self, *, tokens: bool) -> None:
        """tokens: whether the markers are tokens of the vocabulary."""
        inner = tiny.tokenizer()
        if tokens:
            inner.add_special_tokens(list(MARKERS))
        self.tokenizer = Tokenizer(inner)
        self._guide = LLTokenizer(inner.to_str(), eos_token=[END])
        self._markers = [
            id for id in map(self.tokenizer.added_token_to_id, MARKERS) if id is not None
        ]

    def follows(
        self, asked: OutputRequirements, turn: AnswerStart, family: ChatFamily
    ) -> Constraint:
        return build_constraint(
            asked,
            turn,
            family,
            lambda trigger: GenericFamily(family.reasoning_separator, trigger=trigger),
            self.tokenizer.added_token_to_id,
        )

    def guided(self, grammar: Grammar | None) -> LLMatcher:
        assert isinstance(grammar, LarkGrammar)
        matcher = LLMatcher(self._guide, grammar.text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def write(
        self, matcher: LLMatcher, draw: random.Random, *, ends: tuple[str, ...]
    ) -> str | None:
        """A text that ended by itself; None if it was going to be too long. ends: texts worth
        trying where they may stand."""
        matcher.reset()
        ids: list[int] = []
        while len(ids) < 300:
            if matcher.is_stopped() or (matcher.is_accepting() and draw.random() < 0.3):
                return self.tokenizer.decode_verbatim([id for id in ids if id != END])
            step = self._hop(matcher, draw, ends) or [self._one(matcher, draw)]
            if step == [END]:
                continue
            assert matcher.consume_tokens(step)
            ids += step
        return None

    def _hop(self, matcher: LLMatcher, draw: random.Random, ends: tuple[str, ...]) -> list[int]:
        spelled = [self.tokenizer.encode(end, add_special_tokens=False) for end in ends]
        valid = [ids for ids in spelled if matcher.validate_tokens(ids) == len(ids)]
        return draw.choice(valid) if valid and draw.random() < 0.3 else []

    def _one(self, matcher: LLMatcher, draw: random.Random) -> int:
        mask = matcher.compute_bitmask()
        allowed = [id for id in range(self.tokenizer.vocab_size) if mask[id // 8] >> id % 8 & 1]
        plain = [id for id in allowed if id < 128 or id in self._markers]
        closing = [id for id in plain if id in (34, 125)] or plain or allowed
        return draw.choice(closing if draw.random() < 0.3 else plain or allowed)


def read(
    family: ChatFamily, turn: AnswerStart, tools: tuple[Tool, ...], text: str
) -> list[OutputPart]:
    parser = family.build_parser(
        tools=tools, tags=turn.reasoning_tags, in_reasoning=turn.in_reasoning
    )
    return [*parser.feed(text), *parser.flush()]


def said(pieces: list[OutputPart]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def thought(pieces: list[OutputPart]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))


def calls(pieces: list[OutputPart]) -> list[tuple[str, Any]]:
    """Names and arguments, held against the tools' schemas."""
    found: list[list[str]] = []
    for piece in pieces:
        match piece:
            case ToolCallStart(name=name):
                found.append([name, ""])
            case ToolCallArguments(text=text):
                found[-1][1] += text
            case _:
                pass
    schemas = {tool.name: dict(tool.parameters) for tool in (*TOOLS, *STRICT)}
    for name, arguments in found:
        jsonschema_rs.validate(schemas[name], json.loads(arguments))
    return [(name, json.loads(arguments)) for name, arguments in found]


STRICT = (
    tool("count", strict=True, to={"type": "integer", "minimum": 1, "maximum": 9}),
    tool("paint", strict=True, colour={"enum": ["red", "green"]}),
)
FAMILIES: dict[str, tuple[ChatFamily, ReasoningTags]] = {
    "hermes": (hermes.Family(), THINK),
    "plain": (GenericFamily(), THINK),
    "glm": (glm.Family(), THINK),
    "harmony": (
        harmony.Family(),
        ReasoningTags(open="<|channel|>analysis<|message|>", close="<|end|>"),
    ),
}
ENDS = (
    *MARKERS,
    "<tool_call>\n",
    '{"name": ',
    "\n",
    "<arg_key>to</arg_key>\n",
    "</arg_value>",
)

Check = Callable[[list[OutputPart]], None]


def written(
    writer: Writer,
    asked: OutputRequirements,
    turn: AnswerStart,
    family: ChatFamily,
    *,
    seed: str,
    ends: tuple[str, ...] = ENDS,
) -> list[list[OutputPart]]:
    """Some answers that ended by themselves, taken apart."""
    follows = writer.follows(asked, turn, family)
    draw = random.Random(seed)
    matcher = writer.guided(follows.grammar)
    texts = [writer.write(matcher, draw, ends=ends) for _ in range(8)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 2, "hardly anything ended"
    return [read(follows.family, turn, asked.tools, text) for text in ended]


@pytest.fixture(params=[True, False], ids=["tokens", "texts"])
def writer(request: pytest.FixtureRequest) -> Writer:
    return Writer(tokens=request.param)


def turns(tags: ReasoningTags) -> dict[str, AnswerStart]:
    return {
        "answering": AnswerStart(reasoning_tags=None),
        "may reason": AnswerStart(reasoning_tags=tags),
        "reasoning": AnswerStart(reasoning_tags=tags, in_reasoning=True),
    }


CASES = [
    (name, turn)
    for name, (_, tags) in FAMILIES.items()
    for turn in turns(tags)
    # the model reasons in a message of its own; its template opens none
    if (name, turn) != ("harmony", "reasoning")
]


@pytest.fixture(params=CASES, ids=lambda case: " ".join(case))
def case(request: pytest.FixtureRequest, writer: Writer) -> tuple[Writer, ChatFamily, AnswerStart]:
    name, turn = request.param
    if name == "harmony" and writer.tokenizer.added_token_to_id("<|end|>") is None:
        pytest.skip("harmony's markers are tokens")
    family, tags = FAMILIES[name]
    return writer, family, turns(tags)[turn]


Case = tuple[Writer, ChatFamily, AnswerStart]


def test_required_calls_are_calls_and_nothing_else(case: Case) -> None:
    writer, family, turn = case
    for pieces in written(
        writer, OutputRequirements(tools=TOOLS, choice="required"), turn, family, seed="a"
    ):
        assert calls(pieces)
        assert not said(pieces)


def test_one_call_is_made_where_calls_may_not_be_parallel(case: Case) -> None:
    writer, family, turn = case
    asked = OutputRequirements(tools=TOOLS, choice="required", parallel=False)
    for pieces in written(writer, asked, turn, family, seed="b"):
        assert len(calls(pieces)) == 1


def test_a_named_function_is_the_one_that_is_called(case: Case) -> None:
    writer, family, turn = case
    asked = OutputRequirements(tools=TOOLS, choice=NamedToolChoice(name="paint"))
    for pieces in written(writer, asked, turn, family, seed="c"):
        assert [name for name, _ in calls(pieces)] == ["paint"]


def test_calls_of_strict_functions_follow_their_schema_whenever_they_are_made(case: Case) -> None:
    writer, family, turn = case
    answers = written(writer, OutputRequirements(tools=STRICT), turn, family, seed="d")
    # `calls` holds them against the schema
    assert all(calls(pieces) or said(pieces) is not None for pieces in answers)


def test_a_format_is_followed_behind_the_reasoning(case: Case) -> None:
    writer, family, turn = case
    asked = OutputRequirements(grammar=ANSWER)
    if turn.reasoning_tags is None and not family.content_prefix:
        assert writer.follows(asked, turn, family).grammar is ANSWER
        return
    for pieces in written(writer, asked, turn, family, seed="e"):
        assert set(json.loads(said(pieces))) == {"ok"}


def test_with_tools_and_a_format_the_answer_is_one_or_the_other(case: Case) -> None:
    writer, family, turn = case
    for pieces in written(
        writer, OutputRequirements(grammar=ANSWER, tools=TOOLS), turn, family, seed="f"
    ):
        if not calls(pieces):
            assert set(json.loads(said(pieces))) == {"ok"}


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        (Regex(pattern=r"[a-c]{2}/\/[0-9]"), lambda text: text[2:4] == "//" and text[4].isdigit()),
        (
            ChoiceGrammar(options=("yes", 'no "thanks"')),
            lambda text: text in ("yes", 'no "thanks"'),
        ),
    ],
)
def test_every_kind_of_format_can_follow_reasoning(
    writer: Writer, grammar: Grammar, fits: Callable[[str], bool]
) -> None:
    turn = AnswerStart(reasoning_tags=THINK, in_reasoning=True)
    for pieces in written(
        writer, OutputRequirements(grammar=grammar), turn, GenericFamily(), seed="g"
    ):
        assert fits(said(pieces)), said(pieces)


def test_a_grammar_of_the_request_is_kept_apart_from_ours(writer: Writer) -> None:
    inner = LarkGrammar(text='start: "a"')
    follows = writer.follows(
        OutputRequirements(grammar=inner),
        AnswerStart(reasoning_tags=THINK, in_reasoning=True),
        GenericFamily(),
    )
    assert isinstance(follows.grammar, LarkGrammar)
    assert follows.grammar.inner is inner
    assert "@inner" in follows.grammar.text


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_ends_where_its_budget_does(budget: int) -> None:
    writer = Writer(tokens=True)
    turn = AnswerStart(reasoning_tags=THINK, in_reasoning=True, thinking_budget=budget)
    # a hop of several tokens would not be counted one by one
    answers = written(
        writer, OutputRequirements(), turn, hermes.Family(), seed=f"h{budget}", ends=MARKERS
    )
    assert all(len(thought(pieces).encode()) <= budget for pieces in answers)


def test_a_budget_leaves_the_answer_free_to_call() -> None:
    writer = Writer(tokens=True)
    turn = AnswerStart(reasoning_tags=THINK, in_reasoning=True, thinking_budget=2)
    follows = writer.follows(OutputRequirements(tools=TOOLS), turn, hermes.Family())
    matcher = writer.guided(follows.grammar)
    answer = 'x</think>Now: <tool_call>{"name": "count", "arguments": {}}</tool_call>'
    ids = writer.tokenizer.encode(answer, add_special_tokens=False)
    assert matcher.validate_tokens(ids) == len(ids)


def test_a_budget_needs_an_end_that_is_a_token() -> None:
    turn = AnswerStart(reasoning_tags=THINK, in_reasoning=True, thinking_budget=5)
    with pytest.raises(AppError, match="its tokenizer has no </think> token") as caught:
        Writer(tokens=False).follows(OutputRequirements(), turn, GenericFamily())
    assert caught.value.param == "thinking_budget"


def test_nothing_is_followed_where_nothing_is_asked() -> None:
    writer = Writer(tokens=True)
    for asked in (
        OutputRequirements(),
        OutputRequirements(tools=TOOLS),
        OutputRequirements(tools=STRICT, choice="none"),
    ):
        if asked.choice == "none":
            continue  # whoever asks leaves the tools out
        assert (
            writer.follows(asked, AnswerStart(reasoning_tags=THINK), hermes.Family()).grammar
            is None
        )


CODED = tool("code", strict=True, of={"type": "string", "pattern": "^[A-Z]{3}$"})
CODE = '<minimax:tool_call>{"name": "code", "arguments": {"of": "ABC"}}'


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_functions_that_the_syntax_cannot_hold_to_their_schema_are_called_in_json(
    writer: Writer, choice: ToolChoice
) -> None:
    """Behind the family's own marker, which is what a model writes that wants to call."""
    asked = OutputRequirements(tools=(CODED,), choice=choice)
    follows = writer.follows(asked, AnswerStart(reasoning_tags=None), minimax.Family())
    assert isinstance(follows.family, GenericFamily)
    matcher = writer.guided(follows.grammar)
    ids = writer.tokenizer.encode(CODE, add_special_tokens=False)
    assert matcher.validate_tokens(ids) == len(ids)
    pieces = read(follows.family, AnswerStart(reasoning_tags=None), asked.tools, CODE)
    assert [piece for piece in pieces if not isinstance(piece, ToolCallArguments)] == [
        ToolCallStart(name="code")
    ]


def test_where_a_role_ends_the_prompt_a_line_may_begin_before_a_call(writer: Writer) -> None:
    """GLM 4.5's answers begin with a line end, Mistral's first ones with a space."""
    follows = writer.follows(
        OutputRequirements(tools=TOOLS, choice="required"),
        AnswerStart(reasoning_tags=THINK),
        glm.Family(),
    )
    text = "\n<think></think>\n<tool_call>count\n<arg_key>to</arg_key>\n<arg_value>3</arg_value>"
    ids = writer.tokenizer.encode(text, add_special_tokens=False)
    assert writer.guided(follows.grammar).validate_tokens(ids) == len(ids)


def test_prose_beside_strict_calls_of_llamas_may_hold_braces_but_not_begin_with_one(
    writer: Writer,
) -> None:
    follows = writer.follows(
        OutputRequirements(tools=STRICT), AnswerStart(reasoning_tags=None), llama3.Family()
    )
    matcher = writer.guided(follows.grammar)
    code = list(b"Look:\n{\n  [a]\n</b>\n}")
    assert matcher.validate_tokens(code) == len(code)
    assert matcher.validate_tokens(list(b'{"name": "x')) == len('{"name": "')
    assert matcher.validate_tokens(list(b"\n [")) == 2


def test_a_composed_grammar_names_the_schemas_it_was_made_of(writer: Writer) -> None:
    asked = OutputRequirements(grammar=ANSWER, tools=TOOLS)
    follows = writer.follows(asked, AnswerStart(reasoning_tags=None), hermes.Family())
    assert isinstance(follows.grammar, LarkGrammar)
    assert {part.param for part in follows.grammar.parts} == {
        "response_format.json_schema.schema",
        "tools.count.function.parameters",
        "tools.paint.function.parameters",
    }


def test_prose_around_strict_calls_cannot_spell_what_begins_one(writer: Writer) -> None:
    follows = writer.follows(
        OutputRequirements(tools=STRICT), AnswerStart(reasoning_tags=None), hermes.Family()
    )
    matcher = writer.guided(follows.grammar)
    free = list(b'see <tool_call>{"name": "count", "arguments": {"to": "many"}}</tool_call>')
    assert matcher.validate_tokens(free) < len(free)
    prose = list(b"see <tool_box> and </b>")
    assert matcher.validate_tokens(prose) == len(prose)
