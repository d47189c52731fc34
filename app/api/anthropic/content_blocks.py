"""Anthropic's content blocks: converts JSON to text, reasoning, tool calls and tool results.

Knows: every type of block, the roles that may use it, how blocks are converted to text. Must not
know: the order of messages, chat templates.

For blocks that a text model cannot process (images, PDFs), see app/api/attachments.py. Blocks that
only Anthropic's servers understand (server tools, encrypted reasoning) are omitted.
`cache_control` and some other attributes of blocks have no effect, because the prefix cache looks
up prefixes by their tokens. Unknown attributes are ignored and reported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import orjson

from app.api.anthropic.tool_use_ids import to_call_id
from app.api.anthropic.tools import describe_addition, describe_removal
from app.api.attachments import peek, read_attachment
from app.api.fields import Fields, as_array, invalid_request, quote_value
from app.api.opaque_reasoning import decode_reasoning
from app.core.requests import Message, ToolCall

# blocks from Anthropic's servers that are encrypted or have no meaning here
_OMITTED_TYPES = frozenset(
    {
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "container_upload",
        "fallback",
        "mcp_tool_result",
        "mcp_tool_use",
        "redacted_thinking",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)


# attributes without effect: cache breakpoints, sources of a text, who made a call
_ACCEPTED_ATTRIBUTES = ("cache_control", "caller", "citations")


@dataclass(slots=True)
class MessageContent:
    """The content of one message, or of consecutive messages with the same role. texts: paragraphs,
    or the fragments of an assistant message. results: tool results, which come before the texts.
    omitted: the types of the omitted blocks."""

    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    results: list[Message] = field(default_factory=list[Message])
    omitted: set[str] = field(default_factory=set[str])

    def extend(self, other: "MessageContent") -> None:
        self.texts += other.texts
        self.reasoning += other.reasoning
        self.calls += other.calls
        self.results += other.results
        self.omitted |= other.omitted


def has_tool_result(value: object) -> bool:
    """Returns whether content that is not yet checked contains a tool result."""
    blocks = as_array(value) or ()
    return any(peek(block, "type") == "tool_result" for block in blocks)


def read_content(value: object, path: str, role: str, *, omit: bool) -> MessageContent:
    """Reads the content of a message: a string or an array of blocks. role: user, assistant or
    system. omit: whether images and files are omitted, rather than rejected."""
    content = MessageContent()
    if value is None or isinstance(value, str):
        if value:
            content.texts.append(value)
        return content
    for block, at in _iter_blocks(value, path):
        kind = block.required_string("type")
        if kind in _OMITTED_TYPES:
            content.omitted.add(kind)
            continue
        if (reader := _READERS[role].get(kind)) is not None:
            reader(block, at, content)
        elif kind in _TEXT_READERS and role == "user":
            _add_text(_TEXT_READERS[kind](block, at, omit=omit), content)
        else:
            raise _unsupported_block(at, kind, tuple(_READERS[role]))
        block.ignore_unknown(*_ACCEPTED_ATTRIBUTES)
    return content


def read_texts(value: object, path: str, *, omit: bool = False) -> list[str]:
    """Reads the texts of a string or an array of blocks. Leaves out empty texts. omit: as in
    `read_content`."""
    if isinstance(value, str):
        return [value] if value else []
    texts: list[str] = []
    for block, at in _iter_blocks(value, path):
        kind = block.required_string("type")
        if kind not in _TEXT_READERS:
            raise _unsupported_block(at, kind, tuple(_TEXT_READERS))
        texts.append(_TEXT_READERS[kind](block, at, omit=omit))
        block.ignore_unknown(*_ACCEPTED_ATTRIBUTES)
    return [text for text in texts if text]


def _iter_blocks(value: object, path: str) -> list[tuple[Fields, str]]:
    blocks = as_array(value)
    if blocks is None:
        raise invalid_request(
            path, f"{path} must be a string or an array of blocks, not {quote_value(value)}"
        )
    paths = [f"{path}.{place}" for place in range(len(blocks))]
    return [(Fields.from_value(block, at), at) for block, at in zip(blocks, paths, strict=True)]


def _unsupported_block(path: str, kind: str, supported: Sequence[str]) -> Exception:
    allowed = ", ".join(dict.fromkeys(supported))
    return invalid_request(
        path, f"{path}: a block of type {quote_value(kind)} is not supported here: use {allowed}"
    )


# Blocks that are converted to text


def _text(block: Fields, path: str, *, omit: bool) -> str:
    return block.required_string("text")


def _image(block: Fields, path: str, *, omit: bool) -> str:
    block.value("source")
    return read_attachment("image", path, omit=omit)


def _document(block: Fields, path: str, *, omit: bool) -> str:
    source_path = block.path("source")
    source = Fields.from_value(block.required("source"), source_path)
    kind = source.required_string("type")
    if kind == "text":
        text = source.required_string("data")
    elif kind == "content":
        text = _read_plain_text(source.required("content"), source.path("content"))
    elif omit:
        text = read_attachment("file", path, omit=True)
    else:
        raise invalid_request(
            source_path,
            f"{source_path}: a document from {quote_value(kind)} is not supported: send its text "
            "as a source of type text or content",
        )
    return _join(block.string("title"), block.string("context"), text)


def _search_result(block: Fields, path: str, *, omit: bool) -> str:
    text = _read_plain_text(block.required("content"), block.path("content"))
    return _join(block.string("title"), block.required_string("source"), text)


def _tool_reference(block: Fields, path: str, *, omit: bool) -> str:
    return f"Tool: {block.required_string('tool_name')}"


def _compaction(block: Fields, path: str) -> str:
    """Returns the summary of the conversation before this block."""
    return block.string("content") or ""


def _read_plain_text(value: object, path: str) -> str:
    """Reads a string or text blocks. Documents cannot be nested."""
    if isinstance(value, str):
        return value
    texts: list[str] = []
    for block, at in _iter_blocks(value, path):
        if (kind := block.required_string("type")) != "text":
            raise _unsupported_block(at, kind, ("text",))
        texts.append(block.required_string("text"))
    return _join(*texts)


def _join(*texts: str | None) -> str:
    return "\n".join(filter(None, texts))


class _TextReader(Protocol):
    def __call__(self, block: Fields, path: str, *, omit: bool) -> str: ...


_TEXT_READERS: Mapping[str, _TextReader] = {
    "text": _text,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
}


# Blocks that are specific to one role


def _add_text(text: str, content: MessageContent) -> None:
    if text:
        content.texts.append(text)


def _read_text_block(block: Fields, path: str, content: MessageContent) -> None:
    _add_text(block.required_string("text"), content)


def _read_compaction(block: Fields, path: str, content: MessageContent) -> None:
    _add_text(_compaction(block, path), content)


def _read_thinking(block: Fields, path: str, content: MessageContent) -> None:
    """Reads reasoning. The signature is not verified, but it may contain the text."""
    text = block.string("thinking") or decode_reasoning(block.string("signature") or "")
    if text:
        content.reasoning.append(text)


def _read_tool_use(block: Fields, path: str, content: MessageContent) -> None:
    """Reads a tool call. The order of the keys in its input is preserved, because a different order
    would change the prompt."""
    input_ = block.mapping("input") or {}
    content.calls.append(
        ToolCall(
            id=to_call_id(block.required_string("id")),
            name=block.required_string("name"),
            arguments=orjson.dumps(input_).decode(),
        )
    )


def _read_tool_result(block: Fields, path: str, content: MessageContent) -> None:
    value = block.value("content")
    content.results.append(
        Message(
            role="tool",
            content="\n".join(read_texts(value or "", block.path("content"), omit=True)),
            tool_call_id=to_call_id(block.required_string("tool_use_id")),
            is_error=block.boolean("is_error") or False,
        )
    )


def _read_addition(block: Fields, path: str, content: MessageContent) -> None:
    _add_text(describe_addition(block), content)


def _read_removal(block: Fields, path: str, content: MessageContent) -> None:
    _add_text(describe_removal(block), content)


_Reader = Callable[[Fields, str, MessageContent], None]

_READERS: Mapping[str, Mapping[str, _Reader]] = {
    "user": {
        "text": _read_text_block,
        "tool_result": _read_tool_result,
        "compaction": _read_compaction,
    },
    "assistant": {
        "text": _read_text_block,
        "thinking": _read_thinking,
        "tool_use": _read_tool_use,
        "compaction": _read_compaction,
    },
    "system": {
        "text": _read_text_block,
        "tool_addition": _read_addition,
        "tool_removal": _read_removal,
    },
}
