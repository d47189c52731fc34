"""What an answer must follow, out of all that a request asks of it: reasoning first, then calls, a
format, or both as alternatives.

Knows: how the parts are put together, in llguidance's variant of Lark. Must not know: tokens beyond
their ids, tensors, who samples.

    start: [reasoning] (calls | format | prose)
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from app.core.errors import AppError, Kind
from app.core.requests import (
    Choice,
    Grammar,
    JsonSchema,
    Lark,
    NamedTool,
    Regex,
    Tool,
    ToolChoice,
)
from app.text.family import CallSyntax, ChatFamily, Tags
from app.text.lark import Speller, either, escaped, quoted, regex, without
from app.text.plain_calls import Plain

# Prose none of whose lines begins as a call in plain JSON might; prose that does not.
_LINE = r"[ \t]*([^ \t\n{][^\n]*|\{[^ \t\n\"][^\n]*)?"
_NO_CALL = rf"/({_LINE}\n)*{_LINE}/"
_NO_LEADING_CALL = r"/[ \t\n]*([^ \t\n{\[<;,](?s:.*))?/"

_ANY = "/(?s:.*)/"

# of an answer that must call: a model that has lost its way calls and calls
_MOST_CALLS = 64

# White space that templates put before reasoning and calls, and models after them: it is of the
# answer where their prompt ends right behind a role (GLM 4.5 begins a line there).
_GAP = r"/[ \n]{0,2}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Where the answer begins. tags: None where the model does not reason, or is done with it.
    opened: within reasoning. budget: most tokens of it."""

    tags: Tags | None
    opened: bool = False
    budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the answer proper must be. tools: those that may be called."""

    grammar: Grammar | None = None
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """grammar: what the whole answer follows, if anything. family: who reads its calls."""

    grammar: Grammar | None
    family: ChatFamily


def constraint(
    asked: Asked, turn: Turn, family: ChatFamily, token: Callable[[str], int | None]
) -> Constraint:
    """token: the id of a text that is an added token, which no spelling of it is.

    Raises AppError(INVALID) for a budget that cannot be kept.
    """
    composer = _Composer(token)
    forced = asked.tools and asked.choice not in ("auto", "none")
    strict = any(tool.strict for tool in asked.tools)
    both = asked.tools and asked.grammar is not None
    if not forced and not strict and turn.budget is None:
        if asked.grammar is None:
            return Constraint(grammar=None, family=family)
        if turn.tags is None and not asked.tools and not family.lead:
            return Constraint(grammar=asked.grammar, family=family)
    reader = family
    if forced or strict or both:
        reader, syntax = composer.syntax(family, _wanted(asked))
        answer = composer.answer(asked, syntax, forced=bool(forced), family=family)
    elif asked.grammar is not None:
        answer = composer.format(asked.grammar, family)
    else:
        answer = composer.free(family)
    composer.start(turn, answer, family)
    return Constraint(grammar=composer.grammar(), family=reader)


def _wanted(asked: Asked) -> Sequence[Tool]:
    match asked.choice:
        case NamedTool(name=name):
            return [tool for tool in asked.tools if tool.name == name]
        case _:
            return asked.tools


class _Composer:
    def __init__(self, token: Callable[[str], int | None]) -> None:
        self._token = token
        self._spell = Speller(token)
        self._rules: dict[str, str] = {"prose": _ANY, "gap": _GAP}
        self._more: list[str] = []
        self._parts: list[JsonSchema | Regex] = []
        self._inner: Lark | None = None

    def grammar(self) -> Lark:
        rules = [f"{name}: {expression}" for name, expression in self._rules.items()]
        return Lark(
            text="\n".join([*rules, *self._more, ""]),
            parts=tuple(self._parts),
            inner=self._inner,
        )

    def start(self, turn: Turn, answer: str, family: ChatFamily) -> None:
        reasoning = self._reasoning(turn, family)
        self._rules = {"start": f"{reasoning} {answer}".strip(), **self._rules}

    # calls

    def syntax(self, family: ChatFamily, tools: Sequence[Tool]) -> tuple[ChatFamily, CallSyntax]:
        """The family's own where it can hold the tools to their schemas, else plain JSON, behind
        what the family's begin with: a model that is about to call writes that."""
        own = family.syntax(tools, self._spell, self._arguments)
        if own is not None:
            return family, own
        nothing = Tool(name="f", description=None, parameters={"type": "object", "properties": {}})
        usual = family.syntax([nothing], self._spell, lambda _: '""')
        plain = Plain(family.restart, trigger=None if usual is None else usual.trigger)
        syntax = plain.syntax(tools, self._spell, self._arguments)
        assert syntax is not None
        return plain, syntax

    def answer(self, asked: Asked, syntax: CallSyntax, *, forced: bool, family: ChatFamily) -> str:
        """An expression for calls alone, or calls amid what else the answer may be."""
        if syntax.rules:
            self._more.append(syntax.rules)
        one = isinstance(asked.choice, NamedTool) or not asked.parallel
        self._rules["call"] = either(syntax.calls)
        if forced:
            # where every answer has a beginning of its own, calls have too
            calls = _joined(syntax, "call", one=one)
            return calls if family.lead else f"gap {calls}"
        if asked.grammar is not None:
            # nothing before a call: prose would be no answer in this format
            return f"({_joined(syntax, 'call', one=one)} | {self.format(asked.grammar, family)})"
        if syntax.trigger is None:
            self._rules["calm"] = _NO_LEADING_CALL if syntax.leading else _NO_CALL
            calm = self._framed("prose" if family.lead else "calm", family)
            return f"({_joined(syntax, 'call', one=one)} | {calm})"
        return self._triggered(syntax, syntax.trigger, one=one)

    def _triggered(self, syntax: CallSyntax, trigger: str, *, one: bool) -> str:
        """Prose, until a trigger says that a call follows; and so on."""
        spelled = self._spell(trigger)
        if syntax.before:
            inner = replace(syntax, before=without(syntax.before, spelled))
            follows = _joined(inner, "call", one=one)
        else:
            # once: with a hundred tools the grammar is long
            self._rules["first"] = either(without(call, spelled) for call in syntax.calls)
            self._rules["call"] = f"{spelled} first"
            follows = f"first {syntax.after}"
        self._rules["rest"] = "/(?s:.+)/"
        self._rules["calls"] = f"{self._prose_until(trigger)} {follows}"
        return "calls? rest?" if one or syntax.between is None else "calls* rest?"

    def _prose_until(self, trigger: str) -> str:
        id = self._token(trigger)
        if id is not None:
            # nor is the trigger spelled in letters: whoever reads the answer sees only its text
            inner = escaped(trigger)
            self._rules["TEXT"] = f"{_ANY} & ~/(?s:.*){inner}(?s:.*)/"
            self._rules["text"] = "TEXT"
            self._rules["rest"] = "text"
            return f"text <[{id}]>"
        self._more.append(f"trigger[suffix={json.dumps(trigger)}]: {_ANY}")
        return "trigger"

    def _arguments(self, tool: Tool) -> str:
        schema = dict(tool.parameters)
        schema.setdefault("type", "object")
        at = f"{tool.at}.parameters"
        text = json.dumps(schema)
        self._parts.append(JsonSchema(text=text, at=at))
        return f"%json {text}"

    # formats

    def free(self, family: ChatFamily) -> str:
        """Anything at all; the family's markers too, which no text spells."""
        ids = [id for id in map(self._token, family.markers) if id is not None]
        if not ids:
            return "prose"
        return f"prose (<[{','.join(map(str, ids))}]> prose)*"

    def format(self, grammar: Grammar, family: ChatFamily) -> str:
        self._format(grammar)
        return self._framed("format", family)

    def _framed(self, answer: str, family: ChatFamily) -> str:
        return " ".join(filter(None, (self._spell(family.lead), answer, self._spell(family.tail))))

    def _format(self, grammar: Grammar) -> None:
        match grammar:
            case JsonSchema(text=text):
                self._parts.append(grammar)
                self._rules["format"] = f"%json {text}"
            case Regex(pattern=pattern):
                self._parts.append(grammar)
                self._rules["format"] = "FORMAT"
                self._rules["FORMAT"] = regex(pattern)
            case Choice(options=options):
                self._rules["format"] = " | ".join(map(quoted, options))
            case Lark():
                self._inner = grammar
                self._rules["format"] = "@inner"

    # reasoning

    def _reasoning(self, turn: Turn, family: ChatFamily) -> str:
        if turn.tags is None:
            return ""
        again = self._spell(family.restart) or "gap"
        closed = f"{self._thought(turn.tags, turn.budget)} {again}"
        before = "" if family.lead else "gap "
        return closed if turn.opened else f"({before}{self._spell(turn.tags.open)} {closed})?"

    def _thought(self, tags: Tags, budget: int | None) -> str:
        close = self._spell(tags.close)
        is_token = close.startswith("<[")
        if not is_token and budget is not None:
            raise AppError(
                Kind.INVALID,
                "thinking_budget is not supported for this model: its tokenizer has no "
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


def _joined(syntax: CallSyntax, call: str, *, one: bool) -> str:
    more = f"({syntax.between} call){{0,{_MOST_CALLS - 1}}}"
    more = "" if one or syntax.between is None else more
    return " ".join(filter(None, (syntax.before, call, more, syntax.after)))
