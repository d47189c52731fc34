"""llama.cpp's native responses: converts events to chunks and bodies.

Knows: the format of POST /completion and /infill, streamed or not. Must not know: the request,
except for the fields that a response repeats.

    chunk   {"index", "content", "tokens", "stop": false, …}
    end     {"index", "content", "tokens", "stop": true, "stop_type", "timings", …}

A body is the end chunk with the whole content. Streams end without a marker.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.generate_endpoint import CommentedStream, Progress
from app.api.openai.output import UsageTotals, render_prompt_progress, render_rate
from app.core.errors import AppError
from app.core.events import (
    Finish,
    OutputEvent,
    PrefillProgress,
    TextDelta,
    TokenLogprob,
    TopLogprob,
)
from app.http.responses import JsonObject, encode_long_array, render_error
from app.http.streaming import encode_sse_event

# llama.cpp has numbered slots; -1 means none.
_NO_SLOT = -1

_MIN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeFormat:
    """Response fields that come from the request and the model. prompts: the text of each prompt,
    with special tokens. settings: `generation_settings`. max_context: the number of tokens at which
    the context is full. clock: in seconds."""

    model: str
    prompts: Sequence[str]
    settings: JsonObject
    max_context: int
    is_list: bool = False
    return_tokens: bool = False
    response_fields: tuple[str, ...] = ()
    timings_per_token: bool = False
    return_progress: bool = False
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class _Choice:
    """The output of one prompt. num_tokens: the number of tokens so far. logprobs, token_ids: one
    entry for each token since the last chunk."""

    num_tokens: int = 0
    has_new_line: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    token_ids: list[int] = field(default_factory=list[int])
    text: list[str] = field(default_factory=list[str])

    def add(self, event: TextDelta) -> None:
        self.num_tokens += len(event.token_ids)
        self.has_new_line = self.has_new_line or "\n" in event.text
        self.logprobs += event.logprobs
        self.token_ids += event.token_ids


class _Timer:
    """The timings of a stream that has not finished, by the clock of this process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started: float | None = None
        self._computed_at = self._last_at = 0.0
        self._has_tokens = False
        self._cached = self._computed = 0

    def prefill(self, event: PrefillProgress) -> None:
        self._computed_at = self._last_at = self._clock()
        if self._started is None:
            self._started, self._cached = self._computed_at, event.computed_tokens
        self._computed = event.computed_tokens - self._cached

    def token(self) -> None:
        self._last_at = self._clock()
        if not self._has_tokens:
            self._has_tokens, self._computed_at = True, self._last_at

    def render(self, num_tokens: int) -> JsonObject:
        started = self._computed_at if self._started is None else self._started
        prompt, predicted = self._computed_at - started, self._last_at - self._computed_at
        steps = max(num_tokens - 1, 0)
        return {
            "cache_n": self._cached,
            **render_rate("prompt", self._computed, self._computed, round(1e9 * prompt)),
            **render_rate("predicted", num_tokens, steps, round(1e9 * predicted)),
        }


