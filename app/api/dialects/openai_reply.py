"""OpenAI's answers: from events to chunks and bodies.

Knows the shapes of chat completions and completions, whole and streamed. A stream never sends an
empty text and sends the role with the first text, because clients take the first chunk for the
first token. Must not know: how a request looked, beyond what its answer has to repeat.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from app.api.wire import JsonObject, envelope, event_frame
from app.core.errors import AppError
from app.core.events import Finish, TextDelta, Timings, TokenLogprob, TopLogprob, Usage

DONE = b"data: [DONE]\n\n"

# What OpenAI writes for "next to impossible"; JSON has no infinities.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every chunk of an answer repeats. created: Unix time. logprobs: whether they were
    asked for. include_usage: whether a stream ends with token counts."""

    id: str
    created: int
    model: str
    logprobs: bool
    include_usage: bool = False


class ChatChunks:
    """Frames of a streamed chat completion."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._role: JsonObject = {"role": "assistant"}  # until it was sent
        self._held: list[TokenLogprob] = []  # logprobs of tokens whose text is still to come

    def feed(self, event: TextDelta | Finish) -> bytes:
        if isinstance(event, Finish):
            return self._finish(event)
        self._held += event.logprobs
        if not event.text:
            return b""
        return self._frame(self._choice({"content": event.text}, None))

    def fail(self, error: AppError) -> bytes:
        return event_frame(envelope(error)) + DONE

    def _finish(self, event: Finish) -> bytes:
        frame = self._frame(self._choice({}, event.reason), **_counters(event))
        return frame + _usage_frame(self._head, "chat.completion.chunk", event.usage) + DONE

    def _choice(self, delta: JsonObject, reason: str | None) -> JsonObject:
        role, self._role = self._role, {}
        held, self._held = self._held, []
        return {
            "index": 0,
            "delta": role | delta,
            "logprobs": _chat_logprobs(held) if held else None,
            "finish_reason": reason,
        }

    def _frame(self, choice: JsonObject, **extra: object) -> bytes:
        return _chunk_frame(self._head, "chat.completion.chunk", [choice], extra)


class CompletionChunks:
    """Frames of a streamed completion."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._held: list[TokenLogprob] = []
        self._columns = _Columns()

    def feed(self, event: TextDelta | Finish) -> bytes:
        if isinstance(event, Finish):
            return self._finish(event)
        self._held += event.logprobs
        if not event.text:
            return b""
        return self._frame(self._choice(event.text, None))

    def fail(self, error: AppError) -> bytes:
        return event_frame(envelope(error)) + DONE

    def _finish(self, event: Finish) -> bytes:
        frame = self._frame(self._choice("", event.reason), **_counters(event))
        return frame + _usage_frame(self._head, "text_completion", event.usage) + DONE

    def _choice(self, text: str, reason: str | None) -> JsonObject:
        held, self._held = self._held, []
        return {
            "index": 0,
            "text": text,
            "logprobs": self._columns.of(held) if held else None,
            "finish_reason": reason,
        }

    def _frame(self, choice: JsonObject, **extra: object) -> bytes:
        return _chunk_frame(self._head, "text_completion", [choice], extra)


def collect_chat(head: Head, events: Sequence[TextDelta | Finish]) -> JsonObject:
    """The body of a chat completion that is not streamed."""
    text, logprobs, finish = _fold(events)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": _chat_logprobs(logprobs) if head.logprobs else None,
        "finish_reason": finish.reason,
    }
    return _body(head, "chat.completion", choice, finish)


def collect_completion(head: Head, events: Sequence[TextDelta | Finish]) -> JsonObject:
    """The body of a completion that is not streamed."""
    text, logprobs, finish = _fold(events)
    choice = {
        "index": 0,
        "text": text,
        "logprobs": _Columns().of(logprobs) if head.logprobs else None,
        "finish_reason": finish.reason,
    }
    return _body(head, "text_completion", choice, finish)


def _fold(events: Sequence[TextDelta | Finish]) -> tuple[str, list[TokenLogprob], Finish]:
    *deltas, finish = events
    assert isinstance(finish, Finish)
    texts: list[str] = []
    logprobs: list[TokenLogprob] = []
    for delta in deltas:
        assert isinstance(delta, TextDelta)
        texts.append(delta.text)
        logprobs += delta.logprobs
    return "".join(texts), logprobs, finish


def _body(head: Head, kind: str, choice: JsonObject, finish: Finish) -> JsonObject:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "choices": [choice],
        "usage": _usage(finish.usage),
        **_counters(finish),
    }


def _chunk_frame(head: Head, kind: str, choices: list[JsonObject], extra: dict[str, Any]) -> bytes:
    chunk: JsonObject = {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "choices": choices,
    }
    if head.include_usage:
        chunk["usage"] = None
    return event_frame(chunk | extra)


def _usage_frame(head: Head, kind: str, usage: Usage) -> bytes:
    return _chunk_frame(head, kind, [], {"usage": _usage(usage)}) if head.include_usage else b""


def _usage(usage: Usage) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _counters(finish: Finish) -> JsonObject:
    """An extension, in the words of Ollama's API: counts, and durations in nanoseconds."""
    timings: Timings = finish.timings
    return {
        "prompt_eval_count": finish.usage.prompt_tokens,
        "prompt_eval_duration": timings.prompt_ns,
        "eval_count": finish.usage.completion_tokens,
        "eval_duration": timings.eval_ns,
        "total_duration": timings.total_ns,
    }


# Log-probabilities


def _logprob(token: TokenLogprob | TopLogprob) -> float:
    return max(token.logprob, LEAST_LOGPROB)


def _chat_logprobs(tokens: Iterable[TokenLogprob]) -> JsonObject:
    content = [
        _entry(token) | {"top_logprobs": [_entry(rival) for rival in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(token: TokenLogprob | TopLogprob) -> JsonObject:
    return {"token": token.text, "logprob": _logprob(token), "bytes": list(token.raw)}


class _Columns:
    """The four parallel lists of completions. Offsets count the characters of the completion
    before each token; a token amid a character stands where that character begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, tokens: Iterable[TokenLogprob]) -> JsonObject:
        """The lists for the next tokens of the answer."""
        names: list[str] = []
        logprobs: list[float] = []
        rivals: list[dict[str, float]] = []
        offsets: list[int] = []
        for token in tokens:
            names.append(_name(token))
            logprobs.append(_logprob(token))
            # The sampled token always stands in its map, so there may be one more than asked for.
            rivals.append(
                {_name(rival): _logprob(rival) for rival in token.top}
                | {_name(token): _logprob(token)}
            )
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.raw))
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": rivals,
            "text_offset": offsets,
        }


def _name(token: TokenLogprob | TopLogprob) -> str:
    """A token's text, or its bytes spelled as OpenAI does where they are no text: keys of a map
    must differ, and every half character would read U+FFFD."""
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
