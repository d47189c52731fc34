"""The interface of chat families. A family defines how related models mark reasoning and tool
calls.

Knows: the common interface of families, the location of their modules. Must not know: the markers
of any family, token IDs, events.

A module in `app/text/families` has a class `Family`, or a table `FAMILIES` of similar families, by
name. No other registration is needed. The family is selected by the markers in the model's chat
template, never by the model's name, because a fine-tuned model may have any name, but keeps the
chat format.
"""

import json as jsons
import pkgutil
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import TypeVar

from app.core.requests import Tool, ToolCall
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text import families
from app.text.syntax.output_parser import OutputBuilder, OutputParser
from app.text.syntax.reader import OnText, Reader, Resumable

T = TypeVar("T")

THINK_TAGS = ReasoningTags(open="<think>", close="</think>")

# one Lark literal, which is a JSON string, and several of them
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
_LITERALS = re.compile(rf"(?:\s*{_LITERAL.pattern})*\s*")

# markers that can only be special tokens, such as <|call|> and [TOOL_CALLS]
_CONTROL = re.compile(r"[|｜]|^\[/?[A-Z_]+\]$")


class ChatFamily:
    """The base class of families. The default implementation parses reasoning in tags at the start
    of the output, and no calls.

    template_marks, foreign_marks: the texts that a template of this family contains, and those
    that it does not. markers: the parts of the syntax that may be special tokens. Special
    tokens are hidden unless they are listed here. call_markers: the markers that start calls,
    after which `parse_call` is used. content_prefix, content_suffix: the required text before
    and after content that is not a call. reasoning: the reasoning tags, if they do not depend on
    the template. reasoning_separator: the required text between the reasoning and the following
    part. plain_without_tools: whether the whole output is content
    if there are no tools and no reasoning.
    """

    template_marks: tuple[str, ...] = ()
    foreign_marks: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    call_markers: tuple[str, ...] = ()
    content_prefix: str = ""
    content_suffix: str = ""
    reasoning: ReasoningTags | None = None
    reasoning_separator: str = ""
    plain_without_tools: bool = False

    def matches(self, template: str) -> bool:
        """Returns whether a chat template belongs to this family. A template must not match more
        than one family."""
        template = template.replace('\\"', '"')  # a quotation mark in a string of Jinja
        return (
            bool(self.template_marks)
            and all(mark in template for mark in self.template_marks)
            and not any(mark in template for mark in self.foreign_marks)
        )

    def reasoning_tags(self, template: str) -> ReasoningTags | None:
        """Returns the reasoning tags of models with this template, or None if they do not
        reason."""
        return self.reasoning or (THINK_TAGS if THINK_TAGS.close in template else None)

    def make_call_id(self, index: int) -> str | None:
        """Returns an ID for the call at `index` if the template requires a specific ID format and
        the call syntax has no IDs, otherwise None."""
        return None

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        """Parses the rest of the output after the reasoning. tools: the tools that may be called;
        if empty, no calls are parsed. A call that cannot be parsed is treated as text."""
        marks = self.call_markers if tools else ()
        while mark := (yield from reader.read_until(*marks, on_text=output.add_content)):
            yield from self.parse_call(reader, output, tools, mark, output.add_content)

    def parse_call(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        mark: str,
        on_text: OnText,
    ) -> Resumable[bool]:
        """Parses the calls after one of the `call_markers`, which was consumed. Returns whether
        there was a call. If not, passes the marker to `on_text` and consumes no other text."""
        raise NotImplementedError

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        """Returns the grammar of calls, or None if this syntax cannot enforce the schema of one of
        the tools. In this case, calls use plain JSON, which can enforce any schema."""
        return None

    def render_calls(self, calls: Sequence[ToolCall]) -> str | None:
        """Renders the calls of an earlier turn in the model's syntax, for templates that cannot
        render calls. Returns None if only the template can render the calls, or if the text is not
        determined by the grammar."""
        if self.content_prefix:
            return None
        rendered: list[str] = []

        def arguments(tool: Tool) -> str:
            rendered.append(calls[int(tool.param)].arguments.strip() or "{}")
            return jsons.dumps(rendered[-1])

        tools = [
            Tool(name=call.name, description=None, parameters={}, param=str(index))
            for index, call in enumerate(calls)
        ]
        syntax = self.build_tool_call_grammar(tools, jsons.dumps, arguments)
        if syntax is None or len(rendered) < len(calls):
            return None
        if len(calls) > 1 and syntax.between is None:
            return None
        between = f" {syntax.between or ''} "
        expression = f"{syntax.before} {between.join(syntax.calls)} {syntax.after}"
        if not _LITERALS.fullmatch(expression):
            return None
        return "".join(map(jsons.loads, _LITERAL.findall(expression)))

    def ends_in_reasoning(self, prompt: str, tags: ReasoningTags) -> bool:
        """Returns whether a rendered prompt ends within reasoning."""
        return prompt.rstrip().endswith(tags.open)

    def build_parser(
        self,
        *,
        tools: Sequence[Tool],
        tags: ReasoningTags | None,
        in_reasoning: bool,
        special_tokens: Collection[str] = (),
        calls_end_reasoning: bool = True,
    ) -> OutputParser:
        """Builds the parser of one output. in_reasoning: whether the prompt ends within reasoning.
        special_tokens: the markers that are special tokens of the tokenizer. They are removed from
        the text, and so are markers that look like special tokens. calls_end_reasoning: whether a
        call within reasoning is parsed. It must be false if a grammar enforces the schemas of
        calls, because the grammar begins after the reasoning."""
        markers = {*self.markers, *(() if tags is None else (tags.open.strip(), tags.close))}
        return OutputParser(
            lambda reader, output: self.parse_output(
                reader, output, tools, tags, in_reasoning=in_reasoning
            ),
            hidden=(mark for mark in markers if mark in special_tokens or _CONTROL.search(mark)),
            tags=tags,
            calls_end_reasoning=calls_end_reasoning,
        )

    def parse_output(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        tags: ReasoningTags | None,
        *,
        in_reasoning: bool,
    ) -> Resumable[None]:
        """Parses a whole output."""
        if tags is not None:
            yield from self.parse_reasoning(reader, output, tools, tags, in_reasoning=in_reasoning)
        yield from self.parse_tool_calls(reader, output, tools)

    def parse_reasoning(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        tags: ReasoningTags,
        *,
        in_reasoning: bool,
    ) -> Resumable[None]:
        """Parses reasoning at the start of the text. If the reasoning was opened by the prompt, the
        model may repeat the opening tag."""
        start = reader.hold()
        yield from reader.skip_space()
        again = (yield from reader.accept(tags.open)) is not None
        if not again:
            reader.rewind(start)
            if not in_reasoning:
                return
        reader.release()
        output.add_marker()
        yield from self.parse_thoughts(reader, output, tools, tags.open.strip(), tags.close)

    def parse_thoughts(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool], open: str, close: str
    ) -> Resumable[None]:
        """Parses reasoning up to `close`. Models sometimes omit it before a call, so a call ends
        the reasoning if `close` does not follow, or if nothing follows `close`. Otherwise, the call
        is a draft, which is part of the reasoning. open: text that begins other reasoning."""
        calls = self.find_reasoning_ends(output, tools)
        marks = (close, *calls, *((open,) if output.hides(open) else ()))
        while mark := (yield from reader.read_before(*marks, on_text=output.add_reasoning)):
            if mark == close:
                reader.take(len(close))
                output.add_marker()
            if mark not in calls:
                return
            start, ahead = reader.at, _Lookahead(output)
            is_call, end = yield from ahead.run(
                reader, self._read_calls(ahead.reader, ahead.output, tools, open, close)
            )
            text = reader.take(end)
            if is_call:
                output.extend(ahead.output, start)
                output.hide(close)  # it may come later
                return
            output.add_reasoning(text, start)

    def find_reasoning_ends(self, output: OutputBuilder, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Returns the markers of calls that may end reasoning."""
        return self.call_markers if tools and output.calls_end_reasoning else ()

    def _read_calls(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        open: str,
        close: str,
    ) -> Resumable[tuple[bool, int]]:
        """Parses an output from a marker of a call within reasoning. Returns whether the call ends
        the reasoning, and where the text of the call, or else of the reasoning, ends."""
        marks, take = (open, close, *self.call_markers), output.add_content
        has_calls = False
        while mark := (yield from reader.read_before(*marks, on_text=take)):
            if mark == open:
                return True, reader.at
            closed_at = reader.at
            reader.take(len(mark))
            if mark != close:
                is_call = yield from self.parse_call(reader, output, tools, mark, take)
                if not (is_call or has_calls):
                    return False, closed_at + len(mark)
                has_calls = True
                continue
            output.add_marker()
            yield from reader.skip_space()
            if (yield from reader.peek()):
                return False, closed_at
        return True, reader.at


class _Lookahead:
    """Parses text that may have to be parsed again in a different way."""

    def __init__(self, output: OutputBuilder) -> None:
        self.reader = Reader()
        self.output = output.fork()

    def run(self, reader: Reader, parser: Resumable[T]) -> Resumable[T]:
        """Runs a parser of `self.reader` on the text ahead of `reader`, without consuming it."""
        self.reader.push(reader.ahead)
        while True:
            if reader.ended:
                self.reader.end()
            try:
                next(parser)
            except StopIteration as stopped:
                return stopped.value
            length = len(reader.ahead)
            yield from reader.wait_for_more()
            self.reader.push(reader.ahead[length:])


def find_family(template: str) -> ChatFamily | None:
    """Returns the family that matches the template, or None."""
    matching = {
        name: family for name, family in load_families().items() if family.matches(template)
    }
    assert len(matching) < 2, f"matched by {', '.join(matching)}"
    return next(iter(matching.values()), None)


@cache
def load_families() -> Mapping[str, ChatFamily]:
    """Loads all families, by name. Families have no state."""
    loaded: dict[str, ChatFamily] = {}
    for info in pkgutil.iter_modules(families.__path__):
        module = import_module(f"{families.__name__}.{info.name}")
        table = getattr(module, "FAMILIES", None)
        loaded |= {info.name: module.Family()} if table is None else table
    return loaded
