"""Detects the capabilities of a chat template by rendering test conversations.

Knows: a short conversation with a tool call, workarounds for templates that cannot render it. Must
not know: Jinja, tokens, model names.

Each chat template has different requirements, and most templates do not declare them: they fail.
Clients of OpenAI's API may omit required information, such as the function name of a tool result or
the description of a tool, may send several calls in one turn, or may use other formats, such as
long call IDs. llama.cpp detects template capabilities in the same way (`common/chat.cpp`).
"""

import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from app.core.errors import AppError
from app.core.images import Image, PlacedImage
from app.core.requests import Message, Tool, ToolCall, prepend_text
from app.text.chat_template import ContentFormat
from app.text.message_folding import SYSTEM_ROLES, PlacementRules
from app.text.placement_probe import PROBE_TOOL_NAME, detect_placement

# The total time limit for all test renders, in seconds. A slower template is used without
# workarounds.
_DETECTION_TIMEOUT = 5.0

_CALL_ID = "call_0123456789abcdef01234567"
_USER_MESSAGE = Message(role="user", content="How warm is it?")
_SYSTEM_MESSAGE = Message(role="system", content="Answer-in-rhymes.")
_TOOL = Tool(
    name=PROBE_TOOL_NAME,
    description="Tells the weather.",
    parameters={
        "type": "object",
        "properties": {"place": {"type": "string", "description": "A place."}},
        "required": ["place"],
    },
)


_IMAGE = PlacedImage(
    offset=10,
    image=Image(data=b"", format="png", width=1, height=1, digest=b""),
)
_IMAGE_MESSAGE = Message(role="user", content="Look-here.Read-this.", images=(_IMAGE,))


class Render(Protocol):
    """The part of the signature of `ChatTemplate.render` that this module uses."""

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        string_arguments: bool = False,
        content_format: ContentFormat | None = None,
        **template_kwargs: Any,
    ) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """The features that a template supports.

    supports_system_role: the template renders system messages. supports_developer_role: it renders
    developer messages. supports_tools: it renders tool definitions. supports_tool_calls: it renders
    tool calls and results if the request has tools. supports_tool_calls_without_tools: it also
    renders them if the request has no tools. supports_tool_responses: it renders tool results, even
    if it does not render calls.

    The other fields describe required changes to the input. requires_tool_list: an empty list must
    be passed if there are no tools. requires_tool_description: every tool needs a description.
    requires_string_arguments: arguments must be passed as text. requires_short_call_ids: call IDs
    must consist of nine letters and digits. requires_single_calls: a turn must contain only one
    call. content_format: how contents and images are passed. placement: the positions at which the
    template keeps messages.
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
    content_format: ContentFormat = field(default_factory=ContentFormat)
    placement: PlacementRules = field(default_factory=PlacementRules)

    def format_tools(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        """Returns the tools in OpenAI's format, which templates expect."""
        given = [self._format_tool(tool) for tool in tools]
        return given if given or self.requires_tool_list else None

    def _format_tool(self, tool: Tool) -> dict[str, Any]:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None or self.requires_tool_description:
            function["description"] = tool.description or ""
        function["parameters"] = dict(tool.parameters)
        return {"type": "function", "function": function}

    def adapt_messages(self, messages: Iterable[Message]) -> list[Message]:
        """Adapts a conversation so that the template can render it."""
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


def detect_capabilities(
    render: Render, variants: Sequence[Mapping[str, Any]] = ({},), *, image_mark: str = ""
) -> TemplateCapabilities:
    """Detects the capabilities of the template behind `render`. variants: template variables for
    testing message positions, such as reasoning on and off. image_mark: the text that the template
    writes for an image; "" for a model that reads text only."""
    probe = _TemplateProbe(render)
    detected = TemplateCapabilities()
    if not probe.renders(detected, [_USER_MESSAGE]) and probe.renders(
        in_parts := replace(detected, content_format=ContentFormat(requires_parts=True))
    ):
        detected = in_parts
    if not probe.renders(detected, [_USER_MESSAGE]) and probe.renders(
        with_list := replace(detected, requires_tool_list=True)
    ):
        detected = with_list
    detected = replace(
        detected,
        supports_system_role=probe.renders(detected, [_SYSTEM_MESSAGE, _USER_MESSAGE])
        or not probe.renders(detected, [_USER_MESSAGE]),
        supports_developer_role=probe.renders(
            detected, [replace(_SYSTEM_MESSAGE, role="developer"), _USER_MESSAGE]
        ),
    )
    detected = replace(detected, supports_tools=probe.renders(detected, [_USER_MESSAGE], [_TOOL]))
    if detected.supports_tools and not probe.renders(
        detected, [_USER_MESSAGE], [replace(_TOOL, description=None)]
    ):
        detected = replace(detected, requires_tool_description=True)
    detected = _detect_tool_calls(probe, detected)

    def render_trial(messages: Sequence[Message], variables: Mapping[str, Any]) -> str | None:
        return probe.render(
            detected, messages, [_TOOL] if detected.supports_tool_calls else [], variables
        )

    roles = ("system", "developer") if detected.supports_developer_role else ("system",)
    placement = detect_placement(
        render_trial, variants, system_roles=roles, has_system=detected.supports_system_role
    )
    if image_mark:
        detected = replace(detected, content_format=_detect_images(probe, detected, image_mark))
    return replace(detected, placement=placement)


