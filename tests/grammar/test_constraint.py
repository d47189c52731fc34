"""Constraints of answers: random walks through the grammars of requests, parsed like answers.

The vocabulary is bytes and a few markers, which are added tokens (as in real models) or text.
"""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
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
    LiteralWriter,
    OutputRequirements,
    ReasoningTags,
    build_constraint,
    escape_regex,
    join_alternatives,
    quote,
    regex_literal,
    strip_literal_prefix,
)
from app.text.families import harmony
from app.text.family import ChatFamily, load_families
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
from tests.engine.harness import grammar_compiler

GUIDE = LLTokenizer("byte")

HERMES = load_families()["hermes"]
GLM = load_families()["glm"]
MINIMAX = load_families()["minimax"]
LLAMA3 = load_families()["llama3"]
THINK = ReasoningTags(open="<think>", close="</think>")
MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *harmony.Family.markers,
)
END = tiny.END


def produces(expression: str, text: str) -> bool:
    matcher = LLMatcher(GUIDE, f"start: TEXT\nTEXT: {expression}\n", log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


Texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


@given(Texts)
@example('a"b\\c\n/d')
@example("\x7f")
def test_a_quoted_text_produces_that_text(text: str) -> None:
    assert produces(quote(text), text)


@given(Texts)
@example("(a|b)*[c]/$^.\\n")
def test_an_escaped_text_matches_only_itself(text: str) -> None:
    assert produces(f"/{escape_regex(text)}/", text)
    assert not produces(f"/{escape_regex(text)}/", text + "x")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a/b", "a/b"), (r"a\/b", "a/b"), (r"\\/", "\\/"), ("a\nb", "a\nb"), (r"[/]+", "//")],
)
def test_a_pattern_keeps_its_meaning_between_slashes(pattern: str, text: str) -> None:
    assert produces(regex_literal(pattern), text)


def test_added_tokens_are_written_as_token_ids() -> None:
    ids = {"<call>": 300, "<call>\n": 301, "word": 302}
    write = LiteralWriter(ids.get)
    assert write("<call>{") == '<[300]> "{"'
    assert write("a <call>\nword") == '"a " <[301]> "word"'
    assert write("") == ""


@pytest.mark.parametrize("ids", [{}, {"<call>": 300}])
def test_a_literal_prefix_can_be_stripped(ids: dict[str, int]) -> None:
    write = LiteralWriter(ids.get)
    assert strip_literal_prefix(write('<call>{"a"'), write("<call>")) == quote('{"a"')
    assert strip_literal_prefix(f"{write('<call>')} rule", write("<call>")) == "rule"


