"""Anthropic's content blocks: converts their structs to text, reasoning, calls and tool results.

Knows: every type of block, the roles that may use it, how blocks are converted to text. Must not
know: the order of messages, chat templates.

For images and PDFs, see app/api/attachments.py. Blocks that only Anthropic's servers understand
(server tools, encrypted reasoning) are omitted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from app.api.anthropic.tools import describe_addition, describe_removal, to_call_id
from app.api.attachments import (
    read_attachment,
    read_image_data,
    read_image_url,
    refuse_image_file,
)
from app.api.fields import invalid_request, quote_value
from app.api.opaque_reasoning import decode_reasoning
from app.api.schema.anthropic import OMITTED_BLOCKS, Block, PlainBlock, Source, TextBlock
from app.api.schema.decode import decode_object, require
from app.core.images import ContentPart, PlacedImage, join_parts
from app.core.requests import Message, ToolCall

# The types that are converted to text, the same with images, and the types that each role may use.
_TEXT_TYPES = ("text", "document", "search_result", "tool_reference")
_RESULT_TYPES = ("text", "image", *_TEXT_TYPES[1:])
_TYPES: Mapping[str, Sequence[str]] = {
    "user": ("text", "tool_result", "compaction", *_RESULT_TYPES[1:]),
    "assistant": ("text", "thinking", "tool_use", "compaction"),
    "system": ("text", "tool_addition", "tool_removal"),
}


@dataclass(slots=True)
class MessageContent:
    """The content of one message, or of consecutive messages with the same role. parts: paragraphs
    and images, or the fragments of an assistant message. results: tool results, which come before
    the parts. omitted: the types of the omitted blocks."""

    parts: list[ContentPart] = field(default_factory=list[ContentPart])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    results: list[Message] = field(default_factory=list[Message])
    omitted: set[str] = field(default_factory=set[str])

    def extend(self, other: "MessageContent") -> None:
        self.parts += other.parts
        self.reasoning += other.reasoning
        self.calls += other.calls
        self.results += other.results
        self.omitted |= other.omitted


def has_tool_result(content: str | Sequence[Block] | None) -> bool:
    return not isinstance(content, str) and any(
        block.type == "tool_result" for block in content or ()
    )


def build_content(
    content: str | Sequence[Block] | None, path: str, role: str, *, omit: bool
) -> MessageContent:
    """Converts the content of a message. role: user, assistant or system. omit: whether images and
    files are omitted, rather than rejected."""
    if content is None or isinstance(content, str):
        return MessageContent(parts=[content] if content else [])
    built = MessageContent()
    for index, block in enumerate(content):
        at = f"{path}.{index}"
        if block.type in OMITTED_BLOCKS:
            built.omitted.add(block.type)
            continue
        _check_type(block, at, _TYPES[role])
        if part := _add_block(block, at, built, omit=omit):
            built.parts.append(part)
    return built


def build_texts(content: str | Sequence[TextBlock] | None, path: str) -> list[str]:
    """Returns the texts of a string or of blocks that cannot be images. Leaves out empty texts."""
    if content is None or isinstance(content, str):
        return [content] if content else []
    texts: list[str] = []
    for index, block in enumerate(content):
        _check_type(block, f"{path}.{index}", _TEXT_TYPES)
        texts.append(_build_text(block, f"{path}.{index}", omit=False))
    return [text for text in texts if text]


def _build_result(
    content: str | Sequence[TextBlock] | None, path: str
) -> tuple[str, tuple[PlacedImage, ...]]:
    """Returns the text and the images of a tool result."""
    if content is None or isinstance(content, str):
        return content or "", ()
    parts: list[ContentPart] = []
    for index, block in enumerate(content):
        _check_type(block, f"{path}.{index}", _RESULT_TYPES)
        parts.append(_build_part(block, f"{path}.{index}", omit=True))
    return join_parts(filter(None, parts))


def _check_type(block: PlainBlock, path: str, supported: Sequence[str]) -> None:
    if block.type not in supported:
        raise invalid_request(
            path,
            f"{path}: a block of type {quote_value(block.type)} is not supported here: use "
            f"{', '.join(supported)}",
        )


def _add_block(
    block: Block, path: str, content: MessageContent, *, omit: bool
) -> ContentPart | None:
    """Adds the content of a block, or returns its text or image."""
    match block.type:
        case "thinking":
            # the signature is not verified, but it may contain the text
            if text := block.thinking or decode_reasoning(block.signature or ""):
                content.reasoning.append(text)
        case "tool_use":
            # the order of the keys is preserved, because a different order would change the prompt
            input_ = decode_object(block.input, f"{path}.input") or {}
            content.calls.append(
                ToolCall(
                    id=to_call_id(require(block.id, f"{path}.id")),
                    name=require(block.name, f"{path}.name"),
                    arguments=orjson.dumps(input_).decode(),
                )
            )
        case "tool_result":
            text, images = _build_result(block.content, f"{path}.content")
            content.results.append(
                Message(
                    role="tool",
                    content=text,
                    images=images,
                    tool_call_id=to_call_id(require(block.tool_use_id, f"{path}.tool_use_id")),
                    is_error=block.is_error or False,
                )
            )
        case "compaction":  # a summary of the conversation before this block
            return _require_string(block.content or "", f"{path}.content")
        case "tool_addition":
            return describe_addition(require(block.tool, f"{path}.tool"), f"{path}.tool")
        case "tool_removal":
            return describe_removal(require(block.tool, f"{path}.tool"), f"{path}.tool")
        case _:
            return _build_part(block, path, omit=omit)
    return None


def _build_part(block: TextBlock, path: str, *, omit: bool) -> ContentPart:
    if block.type == "image":
        return _build_image(block, path, omit=omit)
    return _build_text(block, path, omit=omit)


def _build_text(block: TextBlock, path: str, *, omit: bool) -> str:
    match block.type:
        case "document":
            return _build_document(block, path, omit=omit)
        case "search_result":
            content = require(block.content, f"{path}.content")
            text = _build_plain_text(content, f"{path}.content")
            return _join(block.title, _require_string(block.source, f"{path}.source"), text)
        case "tool_reference":
            return f"Tool: {require(block.tool_name, f'{path}.tool_name')}"
        case _:
            return require(block.text, f"{path}.text")


def _build_image(block: TextBlock, path: str, *, omit: bool) -> ContentPart:
    source = _require_source(block, path)
    match require(source.type, f"{path}.source.type"):
        case "base64":
            return read_image_data(source.data, path, omit=omit)
        case "url":
            return read_image_url(source.url, path, omit=omit)
        case "file":
            return refuse_image_file(path, "a source of type file", omit=omit)
        case other:
            at = f"{path}.source.type"
            message = f"{at} of an image must be 'base64' or 'url', not {quote_value(other)}"
            raise invalid_request(at, message)


def _build_document(block: TextBlock, path: str, *, omit: bool) -> str:
    at = f"{path}.source"
    source = _require_source(block, path)
    kind = require(source.type, f"{at}.type")
    if kind == "text":
        text = require(source.data, f"{at}.data")
    elif kind == "content":
        text = _build_plain_text(require(source.content, f"{at}.content"), f"{at}.content")
    elif omit:
        text = read_attachment("file", path, omit=True)
    else:
        raise invalid_request(
            at,
            f"{at}: a document from {quote_value(kind)} is not supported: send its text as a "
            "source of type text or content",
        )
    return _join(block.title, block.context, text)


def _require_source(block: TextBlock, path: str) -> Source:
    source = require(block.source, f"{path}.source")
    if not isinstance(source, Source):
        at = f"{path}.source"
        raise invalid_request(at, f"{at} must be an object, not {quote_value(source)}")
    return source


def _build_plain_text(content: str | Sequence[PlainBlock], path: str) -> str:
    """Returns a string or the text of text blocks. Documents cannot be nested."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, block in enumerate(content):
        _check_type(block, f"{path}.{index}", ("text",))
        texts.append(require(block.text, f"{path}.{index}.text"))
    return _join(*texts)


def _require_string(value: object, path: str) -> str:
    value = require(value, path)
    if not isinstance(value, str):
        raise invalid_request(path, f"{path} must be a string, not {quote_value(value)}")
    return value


def _join(*texts: str | None) -> str:
    return "\n".join(filter(None, texts))
