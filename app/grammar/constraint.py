"""Builds the grammar of a complete output. The reasoning comes first, followed by tool calls, a
response format, or a choice of both.

Knows: how to combine these parts in llguidance's variant of Lark (its docs/syntax.md). Must not
know: individual chat families, tokens beyond their IDs, tensors, the sampler.

    start: [reasoning] (calls | format | prose)
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from app.core.errors import AppError, ErrorKind
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

_TO_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)

# Prose in which no line can start a plain JSON call, and prose that does not start like a call.
_LINE = r"[ \t]*([^ \t\n{][^\n]*|\{[^ \t\n\"][^\n]*)?"
_NO_CALL = rf"/({_LINE}\n)*{_LINE}/"
_NO_LEADING_CALL = r"/[ \t\n]*([^ \t\n{\[<;,](?s:.*))?/"

_ANY = "/(?s:.*)/"

# The maximum number of calls in an output with required calls, because a confused model may repeat
# calls endlessly.
_MAX_CALLS = 64

# White space that templates insert before reasoning and calls, and that models write after them. It
# is part of the output if the prompt ends directly after a role. For example, GLM 4.5 starts a new
# line there.
_GAP = r"/[ \n]{0,2}/"


class LiteralWriter:
    """Converts text to an expression that matches it. Added tokens in the text match as tokens."""

    def __init__(self, token: Callable[[str], int | None]) -> None:
        """token: returns the ID of a string if it is an added token."""
        self._token = token

    def __call__(self, text: str) -> str:
        expressions: list[str] = []
        rest = text
        while rest:
            position, size = self._next_token(rest)
            if position:
                expressions.append(quote(rest[:position]))
            if size:
                expressions.append(f"<[{self._token(rest[position : position + size])}]>")
            rest = rest[position + size :]
        return " ".join(expressions)

    def _next_token(self, text: str) -> tuple[int, int]:
        """Returns (start, length) of the first marker that is a token, or (end, 0) if there is
        none. Markers, unlike most other added tokens, never start with a letter, a digit or white
        space."""
        for start, first in enumerate(text):
            if first.isalnum() or first.isspace():
                continue
            for end in range(len(text), start + 1, -1):
                if self._token(text[start:end]) is not None:
                    return start, end - start
        return len(text), 0


def join_alternatives(expressions: Iterable[str]) -> str:
    return " | ".join(f"({expression})" for expression in expressions)


def strip_literal_prefix(expression: str, spelled: str) -> str:
    """Removes the literal at the start of an expression. spelled: the literal in the form written
    by `LiteralWriter`."""
    if spelled.startswith("<["):
        assert expression.startswith(spelled)
        return expression[len(spelled) :].lstrip()
    head = spelled[:-1]
    assert expression.startswith(head), f"{expression} does not begin with {spelled}"
    rest = f'"{expression[len(head) :]}'
    return rest.removeprefix('""').lstrip()


def quote(text: str) -> str:
    # the only character that is allowed unescaped in JSON strings but not in Lark strings
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def escape_regex(text: str) -> str:
    """Returns a regular expression that matches the text."""
    return "".join(c if c.isalnum() or c == "_" else f"\\x{{{ord(c):x}}}" for c in text)


def regex_literal(pattern: str) -> str:
    """Returns the pattern between slashes, with slashes and line breaks escaped."""
    spelled = {"/": r"\/", "\n": r"\n"}
    inner = _TO_ESCAPE.sub(lambda found: spelled.get(found[0], found[0]), pattern)
    return f"/{inner}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """The texts that open and close reasoning."""

    open: str
    close: str


MakeLiteral = Callable[[str], str]
"""Converts text to a Lark expression that matches it. Special tokens in the text match only as
tokens."""

MakeJsonSchema = Callable[[Tool], str]
"""Converts a tool to a Lark expression that matches the JSON object of its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallGrammar:
    """The syntax of calls, as llguidance Lark expressions, for outputs that must contain calls.

        before call (between call)* after

    calls: one expression for each tool, in the order of the tools. between: the expression between
    two calls; None if an output contains at most one call. trigger: the text at the start of every
    call, which cannot occur in prose; None if calls can start like prose. leading: without a
    trigger, whether calls are parsed only at the start of an output instead of at the start of
    every line. rules: additional Lark rules that the expressions refer to.
    """

    calls: tuple[str, ...]
    before: str = ""
    between: str | None = None
    after: str = ""
    trigger: str | None = None
    leading: bool = False
    rules: str = ""


class ConstrainedFamily(Protocol):
    """The properties of a chat family that a grammar depends on; see
    `app.text.family.ChatFamily`."""

    @property
    def markers(self) -> tuple[str, ...]: ...
    @property
    def content_prefix(self) -> str: ...
    @property
    def content_suffix(self) -> str: ...
    @property
    def reasoning_separator(self) -> str: ...
    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None: ...


