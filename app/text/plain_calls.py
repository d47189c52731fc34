"""Calls for models whose template knows of none: told in words, written as JSON.

    {"name": "get_weather", "arguments": {"city": "Oslo"}}

Knows: how tools, calls and results are told to a model that was never trained on any. Must not
know: templates, tokens. It is also how every model writes calls that it must make and whose own
syntax cannot hold them to their schema.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from app.core.requests import Message, Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell, Tags
from app.text.syntax.call_object import call_object
from app.text.syntax.marked_calls import marked_calls
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait

# what models put around JSON
_FENCES, _FENCE_END = ("```json\n", "```tool_call\n", "```\n"), "```"

_FORM = '{"name": "…", "arguments": {…}}'


class Plain(ChatFamily):
    """A call is a JSON object at the beginning of a line, which names one of the tools; a block of
    Markdown around it belongs to it. Or it stands behind a trigger, and only there."""

    def __init__(self, restart: str = "", *, trigger: str | None = None) -> None:
        """restart: of the family whose models reason as they always do before such calls. trigger:
        what their own calls begin with."""
        self.restart = restart
        self._trigger = trigger

    def claims(self, template: str) -> bool:
        return False

    def reasoning(self, reader: Reader, pieces: Pieces, tags: Tags, *, opened: bool) -> Wait[None]:
        # white space before the tag has been read already, where the tag begins with some
        bare = replace(tags, open=tags.open.lstrip())
        yield from super().reasoning(reader, pieces, bare, opened=opened)
        if self.restart and (yield from reader.accept(self.restart)) is not None:
            pieces.mark()

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        names = {tool.name for tool in tools}
        if self._trigger is not None:
            yield from marked_calls(reader, pieces, tools, read=call_object, open=self._trigger)
            return
        fenced = False
        while (yield from reader.peek()):
            start = reader.hold()
            space = yield from reader.space()
            opens = names and (yield from reader.accept(*_FENCES)) is not None
            begins = names and (yield from reader.peek()) == "{"
            outcome = "none"
            if begins:
                outcome = yield from call_object(reader, pieces, names=names)
            if outcome == "none":
                reader.rewind(start)
                pieces.say(reader.take(len(space)), start)
                yield from _line(reader, pieces)
                continue
            reader.release()
            if outcome == "broken":
                yield from reader.until(take=lambda text, _: pieces.arguments(text))
            pieces.mark()
            fenced = (fenced or opens) and not (yield from _fence_ends(reader))

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        before = self._trigger or ""
        return CallSyntax(
            calls=tuple(
                f"{spell(before + _begin(tool.name))} {json(tool)} {spell('}')}" for tool in tools
            ),
            between=spell("\n"),
            trigger=self._trigger,
        )


def _begin(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


def _fence_ends(reader: Reader) -> Wait[bool]:
    """Whether the block does behind a call; then its end is taken."""
    behind = reader.hold()
    yield from reader.space()
    if (yield from reader.accept(_FENCE_END)) is not None:
        reader.release()
        return True
    reader.rewind(behind)
    return False


def _line(reader: Reader, pieces: Pieces) -> Wait[None]:
    """The rest of a line, its end included."""
    at = reader.at
    if (yield from reader.until("\n", take=pieces.say)) is not None:
        pieces.say("\n", reader.at - 1)
    assert reader.at > at or reader.ended


def told(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation in words that any template can render: the tools in the system message,
    calls and their results in what the assistant and the user say. tools: may be none, where only
    the history knows of calls."""
    turns = list(_merged(map(_in_words, messages)))
    if not tools:
        return turns
    offer = _offer(tools)
    if turns and turns[0].role in ("system", "developer"):
        first = turns[0]
        return [replace(first, content=f"{first.content or ''}\n\n{offer}"), *turns[1:]]
    return [Message(role="system", content=offer), *turns]


def _offer(tools: Sequence[Tool]) -> str:
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
        f"To call one, answer with nothing but {_FORM} and wait for its result. "
        "For several calls, write one object a line.",
    ]
    return "\n".join(lines)


def _in_words(message: Message) -> Message:
    if message.role == "tool":
        of = f" of {message.name}" if message.name else ""
        return Message(role="user", content=f"Result{of}: {message.content or ''}")
    if not message.tool_calls:
        return message
    calls = [
        f"{_begin(call.name)}{call.arguments.strip() or '{}'}}}" for call in message.tool_calls
    ]
    said = [message.content] if message.content else []
    return replace(message, content="\n".join([*said, *calls]), tool_calls=())


def _merged(messages: Iterator[Message]) -> Iterator[Message]:
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
