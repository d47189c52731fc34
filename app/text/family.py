"""Chat families: how a kind of model marks its reasoning and its tool calls.

Knows: what every family has in common, and where the families lie. Must not know: any family's
markers, token ids, events.

A family is a module in `app/text/families` with a class `Family`; putting it there is all it takes.
It is chosen by the markers in the model's own chat template, never by the model's name: whoever
trains a model further may call it anything, but renders its turns as it was rendered.
"""

import json as jsons
import pkgutil
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from app.core.requests import CalledTool, Tool
from app.text import families
from app.text.syntax.pieces import Pieces, Splitter
from app.text.syntax.reader import Reader, Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What stands before and behind reasoning."""

    open: str
    close: str


Spell = Callable[[str], str]
"""A text → the Lark expression that produces it; special tokens written out in it are produced as
tokens, which no text is."""

Json = Callable[[Tool], str]
"""A tool → the Lark expression that produces the JSON object of its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How calls are spelled, as Lark expressions (llguidance's), for answers that must hold some.

        before call (between call)* after

    calls: one for each tool, in the order of the tools. between: None where an answer holds one
    call at most. trigger: the text that begins every call, marker enough that no prose holds it;
    None where calls begin as prose might. leading: then, whether they are only read where an answer
    begins; else where any line does. rules: further Lark rules that the expressions name.
    """

    calls: tuple[str, ...]
    before: str = ""
    between: str | None = None
    after: str = ""
    trigger: str | None = None
    leading: bool = False
    rules: str = ""


# one literal of Lark's, which is a string of JSON's; several
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
_LITERALS = re.compile(rf"(?:\s*{_LITERAL.pattern})*\s*")


class ChatFamily:
    """What the families inherit: reasoning in tags at the beginning of an answer, no calls.

    markers: what of the syntax may be special tokens, which are not shown otherwise. interrupts:
    what ends reasoning besides its own end, because models forget that before it. lead, tail: what
    must stand before and behind an answer that is no call, where that is not nothing. restart: what
    must stand between reasoning and what follows it.
    """

    markers: tuple[str, ...] = ()
    interrupts: tuple[str, ...] = ()
    lead: str = ""
    tail: str = ""
    restart: str = ""

    def claims(self, template: str) -> bool:
        """Whether a chat template is of this family. No two families may claim one."""
        raise NotImplementedError

    def tags(self, template: str) -> Tags | None:
        """What marks reasoning, if the template's models reason."""
        return Tags(open="<think>", close="</think>") if "</think>" in template else None

    def call_id(self, call: int) -> str | None:
        """An id for the call'th call, where the model's template wants ids of a certain form and
        the syntax brings none."""
        return None

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        """Read what follows the reasoning, to the end. tools: those that may be called; none are
        read where it is empty. A call that cannot be read stays text."""
        yield from reader.until(take=pieces.say)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        """How calls must be spelled. None where this syntax cannot hold one of the tools to its
        schema; then calls are asked for in plain JSON, which can."""
        return None

    def written(self, calls: Sequence[CalledTool]) -> str | None:
        """Calls of an earlier turn as the model wrote them, for templates that have no words for
        those. None where only the template could place them, or where the syntax says no more than
        which values there may be."""
        if self.lead:
            return None
        taken: list[str] = []

        def arguments(tool: Tool) -> str:
            taken.append(calls[int(tool.at)].arguments.strip() or "{}")
            return jsons.dumps(taken[-1])

        tools = [
            Tool(name=call.name, description=None, parameters={}, at=str(place))
            for place, call in enumerate(calls)
        ]
        syntax = self.syntax(tools, jsons.dumps, arguments)
        if syntax is None or len(taken) < len(calls):
            return None
        if len(calls) > 1 and syntax.between is None:
            return None
        between = f" {syntax.between or ''} "
        expression = f"{syntax.before} {between.join(syntax.calls)} {syntax.after}"
        if not _LITERALS.fullmatch(expression):
            return None
        return "".join(map(jsons.loads, _LITERAL.findall(expression)))

    def opened(self, prompt: str, tags: Tags) -> bool:
        """Whether a rendered prompt ends within reasoning."""
        return prompt.rstrip().endswith(tags.open)

    def split(self, *, tools: Sequence[Tool], tags: Tags | None, opened: bool) -> "Splitter":
        """A stage for one answer. opened: the prompt ended within reasoning."""

        def parse(reader: Reader, pieces: Pieces) -> Wait[None]:
            if tags is not None:
                yield from self.reasoning(reader, pieces, tags, opened=opened)
            yield from self.body(reader, pieces, tools)

        return Splitter(parse)

    def reasoning(self, reader: Reader, pieces: Pieces, tags: Tags, *, opened: bool) -> Wait[None]:
        """Read reasoning, if the text begins with it. A prompt that opened it may be followed by a
        model that opens it again."""
        start = reader.hold()
        yield from reader.space()
        again = (yield from reader.accept(tags.open)) is not None
        if not again:
            reader.rewind(start)
            if not opened:
                return
        reader.release()
        pieces.mark()
        yield from reader.before(tags.close, *self.interrupts, take=pieces.think)
        if (yield from reader.accept(tags.close)) is not None:
            pieces.mark()


def family_of(template: str) -> ChatFamily | None:
    """The one that claims the template."""
    claiming = [family for family in _families() if family.claims(template)]
    assert len(claiming) < 2, f"claimed by {', '.join(type(f).__module__ for f in claiming)}"
    return claiming[0] if claiming else None


@cache
def _families() -> tuple[ChatFamily, ...]:
    """All there are; they have no state."""
    found: list[ChatFamily] = []
    for module in pkgutil.iter_modules(families.__path__):
        found.append(import_module(f"{families.__name__}.{module.name}").Family())
    return tuple(found)
