"""Responses of /v1/responses: converts generate events to stream events and a response object.

Knows: the format of output items, the stream events that build them, their order. Must not know:
response storage, the request, except for the fields that a response repeats.

One builder is used for both modes: a stream ends with the same object that a non-streaming request
returns.

Format: OpenAI's API reference, `Response` and `ResponseStreamEvent`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from app.api.generate_endpoint import Progress
from app.api.openai.output import UsageTotals
from app.api.responses.output_items import (
    CallItem,
    OutputItem,
    TextItem,
    create_call_item,
)
from app.api.responses.tools import ResponseTools
from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Finish,
    OutputEvent,
    PrefillProgress,
    PromptTokenIds,
    PromptTokenLogprobs,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from app.http.responses import JsonObject, render_error
from app.http.streaming import encode_sse_event

OnComplete = Callable[[JsonObject], None]
"""A callback that receives the complete response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseMetadata:
    """Response fields that are known before generation starts. created: the creation time as Unix
    time. echo: the fields that repeat the request. tools: the tools that the model may call.
    encrypted_reasoning: whether reasoning items have `encrypted_content`."""

    id: str
    created: int
    echo: JsonObject
    tools: ResponseTools = field(default_factory=ResponseTools)
    encrypted_reasoning: bool = False


class ResponseBuilder:
    """Builds a response from events. `feed` returns the stream events without sequence numbers."""

    def __init__(self, metadata: ResponseMetadata) -> None:
        self._metadata = metadata
        self._items: list[OutputItem] = []
        self._open_item: OutputItem | None = None
        self._call_index: int | None = None
        self._pending_logprobs: list[TokenLogprob] = []  # of tokens whose text is incomplete
        self._finish: Finish | None = None

    def begin(self) -> Iterator[JsonObject]:
        yield {"type": "response.created", "response": self._response("in_progress")}
        yield from self.keep_alive()

    def keep_alive(self) -> Iterator[JsonObject]:
        yield {"type": "response.in_progress", "response": self._response("in_progress")}

    def feed(self, event: OutputEvent) -> Iterator[JsonObject]:
        match event:
            case TextDelta():
                yield from self._add_text(event)
            case ReasoningDelta(text=text):
                self._pending_logprobs.clear()
                yield from self._ensure_open("reasoning")
                assert isinstance(self._open_item, TextItem)
                yield self._open_item.add_text(text)
            case ToolCallDelta():
                yield from self._add_call(event)
            case Finish():
                yield from self._end_last_item(event)
            case PromptTokenIds() | PromptTokenLogprobs():
                raise AssertionError("token IDs were not requested")
            case _:
                assert_never(event)

    def build(self) -> JsonObject:
        """Returns the response. Call this after `Finish` was fed."""
        assert self._finish is not None, "a response ended without Finish"
        status = "incomplete" if self._finish.reason == "length" else "completed"
        return self._response(status)

    def build_failed(self, error: AppError) -> JsonObject:
        """Returns the incomplete response with its error."""
        for _ in self._close_item("incomplete"):
            pass
        return self._response("failed", error)

    def _add_text(self, event: TextDelta) -> Iterator[JsonObject]:
        self._pending_logprobs += event.logprobs
        if not event.text:
            return
        yield from self._ensure_open("message")
        assert isinstance(self._open_item, TextItem)
        logprobs, self._pending_logprobs = self._pending_logprobs, []
        yield self._open_item.add_text(event.text, logprobs)

    def _add_call(self, event: ToolCallDelta) -> Iterator[JsonObject]:
        self._pending_logprobs.clear()
        if event.call_index != self._call_index:
            assert event.id is not None
            assert event.name is not None
            self._call_index = event.call_index
            tool = self._metadata.tools.find(event.name)
            call = create_call_item(len(self._items), call_id=event.id, tool=tool)
            yield from self._start_item(call)
        if event.arguments:
            assert isinstance(self._open_item, CallItem)
            yield from self._open_item.add_arguments(event.arguments)

    def _end_last_item(self, event: Finish) -> Iterator[JsonObject]:
        self._finish = event
        cut = event.reason == "length"
        without_output = all(item.kind == "reasoning" for item in self._items)
        if without_output and not cut:
            # an empty output is also a valid message
            yield from self._ensure_open("message")
        if isinstance(self._open_item, TextItem):
            self._open_item.add_logprobs(self._pending_logprobs)
        yield from self._close_item("incomplete" if cut else "completed")

    def _ensure_open(self, kind: str) -> Iterator[JsonObject]:
        """Ensures that the open item has this type."""
        if self._open_item is None or self._open_item.kind != kind:
            encrypted = self._metadata.encrypted_reasoning
            item = TextItem.create(kind, len(self._items), encrypted=encrypted)
            yield from self._start_item(item)

    def _start_item(self, item: OutputItem) -> Iterator[JsonObject]:
        yield from self._close_item("completed")
        self._items.append(item)
        self._open_item = item
        yield from item.begin()

    def _close_item(self, status: str) -> Iterator[JsonObject]:
        if self._open_item is not None:
            yield from self._open_item.end(status)
            self._open_item = None

    def _response(self, status: str, error: AppError | None = None) -> JsonObject:
        finish = self._finish
        cut = status == "incomplete"
        return {
            "id": self._metadata.id,
            "object": "response",
            "created_at": self._metadata.created,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else _render_error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            **self._metadata.echo,
            "output": [item.render() for item in self._items],
            "usage": None if finish is None else _render_usage(finish.usage),
            **({} if finish is None else _render_counters(finish)),
        }


