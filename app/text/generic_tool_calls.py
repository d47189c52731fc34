"""Calls for models whose template knows of none: told in words, written as JSON.

    {"name": "get_weather", "arguments": {"city": "Oslo"}}

Knows: how tools, calls and results are told to a model that was never trained on any. Must not
know: templates, tokens. It is also how every model writes calls that it must make and whose own
syntax cannot hold them to their schema.

Calls of earlier turns, for templates that offer tools and have no words for what came of them.

Such templates expect that an answer with calls is sent back as it was written (those of LFM2,
Granite and SmolLM3 do). OpenAI's clients send the calls apart from the text, so they are written
again: what a model finds in its own turns is how it goes on.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from app.core.requests import Message, Tool
from app.text.chat_template import parse_arguments
from app.text.family import ChatFamily, MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.syntax.json_calls import parse_call_object
from app.text.syntax.marked_calls import parse_marked_calls
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable


def inline_tool_calls(
    messages: Sequence[Message], family: ChatFamily, *, keep_results: bool
) -> Sequence[Message]:
    """The conversation without calls beside the text of its turns. keep_results: whether the
    template renders results as such; if not, the user tells them. Where the family cannot write a
    call of it, all are told in plain words. Raises AppError(INVALID) for arguments that are no
    object."""
    turns: list[Message] = []
    for place, message in enumerate(messages):
        for number, call in enumerate(message.tool_calls):
            field = f"messages.{place}.tool_calls.{number}.function.arguments"
            parse_arguments(call, field)
        if message.tool_calls:
            written = family.render_calls(message.tool_calls)
            if written is None:
                return render_tools_as_text(messages, ())
            said = f"{message.content}\n{written}" if message.content else written
            turns.append(replace(message, content=said, tool_calls=()))
        else:
            turns.append(message)
    return turns if keep_results else render_tools_as_text(turns, ())


# what models put around JSON
_FENCE_STARTS, _FENCE_END = ("```json\n", "```tool_call\n", "```\n"), "```"

_CALL_EXAMPLE = '{"name": "…", "arguments": {…}}'


class GenericFamily(ChatFamily):
    """A call is a JSON object at the beginning of a line, which names one of the tools; a block of
    Markdown around it belongs to it. Or it stands behind a trigger, and only there."""

    def __init__(self, reasoning_separator: str = "", *, trigger: str | None = None) -> None:
        """reasoning_separator: of the family whose models reason as they always do before such
        calls. trigger: what their own calls begin with."""
        self.reasoning_separator = reasoning_separator
        self._trigger = trigger

    def matches(self, template: str) -> bool:
        return False

    def parse_reasoning(
        self, reader: Reader, output: OutputBuilder, tags: ReasoningTags, *, in_reasoning: bool
    ) -> Resumable[None]:
        # white space before the tag has been read already, where the tag begins with some
        bare = replace(tags, open=tags.open.lstrip())
        yield from super().parse_reasoning(reader, output, bare, in_reasoning=in_reasoning)
        if (
            self.reasoning_separator
            and (yield from reader.accept(self.reasoning_separator)) is not None
        ):
            output.add_marker()

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        names = {tool.name for tool in tools}
        if self._trigger is not None:
            yield from parse_marked_calls(
                reader, output, tools, parse=parse_call_object, open=self._trigger
            )
            return
        fenced = False
        while (yield from reader.peek()):
            start = reader.hold()
            space = yield from reader.skip_space()
            opens = names and (yield from reader.accept(*_FENCE_STARTS)) is not None
            begins = names and (yield from reader.peek()) == "{"
            outcome = "none"
            if begins:
                outcome = yield from parse_call_object(reader, output, names=names)
            if outcome == "none":
                reader.rewind(start)
                output.add_content(reader.take(len(space)), start)
                yield from _parse_line(reader, output)
                continue
            reader.release()
            if outcome == "broken":
                yield from reader.read_until(on_text=lambda text, _: output.add_arguments(text))
            output.add_marker()
            fenced = (fenced or opens) and not (yield from _skip_fence_end(reader))

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        before = self._trigger or ""
        return ToolCallGrammar(
            calls=tuple(
                f"{literal(before + _call_prefix(tool.name))} {json_schema(tool)} {literal('}')}"
                for tool in tools
            ),
            between=literal("\n"),
            trigger=self._trigger,
        )


def _call_prefix(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


def _skip_fence_end(reader: Reader) -> Resumable[bool]:
    """Whether the block does behind a call; then its end is taken."""
    behind = reader.hold()
    yield from reader.skip_space()
    if (yield from reader.accept(_FENCE_END)) is not None:
        reader.release()
        return True
    reader.rewind(behind)
    return False


def _parse_line(reader: Reader, output: OutputBuilder) -> Resumable[None]:
    """The rest of a line, its end included."""
    at = reader.at
    if (yield from reader.read_until("\n", on_text=output.add_content)) is not None:
        output.add_content("\n", reader.at - 1)
    assert reader.at > at or reader.ended


def render_tools_as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation in words that any template can render: the tools in the system message,
    calls and their results in what the assistant and the user say. tools: may be none, where only
    the history knows of calls."""
    turns = list(_merge_user_messages(map(_render_message_as_text, messages)))
    if not tools:
        return turns
    offer = _describe_tools(tools)
    if turns and turns[0].role in ("system", "developer"):
        first = turns[0]
        return [replace(first, content=f"{first.content or ''}\n\n{offer}"), *turns[1:]]
    return [Message(role="system", content=offer), *turns]


def _describe_tools(tools: Sequence[Tool]) -> str:
    lines = [
        "You can call these functions. Their parameters are given as JSON Schema:",
        *(
            json.dumps(
                {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.parameters,
                },
                ensure_ascii=False,
            )
            for tool in tools
        ),
        f"To call one, answer with nothing but {_CALL_EXAMPLE} and wait for its result. "
        "For several calls, write one object a line.",
    ]
    return "\n".join(lines)


def _render_message_as_text(message: Message) -> Message:
    if message.role == "tool":
        of = f" of {message.name}" if message.name else ""
        return Message(role="user", content=f"Result{of}: {message.content or ''}")
    if not message.tool_calls:
        return message
    calls = [
        f"{_call_prefix(call.name)}{call.arguments.strip() or '{}'}}}"
        for call in message.tool_calls
    ]
    said = [message.content] if message.content else []
    return replace(message, content="\n".join([*said, *calls]), tool_calls=())


def _merge_user_messages(messages: Iterator[Message]) -> Iterator[Message]:
    """Results that follow each other, and what the user says behind them, are one turn: many
    templates want the user and the assistant to take turns."""
    last: Message | None = None
    for message in messages:
        if last is not None and last.role == message.role == "user":
            last = replace(last, content=f"{last.content or ''}\n{message.content or ''}")
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last
