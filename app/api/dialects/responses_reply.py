"""Answers of /v1/responses: from events to the events of a stream, and to a response object.

Knows the shapes of output items and of the events that build them, and in which order these come.
One fold makes both: what is streamed ends with the very object that is sent when nothing is
streamed. Must not know: how a request looked, beyond what its answer has to repeat, or who keeps
the answer.

Format: OpenAI's API reference, `Response` and `ResponseStreamEvent`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from app.api.dialects.openai_counts import Tally
from app.api.dialects.responses_output import FunctionCall, OutputItem, TextItem
from app.api.wire import JsonObject, envelope, event_frame
from app.core.errors import AppError, Kind
from app.core.events import (
    CallDelta,
    Finish,
    Prompt,
    ReasoningDelta,
    Spoken,
    TextDelta,
    TokenLogprob,
    Usage,
)

Keep = Callable[[JsonObject], None]
"""What becomes of a response that is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What is known of a response before anything is said. created: Unix time. echo: the fields
    that repeat the request."""

    id: str
    created: int
    echo: JsonObject


class Answer:
    """The fold. `feed` returns what a stream would say, without sequence numbers."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._call: int | None = None
        self._held: list[TokenLogprob] = []  # of tokens whose text is still to come
        self._finish: Finish | None = None

    def begin(self) -> Iterator[JsonObject]:
        yield {"type": "response.created", "response": self._response("in_progress")}
        yield {"type": "response.in_progress", "response": self._response("in_progress")}

    def feed(self, event: Spoken) -> Iterator[JsonObject]:
        match event:
            case TextDelta():
                yield from self._say(event)
            case ReasoningDelta(text=text):
                self._held.clear()
                yield from self._switch("reasoning")
                assert isinstance(self._open, TextItem)
                yield self._open.say(text)
            case CallDelta():
                yield from self._call_piece(event)
            case Finish():
                yield from self._end(event)
            case Prompt():
                raise AssertionError("nobody asked for ids")
            case _:
                assert_never(event)

    def whole(self) -> JsonObject:
        """The response, once `Finish` was fed."""
        assert self._finish is not None, "an answer ended without Finish"
        status = "incomplete" if self._finish.reason == "length" else "completed"
        return self._response(status)

    def failed(self, error: AppError) -> JsonObject:
        """The response as far as it came."""
        for _ in self._close("incomplete"):
            pass
        return self._response("failed", error)

    def _say(self, event: TextDelta) -> Iterator[JsonObject]:
        self._held += event.logprobs
        if not event.text:
            return
        yield from self._switch("message")
        assert isinstance(self._open, TextItem)
        held, self._held = self._held, []
        yield self._open.say(event.text, held)

    def _call_piece(self, event: CallDelta) -> Iterator[JsonObject]:
        self._held.clear()
        if event.call != self._call:
            assert event.id is not None
            assert event.name is not None
            self._call = event.call
            call = FunctionCall(len(self._items), call_id=event.id, name=event.name)
            yield from self._put(call)
        if event.arguments:
            assert isinstance(self._open, FunctionCall)
            yield self._open.say(event.arguments)

    def _end(self, event: Finish) -> Iterator[JsonObject]:
        self._finish = event
        cut = event.reason == "length"
        silent = not any(item.kind in ("message", "function_call") for item in self._items)
        if silent and not cut:
            # the model had nothing to say, and said so: that is an answer, if an empty one
            yield from self._switch("message")
        if isinstance(self._open, TextItem):
            self._open.add(self._held)
        yield from self._close("incomplete" if cut else "completed")

    def _switch(self, kind: str) -> Iterator[JsonObject]:
        """Make an item of this kind the one that is open."""
        if self._open is None or self._open.kind != kind:
            yield from self._put(TextItem.of(kind, len(self._items)))

    def _put(self, item: OutputItem) -> Iterator[JsonObject]:
        yield from self._close("completed")
        self._items.append(item)
        self._open = item
        yield from item.begin()

    def _close(self, status: str) -> Iterator[JsonObject]:
        if self._open is not None:
            yield from self._open.end(status)
            self._open = None

    def _response(self, status: str, error: AppError | None = None) -> JsonObject:
        finish = self._finish
        cut = status == "incomplete"
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else _error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            **self._head.echo,
            "output": [item.shown() for item in self._items],
            "usage": None if finish is None else _usage(finish.usage),
            **({} if finish is None else _counters(finish)),
        }


class ResponseFrames:
    """Frames of a streamed response. The sequence numbers count from 0."""

    def __init__(self, answer: Answer, keep: Keep) -> None:
        self._answer = answer
        self._keep = keep
        self._said = 0

    def feed(self, event: Spoken) -> bytes:
        return self._begin() + self._frames(self._answer.feed(event))

    def end(self) -> bytes:
        """Kept before it is sent: who reads the last frame may refer to it at once."""
        response = self._answer.whole()
        self._keep(response)
        return self._frame({"type": f"response.{response['status']}", "response": response})

    def fail(self, error: AppError) -> bytes:
        """First the error, which the SDKs raise; then the end that the stream's format asks for.
        The error's fields stand in it twice: bare, as documented, and within `error`, as OpenAI's
        servers send them and as the SDKs look for them."""
        told = envelope(error)
        inner: JsonObject = told["error"]
        bare = {"code": inner["code"], "message": inner["message"], "param": inner["param"]}
        return (
            self._begin()
            + self._frame({"type": "error", **bare, **told})
            + self._frame({"type": "response.failed", "response": self._answer.failed(error)})
        )

    def _begin(self) -> bytes:
        return b"" if self._said else self._frames(self._answer.begin())

    def _frames(self, events: Iterator[JsonObject]) -> bytes:
        return b"".join(map(self._frame, events))

    def _frame(self, event: JsonObject) -> bytes:
        type_: str = event["type"]
        numbered = {"type": type_, "sequence_number": self._said, **event}
        self._said += 1
        return b"event: " + type_.encode() + b"\n" + event_frame(numbered)


def collect(answer: Answer, events: Sequence[Spoken]) -> JsonObject:
    """The body of a response that is not streamed."""
    for event in events:
        for _ in answer.feed(event):
            pass
    return answer.whole()


def _usage(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            # whatever had to be computed is remembered, as long as there is room
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _counters(finish: Finish) -> JsonObject:
    """What we tell beside OpenAI's usage, as in chat completions."""
    tally = Tally()
    tally.add(finish)
    return tally.counters()


def _error(error: AppError) -> JsonObject:
    """One of the few codes that a response may fail with."""
    code = "rate_limit_exceeded" if error.kind is Kind.BUSY else "server_error"
    return {"code": code, "message": error.message}