def _detect_images(
    probe: "_TemplateProbe", known: TemplateCapabilities, mark: str
) -> ContentFormat:
    """Detects the roles whose content may be a list of parts with an image."""
    before, after = "Look-here.", "Read-this."
    roles = ("user", "assistant", "tool", "system", "developer")
    format = replace(known.content_format, image_roles=frozenset(roles), image_text=mark)
    trial = replace(known, content_format=format)
    call, result = _build_call_round("1")
    conversations = {
        "user": [_IMAGE_MESSAGE],
        "assistant": [_USER_MESSAGE, replace(_IMAGE_MESSAGE, role="assistant"), _USER_MESSAGE],
        "tool": [
            _USER_MESSAGE,
            call,
            replace(_IMAGE_MESSAGE, role="tool", tool_call_id=result.tool_call_id),
        ],
        "system": [replace(_IMAGE_MESSAGE, role="system"), _USER_MESSAGE],
    }
    texts: dict[str, str] = {}
    for role, messages in conversations.items():
        tools = [_TOOL] if role == "tool" and known.supports_tool_calls else []
        text = probe.render(trial, messages, tools) or ""
        _, found, text = text.partition(before)
        text, found_after, _ = text.partition(after)
        if found and found_after and text.count(mark) == 1:
            texts[role] = text
    if "system" in texts:
        texts["developer"] = texts["system"]
    return replace(format, image_roles=frozenset(texts), image_text=texts.get("user", mark))


def _detect_tool_calls(
    probe: "_TemplateProbe", known: TemplateCapabilities
) -> TemplateCapabilities:
    """Detects support for calls and results, with as few changes to the input as possible."""
    single_call = [_USER_MESSAGE, *_build_call_round("1")]
    for changes in _subsets(("requires_short_call_ids", "requires_string_arguments")):
        trial = replace(known, **dict.fromkeys(changes, True))
        with_tools, without_tools = (
            probe.renders(trial, single_call, [_TOOL]),
            probe.renders(trial, single_call),
        )
        if not (with_tools and known.supports_tools) and not without_tools:
            continue
        trial = replace(
            trial,
            supports_tool_calls=with_tools and known.supports_tools,
            supports_tool_calls_without_tools=without_tools,
        )
        two = [_USER_MESSAGE, *_build_call_round("1", "2")]
        tools = [_TOOL] if trial.supports_tool_calls else []
        alike = replace(trial, requires_single_calls=True)
        if not probe.renders(trial, two, tools) and probe.renders(alike, two, tools):
            return alike
        return trial
    # the call, written as plain text
    messages = [
        _USER_MESSAGE,
        Message(role="assistant", content=_argument_value("1")),
        *_build_call_round("1")[1:],
    ]
    return replace(
        known,
        supports_tool_responses=probe.renders(
            known, messages, [_TOOL] if known.supports_tools else []
        ),
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
        """Returns whether the prompt contains all content of the messages and tools."""
        text = self.render(capabilities, messages, tools)
        return text is not None and all(word in text for word in _expected_texts(messages, tools))

    def render(
        self,
        capabilities: TemplateCapabilities,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str | None:
        """Returns the prompt, or None if the template rejects the conversation or the time limit is
        exceeded."""
        if time.monotonic() > self._deadline:
            return None
        turns = capabilities.adapt_messages(messages)
        try:
            return self._render(
                turns,
                tools=capabilities.format_tools(tools),
                string_arguments=capabilities.requires_string_arguments,
                content_format=capabilities.content_format,
                **variables,
            )
        except AppError:
            return None


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
    """Builds a turn with one call per number, followed by the results of the calls."""
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
    """Yields all subsets, smallest first."""
    for size in range(len(names) + 1):
        yield from itertools.combinations(names, size)


def add_tool_names(messages: Iterable[Message]) -> Iterator[Message]:
    """Adds the function names to tool results. OpenAI's clients omit them."""
    names: dict[str, str] = {}
    for message in messages:
        names.update((call.id, call.name) for call in message.tool_calls)
        name = names.get(message.tool_call_id or "")
        if message.role == "tool" and message.name is None and name is not None:
            yield replace(message, name=name)
        else:
            yield message


def _split_parallel_calls(turns: Sequence[Message]) -> Iterator[Message]:
    """Puts each call into its own turn, followed by its result."""
    index = 0
    while index < len(turns):
        turn = turns[index]
        index += 1
        results: list[Message] = []
        while turn.tool_calls and index < len(turns) and turns[index].role == "tool":
            results.append(turns[index])
            index += 1
        results_by_id = {result.tool_call_id: result for result in results}
        call_ids = [call.id for call in turn.tool_calls]
        if len(call_ids) < 2 or sorted(call_ids) != sorted(map(str, results_by_id)):
            yield from (turn, *results)
            continue
        for number, call in enumerate(turn.tool_calls):
            message = turn if number == 0 else replace(turn, content=None, reasoning=None)
            yield replace(message, tool_calls=(call,))
            yield results_by_id[call.id]


def _shorten_call_ids(turn: Message) -> Message:
    return replace(
        turn,
        tool_calls=tuple(replace(call, id=_shorten_id(call.id)) for call in turn.tool_calls),
        tool_call_id=None if turn.tool_call_id is None else _shorten_id(turn.tool_call_id),
    )


def _shorten_id(id: str) -> str:
    """Shortens a call ID deterministically, so that prefix cache hits are preserved."""
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:9]


def _merge_system_into_user(turns: Sequence[Message]) -> list[Message]:
    """Merges a leading system message into the first user message."""
    first = list(itertools.takewhile(lambda turn: turn.role in SYSTEM_ROLES, turns))
    if not first:
        return list(turns)
    rest = turns[len(first) :]
    instructions = "\n\n".join(turn.content or "" for turn in first)
    if not rest or rest[0].role != "user":
        return [Message(role="user", content=instructions), *rest]
    user, *remaining = rest
    return [prepend_text(user, f"{instructions}\n\n"), *remaining]
