"""Ollama's responses: converts events to lines and bodies.

Knows: the response objects of both endpoints, how a stream ends. Must not know: request fields
other than the model name.

Each line is one JSON object and ends with a line feed. Empty lines are never sent, because
ollama-python parses every line. A non-streaming body is a fold over the same lines.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from app.api.generate_endpoint import Progress
from app.api.ollama.errors import encode_error_line
from app.api.openai.chat import normalize_arguments
from app.api.openai.logprobs import render_token_logprobs
from app.core.errors import AppError
from app.core.events import (
    Finish,
    ModelLoading,
    OutputEvent,
    PromptTokenIds,
    PromptTokenLogprobs,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from app.http.responses import JsonObject
from app.http.streaming import encode_json_line

# the current time in nanoseconds since the epoch
Clock = Callable[[], int]

_NANOSECONDS = 1_000_000_000


def format_time(nanoseconds: int) -> str:
    """Formats a time as Ollama does: RFC 3339 in UTC, with nanoseconds."""
    seconds, rest = divmod(nanoseconds, _NANOSECONDS)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


@dataclass(slots=True)
class _PendingCall:
    id: str
    name: str
    index: int
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFormat:
    """Response fields that come from the request. model: the name in the request. kind: the
    endpoint. started: the time at which the request arrived, in nanoseconds. logprobs: whether to
    include log probabilities. with_context: whether to include the token IDs of the conversation.
    """

    model: str
    kind: Literal["chat", "generate"]
    started: int
    logprobs: bool = False
    with_context: bool = False
    clock: Clock = time.time_ns

    def render(
        self,
        content: str = "",
        *,
        thinking: str = "",
        calls: Sequence[JsonObject] = (),
        extra: JsonObject | None = None,
        reason: str | None = None,
    ) -> JsonObject:
        """Builds one object. reason: the finish reason, set only in the last object."""
        thinking_field: JsonObject = {"thinking": thinking} if thinking else {}
        if self.kind == "chat":
            more = {"tool_calls": list(calls)} if calls else {}
            message = {"role": "assistant", "content": content, **thinking_field, **more}
            content_fields = {"message": message}
        else:
            content_fields = {"response": content, **thinking_field}
        end = {"done": False} if reason is None else {"done": True, "done_reason": reason}
        base = {"model": self.model, "created_at": format_time(self.clock())}
        return {**base, **content_fields, **end, **(extra or {})}


@dataclass(slots=True)
class LineBuilder:
    """Converts the events of one response to objects."""

    format: LineFormat
    _call: _PendingCall | None = None
    _logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    _context: list[int] = field(default_factory=list[int])

    def feed(self, event: OutputEvent) -> Iterator[JsonObject]:
        match event:
            case PromptTokenIds():
                self._context += event.token_ids
            case PromptTokenLogprobs():
                pass  # Ollama's requests have none
            case ToolCallDelta():
                yield from self._feed_call(event)
            case ReasoningDelta():
                yield from self._end_call()
                yield self.format.render(thinking=event.text)
            case TextDelta():
                self._context += event.token_ids
                self._logprobs += event.logprobs
                if event.text:
                    yield from self._end_call()
                    yield self.format.render(event.text, extra=self._take_logprobs())
            case Finish():
                yield from self._end_call(cut=event.reason == "length")
                yield self._finish(event)

    def _feed_call(self, event: ToolCallDelta) -> Iterator[JsonObject]:
        if event.id is not None:
            yield from self._end_call()
            self._call = _PendingCall(event.id, event.name or "", event.call_index)
        assert self._call is not None, "a tool call without a beginning"
        self._call.arguments += event.arguments

    def _end_call(self, *, cut: bool = False) -> Iterator[JsonObject]:
        """Yields the complete call, which clients run immediately. cut: whether the output was
        truncated within the call. If so, a call with invalid arguments is omitted."""
        call, self._call = self._call, None
        if call is None:
            return
        text = normalize_arguments(call.arguments)
        if cut and text != (call.arguments.strip() or "{}"):
            return
        function = {"index": call.index, "name": call.name, "arguments": orjson.loads(text)}
        yield self.format.render(calls=[{"id": call.id, "function": function}])

    def _take_logprobs(self) -> JsonObject:
        tokens, self._logprobs = self._logprobs, []
        if not tokens or not self.format.logprobs:
            return {}
        return {"logprobs": render_token_logprobs(tokens)}

    def _finish(self, event: Finish) -> JsonObject:
        total = max(self.format.clock() - self.format.started, event.timings.total_ns)
        figures: JsonObject = {
            "total_duration": total,
            "load_duration": total - event.timings.total_ns,
            "prompt_eval_count": event.usage.prompt_tokens,
            "prompt_cached_count": event.usage.cached_tokens,
            "prompt_eval_duration": event.timings.prefill_ns,
            "eval_count": event.usage.completion_tokens,
            "eval_duration": event.timings.estimate_eval_ns(event.usage.completion_tokens),
        }
        context = {"context": self._context} if self.format.with_context else {}
        # Ollama has no finish reason for calls
        reason = "length" if event.reason == "length" else "stop"
        extra = {**figures, **context, **self._take_logprobs()}
        return self.format.render(extra=extra, reason=reason)


class LineEncoder:
    """Encodes a streamed response. Implements `app.api.generate_endpoint.StreamEncoder`."""

    def __init__(self, format: LineFormat) -> None:
        self._format = format
        self._builder = LineBuilder(format)
        self._begun = False

    @property
    def keep_alive(self) -> bytes:
        return encode_json_line(self._format.render())

    def progress(self, event: Progress) -> bytes:
        """Returns a line with empty content at the start of prefill, so that the client receives
        the headers before a long prefill."""
        if isinstance(event, ModelLoading) or self._begun:
            return b""
        self._begun = True
        return self.keep_alive

    def feed(self, event: OutputEvent) -> bytes:
        return b"".join(map(encode_json_line, self._builder.feed(event)))

    def end(self) -> bytes:
        return b""

    def fail(self, error: AppError) -> bytes:
        return encode_error_line(error)


def collect(format: LineFormat, events: Sequence[OutputEvent]) -> JsonObject:
    """Builds the body of a non-streaming response."""
    builder = LineBuilder(format)
    lines = [line for event in events for line in builder.feed(event)]
    body = dict(lines[-1])
    logprobs = [entry for line in lines for entry in line.get("logprobs", ())]
    if logprobs:
        body["logprobs"] = logprobs
    if format.kind == "generate":
        thinking = "".join(line.get("thinking", "") for line in lines)
        text = "".join(line["response"] for line in lines)
        return {**body, "response": text, **({"thinking": thinking} if thinking else {})}
    messages: list[dict[str, Any]] = [line["message"] for line in lines]
    thinking = "".join(message.get("thinking", "") for message in messages)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    body["message"] = {
        "role": "assistant",
        "content": "".join(message["content"] for message in messages),
        **({"thinking": thinking} if thinking else {}),
        **({"tool_calls": calls} if calls else {}),
    }
    return body
