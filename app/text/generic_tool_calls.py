"""Generic tool calls, for models whose template does not support tools. The prompt describes the
tools in text, and the model writes calls as JSON.

    {"name": "get_weather", "arguments": {"city": "Oslo"}}

Knows: the description of tools, calls and results in text. Must not know: templates, tokens.

This format is also used for required calls if the model's own syntax cannot enforce the schemas of
the tools.

The templates of some models, such as LFM2, Granite and SmolLM3, render tools but not earlier calls,
because they expect the client to send the model's raw output back. Clients of OpenAI's API send
calls separately from the text, so this module inserts the calls into the text again. The format
must be the model's own, because models imitate their earlier turns.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from app.core.requests import Message, Tool, join_contents, prepend_text
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ReasoningTags, ToolCallGrammar
from app.text.chat_template import parse_arguments
from app.text.family import ChatFamily
from app.text.syntax.json_calls import parse_call_object
from app.text.syntax.marked_calls import parse_marked_call
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import OnText, Reader, Resumable

# text that models write around JSON
_FENCE_STARTS, _FENCE_END = ("```json\n", "```tool_call\n", "```\n"), "```"

_CALL_EXAMPLE = '{"name": "…", "arguments": {…}}'


def inline_tool_calls(
    messages: Sequence[Message],
    family: ChatFamily,
    *,
    keep_results: bool,
    merges_assistant: bool = False,
) -> Sequence[Message]:
    """Moves calls into the text of their turns. keep_results: whether the template renders results.
    If not, results are converted to user messages. merges_assistant: whether consecutive assistant
    messages must be merged. If the family cannot render one of the calls,
    all calls are described in plain text. Raises AppError(INVALID) for arguments that are not an
    object."""
    turns: list[Message] = []
    for index, message in enumerate(messages):
        for number, call in enumerate(message.tool_calls):
            field = f"messages.{index}.tool_calls.{number}.function.arguments"
            parse_arguments(call, field)
        if message.tool_calls:
            written = family.render_calls(message.tool_calls)
            if written is None:
                return render_tools_as_text(messages, ())
            content = f"{message.content}\n{written}" if message.content else written
            turns.append(replace(message, content=content, tool_calls=()))
        else:
            turns.append(message)
    if not keep_results:
        return render_tools_as_text(turns, ())
    return list(_merge_turns(turns, "assistant")) if merges_assistant else turns


class GenericFamily(ChatFamily):
    """The chat family for calls in plain JSON. A call is a JSON object at the start of a line, with
    the name of a tool. A Markdown code block around an object is part of the call. With a trigger,
    calls are parsed only after it.

    The model's own calls are also parsed, because some templates list no tools, but the model was
    trained to call tools."""

    plain_without_tools = True

    def __init__(
        self, own: ChatFamily | None = None, *, trigger: str | None = None, enforced: bool = False
    ) -> None:
        """own: the model's own family. trigger: the start marker of calls in the model's own
        family. enforced: whether a grammar enforces calls in plain JSON."""
        self._own = own or ChatFamily()
        self._trigger = trigger
        self.markers = self._own.markers
        self.reasoning_separator = self._own.reasoning_separator
        if trigger is not None:
            self.call_markers = (trigger,)
        elif not enforced:
            self.call_markers = self._own.call_markers

    def matches(self, template: str) -> bool:
        return False

    def parse_reasoning(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        tags: ReasoningTags,
        *,
        in_reasoning: bool,
    ) -> Resumable[None]:
        # white space at the start of the tag was already consumed
        bare = replace(tags, open=tags.open.lstrip())
        yield from super().parse_reasoning(reader, output, tools, bare, in_reasoning=in_reasoning)
        if (
            self.reasoning_separator
            and (yield from reader.accept(self.reasoning_separator)) is not None
        ):
            output.add_marker()

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        if self._trigger is not None:
            yield from super().parse_tool_calls(reader, output, tools)
            return
        names = {tool.name for tool in tools}
        fenced = False
        while (yield from reader.peek()):
            start = reader.hold()
            space = yield from reader.skip_space()
            opens = names and (yield from reader.accept(*_FENCE_STARTS)) is not None
            begins = names and (yield from reader.peek()) == "{"
            outcome = "none"
            reader.call_ends = ()
            if begins:
                outcome = yield from parse_call_object(reader, output, names=names)
            if outcome == "none":
                reader.rewind(start)
                output.add_content(reader.take(len(space)), start)
                yield from self._parse_line(reader, output, tools)
                continue
            reader.release()
            if outcome == "broken":
                yield from reader.read_until(on_text=lambda text, _: output.add_arguments(text))
            output.add_marker()
            fenced = (fenced or opens) and not (yield from _skip_fence_end(reader))

    def parse_call(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        mark: str,
        on_text: OnText,
    ) -> Resumable[bool]:
        if mark != self._trigger:
            return (yield from self._own.parse_call(reader, output, tools, mark, on_text))
        return (
            yield from parse_marked_call(
                reader, output, parse=parse_call_object, open=mark, ends=(mark,), on_text=on_text
            )
        )

    def _parse_line(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        """Parses the rest of a line, including its end, or up to a call in the model's own
        syntax."""
        position = reader.at
        marks = self.call_markers if tools else ()
        mark = yield from reader.read_until("\n", *marks, on_text=output.add_content)
        if mark == "\n":
            output.add_content("\n", reader.at - 1)
        elif mark is not None:
            yield from self.parse_call(reader, output, tools, mark, output.add_content)
        assert reader.at > position or reader.ended

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
    """Consumes the end of the code block after a call. Returns whether there was one."""
    behind = reader.hold()
    yield from reader.skip_space()
    if (yield from reader.accept(_FENCE_END)) is not None:
        reader.release()
        return True
    reader.rewind(behind)
    return False


def render_tools_as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Converts the conversation so that any template can render it. The tools are described in the
    system message, and calls and results are converted to assistant and user messages. tools: empty
    if only the history contains calls."""
    turns = list(_merge_turns(map(_render_message_as_text, messages), "user", "assistant"))
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
        result = Message(role="user", content=message.content, images=message.images)
        return prepend_text(result, f"Result{of}: ")
    if not message.tool_calls:
        return message
    calls = [
        f"{_call_prefix(call.name)}{call.arguments.strip() or '{}'}}}"
        for call in message.tool_calls
    ]
    parts = [message.content] if message.content else []
    return replace(message, content="\n".join([*parts, *calls]), tool_calls=())


def _merge_turns(messages: Iterable[Message], *roles: str) -> Iterator[Message]:
    """Merges consecutive messages of these roles. Many templates require that user and assistant
    turns alternate, and calls and results are separate messages."""
    last: Message | None = None
    for message in messages:
        if last is not None and last.role == message.role and message.role in roles:
            content, images = join_contents((last, message), "\n")
            last = replace(last, content=content, images=images)
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last