def test_alternatives_are_parenthesized() -> None:
    assert join_alternatives(['"a" "b"', '"c"']) == '("a" "b") | ("c")'


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
    """Samples texts that a constraint allows, with the tokenizer of the server."""

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

    def build(
        self, requirements: OutputRequirements, turn: AnswerStart, family: ChatFamily
    ) -> Constraint:
        return build_constraint(
            requirements,
            turn,
            family,
            lambda trigger: GenericFamily(family, trigger=trigger, enforced=True),
            self.tokenizer.added_token_to_id,
        )

    def make_matcher(self, grammar: Grammar | None) -> LLMatcher:
        assert isinstance(grammar, LarkGrammar)
        matcher = LLMatcher(self._guide, grammar.text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def write(self, matcher: LLMatcher, rng: random.Random, *, ends: tuple[str, ...]) -> str | None:
        """A text that ended at a stop; None if it became too long. ends: texts to try where the
        grammar allows them."""
        matcher.reset()
        ids: list[int] = []
        while len(ids) < 300:
            if matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.3):
                return self.tokenizer.decode_verbatim([id for id in ids if id != END])
            step = self._sample_end(matcher, rng, ends) or [self._sample_token(matcher, rng)]
            if step == [END]:
                continue
            assert matcher.consume_tokens(step)
            ids += step
        return None

    def _sample_end(
        self, matcher: LLMatcher, rng: random.Random, ends: tuple[str, ...]
    ) -> list[int]:
        encoded = [self.tokenizer.encode(end, add_special_tokens=False) for end in ends]
        valid = [ids for ids in encoded if matcher.validate_tokens(ids) == len(ids)]
        return rng.choice(valid) if valid and rng.random() < 0.3 else []

    def _sample_token(self, matcher: LLMatcher, rng: random.Random) -> int:
        mask = matcher.compute_bitmask()
        allowed = [id for id in range(self.tokenizer.vocab_size) if mask[id // 8] >> id % 8 & 1]
        plain = [id for id in allowed if id < 128 or id in self._markers]
        closing = [id for id in plain if id in (34, 125)] or plain or allowed
        return rng.choice(closing if rng.random() < 0.3 else plain or allowed)


def read(
    family: ChatFamily, turn: AnswerStart, tools: tuple[Tool, ...], text: str
) -> list[OutputPart]:
    parser = family.build_parser(
        tools=tools, tags=turn.reasoning_tags, in_reasoning=turn.in_reasoning
    )
    return [*parser.feed(text), *parser.flush()]


def join_content(pieces: list[OutputPart]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def join_reasoning(pieces: list[OutputPart]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))


def collect_calls(pieces: list[OutputPart]) -> list[tuple[str, Any]]:
    """Names and arguments, validated against the schemas of the tools."""
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
    "hermes": (HERMES, THINK),
    "plain": (GenericFamily(), THINK),
    "glm": (GLM, THINK),
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


def write_answers(
    writer: Writer,
    requirements: OutputRequirements,
    turn: AnswerStart,
    family: ChatFamily,
    *,
    seed: str,
    ends: tuple[str, ...] = ENDS,
) -> list[list[OutputPart]]:
    """Parsed answers that ended at a stop."""
    constraint = writer.build(requirements, turn, family)
    rng = random.Random(seed)
    matcher = writer.make_matcher(constraint.grammar)
    texts = [writer.write(matcher, rng, ends=ends) for _ in range(8)]
    finished = [text for text in texts if text is not None]
    assert len(finished) >= 2, "too few answers ended"
    return [read(constraint.family, turn, requirements.tools, text) for text in finished]


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
    # harmony reasons in a separate message, which its template does not open
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


def test_a_required_choice_gives_calls_without_content(case: Case) -> None:
    writer, family, turn = case
    for pieces in write_answers(
        writer, OutputRequirements(tools=TOOLS, choice="required"), turn, family, seed="a"
    ):
        assert collect_calls(pieces)
        assert not join_content(pieces)


@pytest.mark.product
def test_without_parallel_calls_there_is_one_call(case: Case) -> None:
    writer, family, turn = case
    requirements = OutputRequirements(tools=TOOLS, choice="required", parallel=False)
    for pieces in write_answers(writer, requirements, turn, family, seed="b"):
        assert len(collect_calls(pieces)) == 1


@pytest.mark.product
def test_a_named_tool_choice_gives_a_call_of_that_function(case: Case) -> None:
    writer, family, turn = case
    requirements = OutputRequirements(tools=TOOLS, choice=NamedToolChoice(name="paint"))
    for pieces in write_answers(writer, requirements, turn, family, seed="c"):
        assert [name for name, _ in collect_calls(pieces)] == ["paint"]


@pytest.mark.product
def test_optional_calls_of_strict_functions_follow_their_schema(case: Case) -> None:
    writer, family, turn = case
    answers = write_answers(writer, OutputRequirements(tools=STRICT), turn, family, seed="d")
    # `collect_calls` validates the arguments
    assert all(collect_calls(pieces) or join_content(pieces) is not None for pieces in answers)


def test_the_response_format_applies_after_the_reasoning(case: Case) -> None:
    writer, family, turn = case
    requirements = OutputRequirements(grammar=ANSWER)
    if turn.reasoning_tags is None and not family.content_prefix:
        assert writer.build(requirements, turn, family).grammar is ANSWER
        return
    for pieces in write_answers(writer, requirements, turn, family, seed="e"):
        assert set(json.loads(join_content(pieces))) == {"ok"}


@pytest.mark.product
def test_with_tools_and_a_format_the_answer_is_one_or_the_other(case: Case) -> None:
    writer, family, turn = case
    for pieces in write_answers(
        writer, OutputRequirements(grammar=ANSWER, tools=TOOLS), turn, family, seed="f"
    ):
        if not collect_calls(pieces):
            assert set(json.loads(join_content(pieces))) == {"ok"}


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (Regex(pattern=r"[a-c]{2}/\/[0-9]"), lambda text: text[2:4] == "//" and text[4].isdigit()),
        (
            ChoiceGrammar(options=("yes", 'no "thanks"')),
            lambda text: text in ("yes", 'no "thanks"'),
        ),
    ],
)
def test_every_kind_of_format_can_follow_reasoning(
    writer: Writer, grammar: Grammar, matches: Callable[[str], bool]
) -> None:
    turn = AnswerStart(reasoning_tags=THINK, in_reasoning=True)
    for pieces in write_answers(
        writer, OutputRequirements(grammar=grammar), turn, GenericFamily(), seed="g"
    ):
        assert matches(join_content(pieces)), join_content(pieces)