F = TypeVar("F", bound=ConstrainedFamily)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStart:
    """The state in which the output starts. reasoning_tags: the reasoning tags of the model; None
    if the model does not reason or has already finished reasoning. in_reasoning: whether the output
    begins inside reasoning. thinking_budget: the maximum number of reasoning tokens."""

    reasoning_tags: ReasoningTags | None
    in_reasoning: bool = False
    thinking_budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRequirements:
    """The requirements for the output after the reasoning. tools: the tools that may be called."""

    grammar: Grammar | None = None
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint(Generic[F]):
    """The constraint of one output. grammar: the grammar of the complete output, or None. family:
    the family that parses the calls of the output. enforces_calls: whether the grammar enforces the
    schemas of calls."""

    grammar: Grammar | None
    family: F
    enforces_calls: bool = False


def build_constraint(
    required: OutputRequirements,
    start: AnswerStart,
    family: F,
    generic_family: Callable[[str | None], F],
    token: Callable[[str], int | None],
) -> Constraint[F]:
    """Builds the constraint of an output.

    generic_family: creates the family for generic tool calls, given the trigger or None. token:
    returns the ID of a string if it is an added token. Plain text never produces this ID.

    Raises AppError(INVALID) for a reasoning budget that cannot be enforced.
    """
    forced = required.tools and required.choice not in ("auto", "none")
    strict = any(tool.strict for tool in required.tools)
    both = required.tools and required.grammar is not None
    if not forced and not strict and start.thinking_budget is None:
        if required.grammar is None:
            return Constraint(grammar=None, family=family)
        if start.reasoning_tags is None and not required.tools and not family.content_prefix:
            return Constraint(grammar=required.grammar, family=family)
    builder = _GrammarBuilder(token)
    reader = family
    if forced or strict or both:
        reader, syntax = builder.choose_syntax(family, generic_family, _callable_tools(required))
        answer = builder.add_answer(required, syntax, forced=bool(forced), family=family)
    elif required.grammar is not None:
        answer = builder.add_format(required.grammar, family)
    else:
        answer = builder.free_text(start, family)
    builder.add_start_rule(start, answer, family)
    enforces_calls = bool(forced or strict or both)
    return Constraint(grammar=builder.build(), family=reader, enforces_calls=enforces_calls)


def _callable_tools(required: OutputRequirements) -> Sequence[Tool]:
    match required.choice:
        case NamedToolChoice(name=name):
            return [tool for tool in required.tools if tool.name == name]
        case _:
            return required.tools