class NativeChunkEncoder(CommentedStream):
    """Encodes a streamed response. Chunks of different prompts are interleaved."""

    def __init__(self, format: NativeFormat) -> None:
        self._format = format
        self._choices: dict[int, _Choice] = defaultdict(_Choice)
        self._timer = _Timer(format.clock)
        self._cached: dict[int, int] = {}
        self._began = format.clock()

    def progress(self, event: Progress) -> bytes:
        if not isinstance(event, PrefillProgress):
            return super().progress(event)
        self._timer.prefill(event)
        if not self._format.return_progress:
            return super().progress(event)
        progress = render_prompt_progress(event, self._cached, self._format.clock() - self._began)
        return encode_sse_event(
            self._render_chunk(event.prompt_index, "", [], []) | {"prompt_progress": progress}
        )

    def feed(self, event: OutputEvent) -> bytes:
        if isinstance(event, TextDelta):
            choice = self._choices[event.choice]
            choice.add(event)
            self._timer.token()
            if not event.text:
                return b""
            tokens, choice.token_ids = choice.token_ids, []
            logprobs, choice.logprobs = choice.logprobs, []
            return encode_sse_event(self._render_chunk(event.choice, event.text, tokens, logprobs))
        if isinstance(event, Finish):
            choice = self._choices[event.choice]
            return encode_sse_event(_render_end(self._format, choice, event, "", ()))
        return b""

    def end(self) -> bytes:
        return b""

    def fail(self, error: AppError) -> bytes:
        return encode_sse_event(render_error(error))

    def _render_chunk(
        self, index: int, text: str, tokens: list[int], logprobs: list[TokenLogprob]
    ) -> JsonObject:
        num_tokens = self._choices[index].num_tokens
        chunk: JsonObject = {
            "index": index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": _NO_SLOT,
            "tokens_predicted": num_tokens,
        }
        if logprobs:
            chunk["completion_probabilities"] = _render_probabilities(logprobs)
        if self._format.timings_per_token:
            chunk["timings"] = self._timer.render(num_tokens)
        return chunk


def collect_native(format: NativeFormat, events: Sequence[OutputEvent]) -> Any:
    """Builds the body of a non-streaming response: an object, or a list for a list of prompts."""
    choices: dict[int, _Choice] = defaultdict(_Choice)
    bodies: dict[int, JsonObject] = {}
    for event in events:
        if isinstance(event, TextDelta):
            choices[event.choice].add(event)
            choices[event.choice].text.append(event.text)
        elif isinstance(event, Finish):
            choice = choices[event.choice]
            tokens = choice.token_ids if format.return_tokens else []
            content = "".join(choice.text)
            bodies[event.choice] = _render_end(format, choice, event, content, tokens)
    found = [bodies[index] for index in sorted(bodies)]
    return found if format.is_list else found[0]


def _render_end(
    format: NativeFormat, choice: _Choice, event: Finish, content: str, tokens: Sequence[int]
) -> JsonObject:
    usage = event.usage
    totals = UsageTotals()
    totals.add(event)
    body: JsonObject = {
        "index": event.choice,
        "content": content,
        "tokens": encode_long_array([*tokens]),
        "id_slot": _NO_SLOT,
        "stop": True,
        "model": format.model,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "generation_settings": format.settings,
        "prompt": format.prompts[event.prompt_index],
        "has_new_line": choice.has_new_line,
        "truncated": usage.prompt_tokens + usage.completion_tokens >= format.max_context,
        "stop_type": _get_stop_type(event),
        "stopping_word": event.stop_string or "",
        "tokens_cached": usage.cached_tokens,
        "timings": totals.render_timings(),
    }
    if choice.logprobs:
        body["completion_probabilities"] = _render_probabilities(choice.logprobs)
    return _select_fields(body, format.response_fields)


def _get_stop_type(event: Finish) -> str:
    if event.stop_string is not None:
        return "word"
    return "limit" if event.reason == "length" else "eos"


def _select_fields(body: JsonObject, names: Sequence[str]) -> JsonObject:
    """Returns the fields that the client asked for. A name such as "timings/prompt_n" selects a
    nested field. Unknown names are ignored."""
    if not names:
        return body
    selected: JsonObject = {}
    for name in names:
        value: Any = body
        for key in name.split("/"):
            value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if value is not _MISSING:
            selected[name] = value
    return selected


_MISSING = object()


def _render_probabilities(tokens: Sequence[TokenLogprob]) -> Any:
    return encode_long_array(
        [
            _render_token(token)
            | {"top_logprobs": [_render_token(other) for other in token.top_logprobs]}
            for token in tokens
        ]
    )


def _render_token(token: TokenLogprob | TopLogprob) -> JsonObject:
    logprob = -math.inf if token.logprob is None else token.logprob
    return {
        "id": token.token_id,
        "token": token.text,
        "bytes": list(token.token_bytes),
        "logprob": max(logprob, _MIN_LOGPROB),
    }