class ResponseEventEncoder:
    """Encodes a streamed response. Sequence numbers start at 0.

    Codex closes a stream that has been idle for too long, and ignores comments. A stream therefore
    begins before the output, and is kept alive with the event that OpenAI sends in this state."""

    def __init__(self, builder: ResponseBuilder, on_complete: OnComplete) -> None:
        self._builder = builder
        self._on_complete = on_complete
        self._sequence_number = 0

    @property
    def keep_alive(self) -> bytes:
        return self._begin() or self._encode_events(self._builder.keep_alive())

    def progress(self, event: Progress) -> bytes:
        return self._begin() if isinstance(event, PrefillProgress) else b""

    def feed(self, event: OutputEvent) -> bytes:
        return self._begin() + self._encode_events(self._builder.feed(event))

    def end(self) -> bytes:
        """Returns the last frames. The response is stored first, because a client that has read the
        last frame may refer to the response immediately."""
        response = self._builder.build()
        self._on_complete(response)
        return self._encode_event({"type": f"response.{response['status']}", "response": response})

    def fail(self, error: AppError) -> bytes:
        """Returns the last frames of a failed stream: the error, which the SDKs raise, and then the
        final event of the stream. The error's fields appear twice: at the top level, as documented,
        and within `error`, as sent by OpenAI's servers and expected by the SDKs."""
        body = render_error(error)
        inner: JsonObject = body["error"]
        bare = {"code": inner["code"], "message": inner["message"], "param": inner["param"]}
        return (
            self._begin()
            + self._encode_event({"type": "error", **bare, **body})
            + self._encode_event(
                {"type": "response.failed", "response": self._builder.build_failed(error)}
            )
        )

    def _begin(self) -> bytes:
        return b"" if self._sequence_number else self._encode_events(self._builder.begin())

    def _encode_events(self, events: Iterator[JsonObject]) -> bytes:
        return b"".join(map(self._encode_event, events))

    def _encode_event(self, event: JsonObject) -> bytes:
        type_: str = event["type"]
        numbered = {"type": type_, "sequence_number": self._sequence_number, **event}
        self._sequence_number += 1
        return b"event: " + type_.encode() + b"\n" + encode_sse_event(numbered)


def collect_response(builder: ResponseBuilder, events: Sequence[OutputEvent]) -> JsonObject:
    """Builds the body of a non-streaming response."""
    for event in events:
        for _ in builder.feed(event):
            pass
    return builder.build()


def _render_usage(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            # all computed tokens are cached as long as memory allows
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _render_counters(finish: Finish) -> JsonObject:
    """Returns the counters that extend OpenAI's usage, as in chat completions."""
    usage = UsageTotals()
    usage.add(finish)
    return usage.render_counters()


def _render_error(error: AppError) -> JsonObject:
    """Renders the error with one of the few codes that a response may have."""
    code = "rate_limit_exceeded" if error.kind is ErrorKind.BUSY else "server_error"
    return {"code": code, "message": error.message}