def test_a_grammar_of_the_request_stays_separate_from_the_composed_one(writer: Writer) -> None:
    inner = LarkGrammar(text='start: "a"')
    constraint = writer.build(
        OutputRequirements(grammar=inner),
        AnswerStart(reasoning_tags=THINK, in_reasoning=True),
        GenericFamily(),
    )
    assert isinstance(constraint.grammar, LarkGrammar)
    assert constraint.grammar.inner is inner
    assert "@inner" in constraint.grammar.text


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_ends_at_its_budget(budget: int) -> None:
    writer = Writer(tokens=True)
    turn = AnswerStart(reasoning_tags=THINK, in_reasoning=True, thinking_budget=budget)
    # an end of several tokens would not be counted by token
    answers = write_answers(
        writer, OutputRequirements(), turn, HERMES, seed=f"h{budget}", ends=MARKERS
    )
    assert all(len(join_reasoning(pieces).encode()) <= budget for pieces in answers)


def test_a_thinking_budget_does_not_prevent_calls() -> None:
    writer = Writer(tokens=True)
    turn = AnswerStart(reasoning_tags=THINK, in_reasoning=True, thinking_budget=2)
    constraint = writer.build(OutputRequirements(tools=TOOLS), turn, HERMES)
    matcher = writer.make_matcher(constraint.grammar)
    answer = 'x</think>Now: <tool_call>{"name": "count", "arguments": {}}</tool_call>'
    ids = writer.tokenizer.encode(answer, add_special_tokens=False)
    assert matcher.validate_tokens(ids) == len(ids)


def test_a_thinking_budget_needs_an_end_token() -> None:
    turn = AnswerStart(reasoning_tags=THINK, in_reasoning=True, thinking_budget=5)
    with pytest.raises(AppError, match="its tokenizer has no </think> token") as caught:
        Writer(tokens=False).build(OutputRequirements(), turn, GenericFamily())
    assert caught.value.param == "thinking_budget"


def test_without_requirements_there_is_no_grammar() -> None:
    writer = Writer(tokens=True)
    for requirements in (
        OutputRequirements(),
        OutputRequirements(tools=TOOLS),
        OutputRequirements(tools=STRICT, choice="none"),
    ):
        if requirements.choice == "none":
            continue  # the caller omits the tools
        assert writer.build(requirements, AnswerStart(reasoning_tags=THINK), HERMES).grammar is None


