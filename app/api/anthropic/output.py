"""Responses of /v1/messages: converts generate events to stream events or a message.

Knows: the format of content blocks, the stream events that build them, their order. Must not know:
request fields, except those that affect the response.

A non-streaming message is a fold over the same events that a stream would send.

    message_start (content_block_start content_block_delta* content_block_stop)* message_delta
    message_stop

Format: Anthropic's API reference, "Streaming Messages". Anthropic's SDKs fail if an index is
skipped, if usage is missing, or if arguments are not a prefix of a JSON object.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import orjson

from app.api.anthropic.errors import render_messages_error
from app.api.anthropic.tool_arguments import ArgumentsEncoder
from app.api.anthropic.tools import to_tool_use_id
from app.api.generate_endpoint import Progress
from app.api.opaque_reasoning import digest_reasoning, encode_reasoning
from app.core.errors import AppError
from app.core.events import (
    Finish,
    OutputEvent,
    PrefillProgress,
    PromptTokenIds,
    PromptTokenLogprobs,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from app.core.request_context import REQUEST_CONTEXT
from app.http.responses import JsonObject
from app.http.streaming import encode_sse_event

# The only service tier of this server.
_SERVICE_TIER = "standard"

BlockType = Literal["thinking", "text", "tool_use"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageMetadata:
    """Fields of a response known before generation starts. model: the name in the request.
    hides_thinking, manages_context: see `ParsedMessagesRequest`."""

    id: str
    model: str
    hides_thinking: bool = False
    manages_context: bool = False


class MessageBuilder:
    """Builds the stream events of a message from generate events."""

    def __init__(self, metadata: MessageMetadata) -> None:
        self._metadata = metadata
        self._started = False
        self._num_blocks = 0
        self._open: BlockType | None = None
        self._call_index: int | None = None
        self._arguments = ArgumentsEncoder()
        self._thinking: list[str] = []
        self._finish: Finish | None = None

    def start(self, prompt_tokens: int, cached_tokens: int) -> Iterator[JsonObject]:
        """Yields the first event, if it has not been sent yet."""
        if self._started:
            return
        self._started = True
        usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=0, cached_tokens=cached_tokens)
        yield {"type": "message_start", "message": self._render_start(usage)}

    def feed(self, event: OutputEvent) -> Iterator[JsonObject]:
        if isinstance(event, Finish):
            yield from self.start(event.usage.prompt_tokens, event.usage.cached_tokens)
            self._finish = event
            yield from self._close_block()
            return
        yield from self.start(0, 0)  # without progress events, only the last event has the counts
        match event:
            case TextDelta(text=text):
                if text:
                    yield from self._add_delta("text", {"type": "text_delta", "text": text})
            case ReasoningDelta(text=text):
                yield from self._add_thinking(text)
            case ToolCallDelta():
                yield from self._add_call(event)
            case PromptTokenIds() | PromptTokenLogprobs():
                raise AssertionError("no field requests token ids")
            case _:
                assert_never(event)

    def end(self) -> Iterator[JsonObject]:
        """Yields the last events, after `Finish` was fed."""
        assert self._finish is not None, "the output ended without Finish"
        reason = _stop_reason(self._finish)
        event: JsonObject = {
            "type": "message_delta",
            "delta": {
                "stop_reason": reason,
                "stop_sequence": self._finish.stop_string if reason == "stop_sequence" else None,
                "stop_details": None,
                "container": None,
            },
            "usage": _render_counts(self._finish.usage),
        }
        if self._metadata.manages_context:
            event["context_management"] = {"applied_edits": []}
        yield event
        yield {"type": "message_stop"}

    def _render_start(self, usage: Usage) -> JsonObject:
        return {
            "id": self._metadata.id,
            "type": "message",
            "role": "assistant",
            "model": self._metadata.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": {
                **_render_counts(usage),
                "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
                "service_tier": _SERVICE_TIER,
            },
        }

    def _add_thinking(self, text: str) -> Iterator[JsonObject]:
        yield from self._ensure_open("thinking")
        self._thinking.append(text)
        if not self._metadata.hides_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _add_call(self, event: ToolCallDelta) -> Iterator[JsonObject]:
        if event.call_index != self._call_index:
            assert event.id is not None
            assert event.name is not None
            self._call_index = event.call_index
            block: JsonObject = {"id": to_tool_use_id(event.id), "name": event.name, "input": {}}
            yield from self._open_block("tool_use", block)
        if piece := self._arguments.feed(event.arguments):
            yield self._delta({"type": "input_json_delta", "partial_json": piece})

    def _add_delta(self, kind: BlockType, delta: JsonObject) -> Iterator[JsonObject]:
        yield from self._ensure_open(kind)
        yield self._delta(delta)

    def _ensure_open(self, kind: Literal["thinking", "text"] | BlockType) -> Iterator[JsonObject]:
        if self._open != kind:
            empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            yield from self._open_block(kind, empty)

    def _open_block(self, kind: BlockType, block: JsonObject) -> Iterator[JsonObject]:
        yield from self._close_block()
        self._open = kind
        self._num_blocks += 1
        yield {
            "type": "content_block_start",
            "index": self._num_blocks - 1,
            "content_block": {"type": kind, **block},
        }

    def _close_block(self) -> Iterator[JsonObject]:
        match self._open:
            case None:
                return
            case "thinking":
                text, self._thinking = "".join(self._thinking), []
                sign = encode_reasoning if self._metadata.hides_thinking else digest_reasoning
                yield self._delta({"type": "signature_delta", "signature": sign(text)})
            case "tool_use":
                finish = self._finish
                cut = finish is not None and (
                    finish.reason == "length" or finish.stop_string is not None
                )
                if piece := self._arguments.flush(cut=cut):
                    yield self._delta({"type": "input_json_delta", "partial_json": piece})
                self._arguments = ArgumentsEncoder()
            case "text":
                pass
            case _:
                assert_never(self._open)
        self._open = None
        yield {"type": "content_block_stop", "index": self._num_blocks - 1}

    def _delta(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}


class MessageEventEncoder:
    """Encodes a streamed message. Implements `StreamEncoder`."""

    # an event rather than a comment, because clients ignore comments when they check for inactivity
    keep_alive = encode_sse_event({"type": "ping"}, "ping")

    def __init__(self, metadata: MessageMetadata) -> None:
        self._builder = MessageBuilder(metadata)

    def progress(self, event: Progress) -> bytes:
        """Encodes the first event, with the token counts of the first prefill progress event."""
        if not isinstance(event, PrefillProgress):
            return b""
        return _encode(self._builder.start(event.total_tokens, event.computed_tokens))

    def feed(self, event: OutputEvent) -> bytes:
        return _encode(self._builder.feed(event))

    def end(self) -> bytes:
        return _encode(self._builder.end())

    def fail(self, error: AppError) -> bytes:
        context = REQUEST_CONTEXT.get()
        request_id = "" if context is None else context.id
        return _encode([render_messages_error(error, request_id)])


def collect_message(metadata: MessageMetadata, events: Sequence[OutputEvent]) -> JsonObject:
    """Builds the body of a non-streaming message."""
    builder = MessageBuilder(metadata)
    stream = [one for event in events for one in builder.feed(event)]
    return fold_events([*stream, *builder.end()])


def fold_events(events: Iterable[JsonObject]) -> JsonObject:
    """Returns the message built from the events of a stream."""
    message: JsonObject = {}
    pieces: list[str] = []
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(dict(event["content_block"]))
                pieces = []
            case "content_block_delta":
                _apply_delta(message["content"][-1], event["delta"], pieces)
            case "content_block_stop":
                _complete_block(message["content"][-1], pieces)
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
                if "context_management" in event:
                    message["context_management"] = event["context_management"]
            case _:
                pass
    return message


def _apply_delta(block: JsonObject, delta: JsonObject, pieces: list[str]) -> None:
    match delta:
        case {"signature": signature}:
            block["signature"] = signature
        case {"text": piece} | {"thinking": piece} | {"partial_json": piece}:
            pieces.append(piece)
        case _:
            raise AssertionError(f"an unknown delta: {delta['type']}")


def _complete_block(block: JsonObject, pieces: Sequence[str]) -> None:
    text = "".join(pieces)
    match block["type"]:
        case "tool_use":
            block["input"] = orjson.loads(text or "{}")
        case "text":
            block |= {"text": text, "citations": None}
        case kind:
            block[kind] = text


def _encode(events: Iterable[JsonObject]) -> bytes:
    return b"".join(encode_sse_event(event, event["type"]) for event in events)


def _stop_reason(finish: Finish) -> str:
    match finish.reason:
        case "length":
            return "max_tokens"
        case "tool_calls":
            return "tool_use"
        case "stop":
            return "end_turn" if finish.stop_string is None else "stop_sequence"
        case _:
            assert_never(finish.reason)


def _render_counts(usage: Usage) -> dict[str, Any]:
    """Renders the token counts. Cached and computed prompt tokens are counted separately."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
    }