class _GrammarBuilder:
    def __init__(self, token: Callable[[str], int | None]) -> None:
        self._token = token
        self._literal = LiteralWriter(token)
        self._rules: dict[str, str] = {"prose": _ANY, "gap": _GAP}
        self._more: list[str] = []
        self._parts: list[JsonSchema | Regex] = []
        self._inner: LarkGrammar | None = None

    def build(self) -> LarkGrammar:
        rules = [f"{name}: {expression}" for name, expression in self._rules.items()]
        return LarkGrammar(
            text="\n".join([*rules, *self._more, ""]),
            parts=tuple(self._parts),
            inner=self._inner,
        )

    def add_start_rule(self, start: AnswerStart, answer: str, family: ConstrainedFamily) -> None:
        reasoning = self._add_reasoning(start, family)
        self._rules = {"start": f"{reasoning} {answer}".strip(), **self._rules}

    # calls

    def choose_syntax(
        self, family: F, generic_family: Callable[[str | None], F], tools: Sequence[Tool]
    ) -> tuple[F, ToolCallGrammar]:
        """Returns the family's own call syntax if it can enforce the schemas of the tools.
        Otherwise, returns plain JSON after the family's trigger, which the model writes before a
        call."""
        own = family.build_tool_call_grammar(tools, self._literal, self._arguments)
        if own is not None:
            return family, own
        nothing = Tool(name="f", description=None, parameters={"type": "object", "properties": {}})
        usual = family.build_tool_call_grammar([nothing], self._literal, lambda _: '""')
        plain = generic_family(None if usual is None else usual.trigger)
        syntax = plain.build_tool_call_grammar(tools, self._literal, self._arguments)
        assert syntax is not None
        return plain, syntax

    def add_answer(
        self,
        required: OutputRequirements,
        syntax: ToolCallGrammar,
        *,
        forced: bool,
        family: ConstrainedFamily,
    ) -> str:
        """Returns an expression for calls only, or for calls as an alternative to the rest of the
        output."""
        if syntax.rules:
            self._more.append(syntax.rules)
        single_call = isinstance(required.choice, NamedToolChoice) or not required.parallel
        self._rules["call"] = join_alternatives(syntax.calls)
        if forced:
            # if every output starts with a prefix, calls also start with it
            calls = _join_calls(syntax, "call", one=single_call)
            return calls if family.content_prefix else f"gap {calls}"
        if required.grammar is not None:
            # no text may come before a call, because it would not match the format
            return (
                f"({_join_calls(syntax, 'call', one=single_call)} | "
                f"{self.add_format(required.grammar, family)})"
            )
        if syntax.trigger is None:
            self._rules["calm"] = _NO_LEADING_CALL if syntax.leading else _NO_CALL
            calm = self._wrap("prose" if family.content_prefix else "calm", family)
            return f"({_join_calls(syntax, 'call', one=single_call)} | {calm})"
        return self._add_triggered_calls(syntax, syntax.trigger, one=single_call)

    def _add_triggered_calls(self, syntax: ToolCallGrammar, trigger: str, *, one: bool) -> str:
        """Returns an expression for prose, followed by a trigger and its call, possibly
        repeated."""
        spelled = self._literal(trigger)
        if syntax.before:
            inner = replace(syntax, before=strip_literal_prefix(syntax.before, spelled))
            follows = _join_calls(inner, "call", one=one)
        else:
            # define these rules only once, because the grammar is long with a hundred tools
            self._rules["first"] = join_alternatives(
                strip_literal_prefix(call, spelled) for call in syntax.calls
            )
            self._rules["call"] = f"{spelled} first"
            follows = f"first {syntax.after}"
        self._rules["rest"] = "/(?s:.+)/"
        self._rules["calls"] = f"{self._prose_until(trigger)} {follows}"
        return "calls? rest?" if one or syntax.between is None else "calls* rest?"

    def _prose_until(self, trigger: str) -> str:
        id = self._token(trigger)
        if id is not None:
            # the text must not contain the spelled-out trigger either, because output parsers
            # process text rather than tokens
            inner = escape_regex(trigger)
            self._rules["TEXT"] = f"{_ANY} & ~/(?s:.*){inner}(?s:.*)/"
            self._rules["text"] = "TEXT"
            self._rules["rest"] = "text"
            return f"text <[{id}]>"
        self._more.append(f"trigger[suffix={json.dumps(trigger)}]: {_ANY}")
        return "trigger"

    def _arguments(self, tool: Tool) -> str:
        schema = dict(tool.parameters)
        schema.setdefault("type", "object")
        text = json.dumps(schema)
        source = tool.source_param
        at = f"{tool.param}.parameters" if source is None else source
        self._parts.append(JsonSchema(text=text, param=at, generated=source is not None))
        return f"%json {text}"

    # formats

    def free_text(self, start: AnswerStart, family: ConstrainedFamily) -> str:
        """Returns an expression for any text and any of the family's marker tokens. Plain text
        cannot produce these tokens. With a thinking budget, reasoning cannot be opened again."""
        tags = None if start.thinking_budget is None else start.reasoning_tags
        markers = [mark for mark in family.markers if tags is None or mark != tags.open.strip()]
        ids = [id for id in map(self._token, markers) if id is not None]
        if not ids:
            return "prose"
        return f"prose (<[{','.join(map(str, ids))}]> prose)*"

    def add_format(self, grammar: Grammar, family: ConstrainedFamily) -> str:
        self._add_format_rule(grammar)
        return self._wrap("format", family)

    def _wrap(self, answer: str, family: ConstrainedFamily) -> str:
        return " ".join(
            filter(
                None,
                (
                    self._literal(family.content_prefix),
                    answer,
                    self._literal(family.content_suffix),
                ),
            )
        )

    def _add_format_rule(self, grammar: Grammar) -> None:
        match grammar:
            case JsonSchema(text=text):
                self._parts.append(grammar)
                self._rules["format"] = f"%json {text}"
            case Regex(pattern=pattern):
                self._parts.append(grammar)
                self._rules["format"] = "FORMAT"
                self._rules["FORMAT"] = regex_literal(pattern)
            case ChoiceGrammar(options=options):
                self._rules["format"] = " | ".join(map(quote, options))
            case LarkGrammar():
                self._inner = grammar
                self._rules["format"] = "@inner"

    # reasoning

    def _add_reasoning(self, start: AnswerStart, family: ConstrainedFamily) -> str:
        if start.reasoning_tags is None:
            return ""
        again = self._literal(family.reasoning_separator) or "gap"
        closed = f"{self._add_thought(start.reasoning_tags, start.thinking_budget)} {again}"
        before = "" if family.content_prefix else "gap "
        return (
            closed
            if start.in_reasoning
            else f"({before}{self._literal(start.reasoning_tags.open)} {closed})?"
        )

    def _add_thought(self, tags: ReasoningTags, budget: int | None) -> str:
        close = self._literal(tags.close)
        is_token = close.startswith("<[")
        if not is_token and budget is not None:
            raise AppError(
                ErrorKind.INVALID,
                "this model does not support thinking_budget, because its tokenizer has no "
                f"{tags.close} token",
                param="thinking_budget",
            )
        if not is_token:
            self._more.append(f"thought[suffix={json.dumps(tags.close)}]: {_ANY}")
            return "thought"
        if budget == 0:
            return close
        limit = "" if budget is None else f"[max_tokens={budget}]"
        self._more.append(f"thought{limit}: {_ANY}")
        return f"thought {close}"


def _join_calls(syntax: ToolCallGrammar, call: str, *, one: bool) -> str:
    more = f"({syntax.between} call){{0,{_MAX_CALLS - 1}}}"
    more = "" if one or syntax.between is None else more
    return " ".join(filter(None, (syntax.before, call, more, syntax.after)))