CODE_TOOL = tool("code", strict=True, of={"type": "string", "pattern": "^[A-Z]{3}$"})
CODE_CALL = '<minimax:tool_call>{"name": "code", "arguments": {"of": "ABC"}}'


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_functions_are_called_in_json_where_the_syntax_cannot_enforce_their_schema(
    writer: Writer, choice: ToolChoice
) -> None:
    """After the marker of the family, which the model writes to begin a call."""
    requirements = OutputRequirements(tools=(CODE_TOOL,), choice=choice)
    constraint = writer.build(requirements, AnswerStart(reasoning_tags=None), MINIMAX)
    assert isinstance(constraint.family, GenericFamily)
    matcher = writer.make_matcher(constraint.grammar)
    ids = writer.tokenizer.encode(CODE_CALL, add_special_tokens=False)
    assert matcher.validate_tokens(ids) == len(ids)
    pieces = read(
        constraint.family, AnswerStart(reasoning_tags=None), requirements.tools, CODE_CALL
    )
    assert [piece for piece in pieces if not isinstance(piece, ToolCallArguments)] == [
        ToolCallStart(name="code")
    ]


def test_white_space_may_come_before_a_call_after_a_role_header(writer: Writer) -> None:
    """Answers of GLM 4.5 begin with a line break, first answers of Mistral with a space."""
    constraint = writer.build(
        OutputRequirements(tools=TOOLS, choice="required"),
        AnswerStart(reasoning_tags=THINK),
        GLM,
    )
    text = "\n<think></think>\n<tool_call>count\n<arg_key>to</arg_key>\n<arg_value>3</arg_value>"
    ids = writer.tokenizer.encode(text, add_special_tokens=False)
    assert writer.make_matcher(constraint.grammar).validate_tokens(ids) == len(ids)


def test_llama_prose_beside_strict_calls_may_contain_braces_but_not_begin_with_one(
    writer: Writer,
) -> None:
    constraint = writer.build(
        OutputRequirements(tools=STRICT), AnswerStart(reasoning_tags=None), LLAMA3
    )
    matcher = writer.make_matcher(constraint.grammar)
    code = list(b"Look:\n{\n  [a]\n</b>\n}")
    assert matcher.validate_tokens(code) == len(code)
    assert matcher.validate_tokens(list(b'{"name": "x')) == len('{"name": "')
    assert matcher.validate_tokens(list(b"\n [")) == 2


def test_a_composed_grammar_lists_the_params_of_its_schemas(writer: Writer) -> None:
    requirements = OutputRequirements(grammar=ANSWER, tools=TOOLS)
    constraint = writer.build(requirements, AnswerStart(reasoning_tags=None), HERMES)
    assert isinstance(constraint.grammar, LarkGrammar)
    assert {part.param for part in constraint.grammar.parts} == {
        "response_format.json_schema.schema",
        "tools.count.function.parameters",
        "tools.paint.function.parameters",
    }


def test_an_error_in_a_generated_schema_names_the_field_that_it_was_generated_from(
    writer: Writer,
) -> None:
    source = "tools.0.format.definition"
    edit = replace(
        tool("edit", input={"type": "string", "pattern": "^(?:[)$"}), source_param=source
    )
    constraint = writer.build(
        OutputRequirements(tools=(edit,), choice="required"),
        AnswerStart(reasoning_tags=None),
        HERMES,
    )
    assert constraint.grammar is not None
    with pytest.raises(AppError, match=f"^{source} is invalid: ") as caught:
        grammar_compiler().compile(constraint.grammar, frozenset({END}))
    assert caught.value.param == source
    assert "properties" not in caught.value.message


def test_prose_around_strict_calls_cannot_contain_the_start_of_a_call(writer: Writer) -> None:
    constraint = writer.build(
        OutputRequirements(tools=STRICT), AnswerStart(reasoning_tags=None), HERMES
    )
    matcher = writer.make_matcher(constraint.grammar)
    free = list(b'see <tool_call>{"name": "count", "arguments": {"to": "many"}}</tool_call>')
    assert matcher.validate_tokens(free) < len(free)
    prose = list(b"see <tool_box> and </b>")
    assert matcher.validate_tokens(prose) == len(prose)
