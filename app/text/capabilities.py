"""Capabilities of a chat template, detected by rendering test conversations.

Knows: a short conversation with a tool call, workarounds for templates that fail on it. Must not
know: Jinja, tokens, whose template it is.

Templates are written for the input of their authors. OpenAI's clients send less (a result without
the name of its function, a tool without a description), more (two calls in a turn) and other forms
(long ids). Each template has different requirements, and most only show them by failing. llama.cpp
detects them the same way (`common/chat.cpp`, its template capabilities).
"""

import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from app.core.errors import AppError
from app.core.requests import Message, Tool, ToolCall

# Seconds for all test renders; a slower template is used without workarounds.
_DETECTION_TIMEOUT = 5.0

_SYSTEM_ROLES = ("system", "developer")

_CALL_ID = "call_0123456789abcdef01234567"
_USER_MESSAGE = Message(role="user", content="How warm is it?")
_SYSTEM_MESSAGE = Message(role="system", content="Answer-in-rhymes.")
_TOOL = Tool(
    name="get_weather",
    description="Tells the weather.",
    parameters={
        "type": "object",
        "properties": {"place": {"type": "string", "description": "A place."}},
        "required": ["place"],
    },
)


class Render(Protocol):
    """The signature of `ChatTemplate.render`, as far as needed here."""

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        string_arguments: bool = False,
    ) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """What a template supports.

    supports_system_role: system messages. supports_developer_role: developer messages.
    supports_tools: tools. supports_tool_calls: calls and their results, together with tools.
    supports_tool_calls_without_tools: the same without tools. supports_tool_responses: results,
    even if calls are not supported.

    Required changes to the input: requires_tool_list: no tools must be an empty list.
    requires_tool_description: every tool needs a description. requires_string_arguments: arguments
    must be text. requires_short_call_ids: ids must be nine letters and digits.
    requires_single_calls: a turn can have only one call.
    """

    supports_system_role: bool = True
    supports_developer_role: bool = True
    supports_tools: bool = False
    supports_tool_calls: bool = False
    supports_tool_calls_without_tools: bool = False
    supports_tool_responses: bool = False
    requires_tool_list: bool = False
    requires_tool_description: bool = False
    requires_string_arguments: bool = False
    requires_short_call_ids: bool = False
    requires_single_calls: bool = False

    def format_tools(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        """Returns tools in OpenAI's format, which templates expect."""
        given = [self._format_tool(tool) for tool in tools]
        return given if given or self.requires_tool_list else None

    def _format_tool(self, tool: Tool) -> dict[str, Any]:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None or self.requires_tool_description:
            function["description"] = tool.description or ""
        function["parameters"] = dict(tool.parameters)
        return {"type": "function", "function": function}

    def adapt_messages(self, messages: Iterable[Message]) -> list[Message]:
        """Adapts a conversation, so that the template can render it."""
        turns = list(add_tool_names(messages))
        if self.requires_single_calls:
            turns = list(_split_parallel_calls(turns))
        if self.requires_short_call_ids:
            turns = [_shorten_call_ids(turn) for turn in turns]
        if not self.supports_developer_role:
            turns = [
                replace(turn, role="system") if turn.role == "developer" else turn for turn in turns
            ]
        return turns if self.supports_system_role else _merge_system_into_user(turns)


def detect_capabilities(render: Render) -> TemplateCapabilities:
    """Detects the capabilities of the template behind `render`."""
    probe = _TemplateProbe(render)
    known = TemplateCapabilities()
    if not probe.renders(known, [_USER_MESSAGE]) and probe.renders(
        with_list := replace(known, requires_tool_list=True)
    ):
        known = with_list
    known = replace(
        known,
        supports_system_role=probe.renders(known, [_SYSTEM_MESSAGE, _USER_MESSAGE])
        or not probe.renders(known, [_USER_MESSAGE]),
        supports_developer_role=probe.renders(
            known, [replace(_SYSTEM_MESSAGE, role="developer"), _USER_MESSAGE]
        ),
    )
    known = replace(known, supports_tools=probe.renders(known, [_USER_MESSAGE], [_TOOL]))
    if known.supports_tools and not probe.renders(
        known, [_USER_MESSAGE], [replace(_TOOL, description=None)]
    ):
        known = replace(known, requires_tool_description=True)
    return _detect_tool_calls(probe, known)


def _detect_tool_calls(
    probe: "_TemplateProbe", known: TemplateCapabilities
) -> TemplateCapabilities:
    """Detects how calls and results are rendered, with the fewest changes."""
    one = [_USER_MESSAGE, *_build_call_round("1")]
    for changes in _subsets(("requires_short_call_ids", "requires_string_arguments")):
        tried = replace(known, **dict.fromkeys(changes, True))
        beside, alone = probe.renders(tried, one, [_TOOL]), probe.renders(tried, one)
        if not (beside and known.supports_tools) and not alone:
            continue
        tried = replace(
            tried,
            supports_tool_calls=beside and known.supports_tools,
            supports_tool_calls_without_tools=alone,
        )
        two = [_USER_MESSAGE, *_build_call_round("1", "2")]
        tools = [_TOOL] if tried.supports_tool_calls else []
        alike = replace(tried, requires_single_calls=True)
        if not probe.renders(tried, two, tools) and probe.renders(alike, two, tools):
            return alike
        return tried
    # the call written as plain text
    said = [
        _USER_MESSAGE,
        Message(role="assistant", content=_argument_value("1")),
        *_build_call_round("1")[1:],
    ]
    return replace(
        known,
        supports_tool_responses=probe.renders(known, said, [_TOOL] if known.supports_tools else []),
    )


class _TemplateProbe:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._deadline = time.monotonic() + _DETECTION_TIMEOUT

    def renders(
        self,
        capabilities: TemplateCapabilities,
        messages: Sequence[Message] = (_USER_MESSAGE,),
        tools: Sequence[Tool] = (),
    ) -> bool:
        """Returns whether the prompt contains everything in the messages and tools."""
        if time.monotonic() > self._deadline:
            return False
        turns = capabilities.adapt_messages(messages)
        try:
            text = self._render(
                turns,
                tools=capabilities.format_tools(tools),
                string_arguments=capabilities.requires_string_arguments,
            )
        except AppError:
            return False
        return all(word in text for word in _expected_texts(messages, tools))


def _expected_texts(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[str]:
    for message in messages:
        yield message.content or ""
        for call in message.tool_calls:
            yield call.name
            yield _argument_value(call.id)
    for tool in tools:
        yield tool.name
        yield "place"


def _build_call_round(*numbers: str) -> list[Message]:
    """Builds a turn with one call per number, and their results."""
    ids = [_CALL_ID + number for number in numbers]
    calls = tuple(
        ToolCall(id=id, name=_TOOL.name, arguments=f'{{"place": "{_argument_value(id)}"}}')
        for id in ids
    )
    results = (Message(role="tool", content=f"warm-{id[-1]}", tool_call_id=id) for id in ids)
    return [Message(role="assistant", content=None, tool_calls=calls), *results]


def _argument_value(id: str) -> str:
    return f"Oslo{id[-1]}"


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields all subsets, small ones first."""
    for size in range(len(names) + 1):
        yield from itertools.combinations(names, size)


def add_tool_names(messages: Iterable[Message]) -> Iterator[Message]:
    """Adds the function names to results, which OpenAI's clients omit."""
    names: dict[str, str] = {}
    for message in messages:
        names.update((call.id, call.name) for call in message.tool_calls)
        name = names.get(message.tool_call_id or "")
        if message.role == "tool" and message.name is None and name is not None:
            yield replace(message, name=name)
        else:
            yield message


def _split_parallel_calls(turns: Sequence[Message]) -> Iterator[Message]:
    """Puts each call into a turn of its own, followed by its result."""
    place = 0
    while place < len(turns):
        turn = turns[place]
        place += 1
        results: list[Message] = []
        while turn.tool_calls and place < len(turns) and turns[place].role == "tool":
            results.append(turns[place])
            place += 1
        answered = {result.tool_call_id: result for result in results}
        wanted = [call.id for call in turn.tool_calls]
        if len(wanted) < 2 or sorted(wanted) != sorted(map(str, answered)):
            yield from (turn, *results)
            continue
        for number, call in enumerate(turn.tool_calls):
            said = turn if number == 0 else replace(turn, content=None, reasoning=None)
            yield replace(said, tool_calls=(call,))
            yield answered[call.id]


def _shorten_call_ids(turn: Message) -> Message:
    return replace(
        turn,
        tool_calls=tuple(replace(call, id=_shorten_id(call.id)) for call in turn.tool_calls),
        tool_call_id=None if turn.tool_call_id is None else _shorten_id(turn.tool_call_id),
    )


def _shorten_id(id: str) -> str:
    """Shortens an id deterministically, so that cached prefixes still match."""
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:9]


def _merge_system_into_user(turns: Sequence[Message]) -> list[Message]:
    """Merges a leading system message into the user's message."""
    first = list(itertools.takewhile(lambda turn: turn.role in _SYSTEM_ROLES, turns))
    if not first:
        return list(turns)
    rest = turns[len(first) :]
    told = "\n\n".join(turn.content or "" for turn in first)
    if not rest or rest[0].role != "user":
        return [Message(role="user", content=told), *rest]
    user, *others = rest
    return [replace(user, content=f"{told}\n\n{user.content or ''}"), *others]
