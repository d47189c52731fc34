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

from app.core.requests import Tool, ToolCall
from app.text import families
from app.text.syntax.output_parser import OutputBuilder, OutputParser
from app.text.syntax.reader import Reader, Resumable


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """What stands before and behind reasoning."""

    open: str
    close: str


MakeLiteral = Callable[[str], str]
"""A text → the Lark expression that produces it; special tokens written out in it are produced as
tokens, which no text is."""

MakeJsonSchema = Callable[[Tool], str]
"""A tool → the Lark expression that produces the JSON object of its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallGrammar:
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
    what ends reasoning besides its own end, because models forget that before it. content_prefix,
    content_suffix: what must stand before and behind an answer that is no call, where that is not
    nothing. reasoning_separator: what must stand between reasoning and what follows it.
    """

    markers: tuple[str, ...] = ()
    implicit_reasoning_ends: tuple[str, ...] = ()
    content_prefix: str = ""
    content_suffix: str = ""
    reasoning_separator: str = ""

    def matches(self, template: str) -> bool:
        """Whether a chat template is of this family. No two families may claim one."""
        raise NotImplementedError

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        """What marks reasoning, if the template's models reason."""
        return ReasoningTags(open="<think>", close="</think>") if "</think>" in template else None

    def make_call_id(self, index: int) -> str | None:
        """An id for the call'th call, where the model's template wants ids of a certain form and
        the syntax brings none."""
        return None

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        """Read what follows the reasoning, to the end. tools: those that may be called; none are
        read where it is empty. A call that cannot be read stays text."""
        yield from reader.read_until(on_text=output.add_content)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        """How calls must be spelled. None where this syntax cannot hold one of the tools to its
        schema; then calls are asked for in plain JSON, which can."""
        return None

    def render_calls(self, calls: Sequence[ToolCall]) -> str | None:
        """Calls of an earlier turn as the model wrote them, for templates that have no words for
        those. None where only the template could place them, or where the syntax says no more than
        which values there may be."""
        if self.content_prefix:
            return None
        taken: list[str] = []

        def arguments(tool: Tool) -> str:
            taken.append(calls[int(tool.param)].arguments.strip() or "{}")
            return jsons.dumps(taken[-1])

        tools = [
            Tool(name=call.name, description=None, parameters={}, param=str(place))
            for place, call in enumerate(calls)
        ]
        syntax = self.build_tool_call_grammar(tools, jsons.dumps, arguments)
        if syntax is None or len(taken) < len(calls):
            return None
        if len(calls) > 1 and syntax.between is None:
            return None
        between = f" {syntax.between or ''} "
        expression = f"{syntax.before} {between.join(syntax.calls)} {syntax.after}"
        if not _LITERALS.fullmatch(expression):
            return None
        return "".join(map(jsons.loads, _LITERAL.findall(expression)))

    def ends_in_reasoning(self, prompt: str, tags: ReasoningTags) -> bool:
        """Whether a rendered prompt ends within reasoning."""
        return prompt.rstrip().endswith(tags.open)

    def build_parser(
        self, *, tools: Sequence[Tool], tags: ReasoningTags | None, in_reasoning: bool
    ) -> "OutputParser":
        """A stage for one answer. in_reasoning: the prompt ended within reasoning."""

        def parse(reader: Reader, output: OutputBuilder) -> Resumable[None]:
            if tags is not None:
                yield from self.parse_reasoning(reader, output, tags, in_reasoning=in_reasoning)
            yield from self.parse_tool_calls(reader, output, tools)

        return OutputParser(parse)

    def parse_reasoning(
        self, reader: Reader, output: OutputBuilder, tags: ReasoningTags, *, in_reasoning: bool
    ) -> Resumable[None]:
        """Read reasoning, if the text begins with it. A prompt that opened it may be followed by a
        model that opens it again."""
        start = reader.hold()
        yield from reader.skip_space()
        again = (yield from reader.accept(tags.open)) is not None
        if not again:
            reader.rewind(start)
            if not in_reasoning:
                return
        reader.release()
        output.add_marker()
        yield from reader.read_before(
            tags.close, *self.implicit_reasoning_ends, on_text=output.add_reasoning
        )
        if (yield from reader.accept(tags.close)) is not None:
            output.add_marker()


def find_family(template: str) -> ChatFamily | None:
    """The one that claims the template."""
    claiming = [family for family in _load_families() if family.matches(template)]
    assert len(claiming) < 2, f"claimed by {', '.join(type(f).__module__ for f in claiming)}"
    return claiming[0] if claiming else None


@cache
def _load_families() -> tuple[ChatFamily, ...]:
    """All there are; they have no state."""
    found: list[ChatFamily] = []
    for module in pkgutil.iter_modules(families.__path__):
        found.append(import_module(f"{families.__name__}.{module.name}").Family())
    return tuple(found)
