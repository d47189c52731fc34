"""OpenAI's responses: chat completions and completions, streamed or not.

Knows: the envelope shared by chunks and bodies, the end of a stream, the choices that are messages
(text, reasoning and tool calls) or texts, token counts and timings in three formats: OpenAI's
`usage`, Ollama's counters (durations in nanoseconds) and llama.cpp's `timings` (in milliseconds;
see "Timings" in its server's README.md). Must not know: the request, except for the fields that a
response repeats.

As in OpenAI's API, each choice of a streamed chat completion begins with a chunk that has the role
and empty content. It is sent together with the first output, because clients measure the time to
the first chunk. No later chunk of a stream has empty content before the final one.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from app.api.generate_endpoint import CommentedStream, Progress
from app.api.openai.logprobs import CompletionLogprobs, render_chat_logprobs, render_prompt_logprobs
from app.core.errors import AppError
from app.core.events import (
    Finish,
    OutputEvent,
    PrefillProgress,
    PromptTokenIds,
    PromptTokenLogprobs,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from app.core.settings import ReasoningField
from app.http.responses import JsonObject, render_error
from app.http.streaming import encode_sse_event

DONE = b"data: [DONE]\n\n"

ROLE = {"role": "assistant"}

COMPLETION_TYPE = "text_completion"


class UsageTotals:
    """Sums over the choices that have finished.

    A prompt is counted once, regardless of the number of choices. Its cached tokens are counted
    from the choice with the fewest cache hits, because the other choices reuse the prefix computed
    by this choice. Choices run in parallel, so the total time is the maximum of their times.
    """

    def __init__(self) -> None:
        self.finished = 0
        self._first_tokens = 0  # each ends a prefill and takes no decode step
        self._prompts: dict[int, Usage] = {}
        self._completion = self._reasoning = 0
        self._prompt_ns = self._eval_ns = self._total_ns = 0

    def add(self, finish: Finish) -> None:
        self.finished += 1
        usage, timings = finish.usage, finish.timings
        known = self._prompts.setdefault(finish.prompt_index, usage)
        if usage.cached_tokens < known.cached_tokens:
            self._prompts[finish.prompt_index] = usage
        self._completion += usage.completion_tokens
        self._first_tokens += min(usage.completion_tokens, 1)
        self._reasoning += usage.reasoning_tokens
        self._prompt_ns = max(self._prompt_ns, timings.prefill_ns)
        self._eval_ns = max(self._eval_ns, timings.decode_ns)
        self._total_ns = max(self._total_ns, timings.total_ns)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in self._prompts.values()),
            completion_tokens=self._completion,
            cached_tokens=sum(usage.cached_tokens for usage in self._prompts.values()),
            reasoning_tokens=self._reasoning,
        )

    @property
    def timings(self) -> Timings:
        return Timings(prefill_ns=self._prompt_ns, decode_ns=self._eval_ns, total_ns=self._total_ns)

    def render_counters(self) -> JsonObject:
        """Returns the counters that extend OpenAI's usage."""
        usage, timings = self.usage, self.timings
        return {
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": timings.prefill_ns,
            "eval_count": usage.completion_tokens,
            "eval_duration": timings.estimate_eval_ns(usage.completion_tokens, self._first_tokens),
            "total_duration": timings.total_ns,
            "timings": self.render_timings(),
        }

    def render_timings(self) -> JsonObject:
        """Returns llama.cpp's `timings`."""
        usage, timings = self.usage, self.timings
        computed, sampled = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
        return {
            "cache_n": usage.cached_tokens,
            **render_rate("prompt", computed, computed, timings.prefill_ns),
            **render_rate("predicted", sampled, sampled - self._first_tokens, timings.decode_ns),
        }


def render_usage(usage: Usage) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def render_rate(name: str, count: int, steps: int, nanoseconds: int) -> JsonObject:
    """Returns the count of tokens and their rate. steps: the number of tokens computed in this
    time. The rate is 0 if there are none or the time is 0, because JSON cannot represent
    infinity."""
    return {
        f"{name}_n": count,
        f"{name}_ms": nanoseconds / 1e6,
        f"{name}_per_token_ms": nanoseconds / 1e6 / steps if steps else 0.0,
        f"{name}_per_second": steps * 1e9 / nanoseconds if nanoseconds else 0.0,
    }


def render_prompt_progress(
    event: PrefillProgress, cached: dict[int, int], seconds: float
) -> JsonObject:
    """Returns llama.cpp's `prompt_progress`. cached: the number of cached tokens of each prompt,
    which its first event has. seconds: the time since the response began."""
    first = cached.setdefault(event.prompt_index, event.computed_tokens)
    return {
        "total": event.total_tokens,
        "cache": first,
        "processed": event.computed_tokens,
        "time_ms": round(1e3 * seconds),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionMetadata:
    """Response fields that come from the request and the server.

    created: the creation time as Unix time. num_prompts: the number of prompts. n: the number of
    choices returned per prompt. best_of: the number of choices generated per prompt. logprobs,
    return_token_ids: whether the request enables them. echo: whether each text begins with its
    prompt. include_usage: whether a stream ends with token counts. continuous_usage: whether each
    chunk contains the token counts of its choice so far. return_progress: whether chunks report the
    progress of the prefill. tier: the service tier, if the request specifies one. reasoning_field:
    the name of the field for reasoning. verbose_prompt: the text of the prompt, for llama.cpp's
    `__verbose`; None omits it.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    num_prompts: int = 1
    n: int = 1
    best_of: int = 1
    logprobs: bool = False
    return_token_ids: bool = False
    echo: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_progress: bool = False
    tier: str | None = None
    reasoning_field: ReasoningField = "reasoning_content"
    verbose_prompt: str | None = None


# Streaming responses


class ChunkEncoder(CommentedStream):
    """Encodes a streamed response. Chunks of different choices are interleaved in the order of
    their events. The chunk that ends the last choice contains the token counts of all choices."""

    def __init__(self, metadata: CompletionMetadata, kind: str) -> None:
        self.metadata = metadata
        self.prompt_ids: dict[int, Sequence[int]] = {}  # maps prompt index to token IDs
        # of the tokens for the next chunk of a choice, if the request asks for them
        self.tokens: defaultdict[int, TokenBuffer] = defaultdict(TokenBuffer)
        self._base_fields = render_base_fields(metadata, kind)
        self._begun: set[int] = set()  # choices that have a chunk
        self._totals = UsageTotals()
        self._sampled_tokens: Counter[int] = Counter()  # maps choice to number of tokens
        self._cached_tokens: dict[int, int] = {}  # maps prompt index to number of tokens
        self._began = time.monotonic()

    def delta_choices(self, event: TextDelta | ReasoningDelta | ToolCallDelta) -> list[JsonObject]:
        """Returns the `choices` entries of the chunks for this event."""
        raise NotImplementedError

    def begin_choice(self, choice: int) -> list[JsonObject]:
        """Returns the `choices` entries that precede the first output of a choice."""
        return []

    def finish_choice(self, event: Finish) -> JsonObject:
        """Returns the `choices` entry with the finish reason and any output that was held back."""
        raise NotImplementedError

    def extra_fields(self) -> JsonObject:
        """Returns additional top-level fields of the next chunk."""
        return {}

    def progress(self, event: Progress) -> bytes:
        if not self.metadata.return_progress or not isinstance(event, PrefillProgress):
            return super().progress(event)
        progress = render_prompt_progress(
            event, self._cached_tokens, time.monotonic() - self._began
        )
        return self._encode_chunk([], {"prompt_progress": progress})

    def feed(self, event: OutputEvent) -> bytes:
        match event:
            case PromptTokenIds():
                self.prompt_ids[event.prompt_index] = event.token_ids
                return b""
            case PromptTokenLogprobs():
                raise AssertionError("requests with prompt_logprobs are not streamed")
            case Finish():
                begin = self._begin(event.choice)
                self._totals.add(event)
                self._sampled_tokens[event.choice] = event.usage.completion_tokens
                counters: JsonObject = {}
                if self._all_finished:
                    counters = self._totals.render_counters() | render_verbose(self.metadata)
                return begin + self._encode_chunk([self.finish_choice(event)], counters)
            case _:
                if isinstance(event, TextDelta) and (event.logprobs or event.token_ids):
                    self.tokens[event.choice].add(event)
                deltas = self.delta_choices(event)
                is_first = bool(deltas) and event.choice not in self._begun
                frames = self._begin(event.choice) if is_first else b""
                if isinstance(event, TextDelta):
                    self._sampled_tokens[event.choice] += len(event.token_ids)
                for choice in deltas:
                    frames += self._encode_chunk([choice], {})
                return frames

    def end(self) -> bytes:
        assert self._all_finished, "a response ended without Finish"
        if not self.metadata.include_usage:
            return DONE
        totals = self._totals
        counts = {"usage": render_usage(totals.usage), "timings": totals.render_timings()}
        return self._encode_chunk([], counts) + DONE

    def fail(self, error: AppError) -> bytes:
        return encode_sse_event(render_error(error)) + DONE

    @property
    def _all_finished(self) -> bool:
        return self._totals.finished == self.metadata.num_prompts * self.metadata.best_of

    def _begin(self, choice: int) -> bytes:
        if choice in self._begun:
            return b""
        self._begun.add(choice)
        return b"".join(self._encode_chunk([each], {}) for each in self.begin_choice(choice))

    def _encode_chunk(self, choices: list[JsonObject], extra: JsonObject) -> bytes:
        chunk = {
            **self._base_fields,
            **self.extra_fields(),
            "choices": choices,
        }
        if self.metadata.continuous_usage and choices:
            chunk["usage"] = self._usage_so_far(choices[0]["index"])
        elif self.metadata.include_usage:
            chunk["usage"] = None
        return encode_sse_event(chunk | extra)

    def _usage_so_far(self, choice: int) -> JsonObject:
        """Returns the token counts of only this choice and its prompt, as in vLLM."""
        prompt, sampled = (
            len(self.prompt_ids[choice // self.metadata.best_of]),
            self._sampled_tokens[choice],
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }


@dataclass(slots=True)
class TokenBuffer:
    """The log probabilities and IDs of tokens. The text of those for the next chunk of a choice is
    incomplete or not part of the response."""

    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    ids: list[int] = field(default_factory=list[int])

    def add(self, event: TextDelta) -> None:
        self.logprobs += event.logprobs
        self.ids += event.token_ids


# Non-streaming responses


@dataclass(slots=True)
class ToolCallOutput:
    id: str
    name: str
    arguments: str = ""


class ChoiceOutput:
    """The complete output of one choice."""

    def __init__(self) -> None:
        self.calls: list[ToolCallOutput] = []
        self.tokens = TokenBuffer()
        self.finish: Finish | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def finish_event(self) -> Finish:
        assert self.finish is not None, "the choice has not finished"
        return self.finish

    def add(self, event: TextDelta | ReasoningDelta | ToolCallDelta | Finish) -> None:
        match event:
            case TextDelta():
                self._text.append(event.text)
                self.tokens.add(event)
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case ToolCallDelta():
                if event.id is not None:
                    assert event.name is not None
                    self.calls.append(ToolCallOutput(event.id, event.name))
                self.calls[event.call_index].arguments += event.arguments
            case Finish():
                self.finish = event


@dataclass(frozen=True, slots=True)
class Completion:
    """Collects all events of a response. choices: maps choice numbers to outputs. prompt_ids: the
    token IDs of each prompt, if requested. prompt_logprobs: the log probabilities of each prompt,
    if requested."""

    choices: Mapping[int, ChoiceOutput]
    prompt_ids: Mapping[int, Sequence[int]]
    prompt_logprobs: Mapping[int, Sequence[TokenLogprob]]
    totals: UsageTotals

    @staticmethod
    def from_events(events: Sequence[OutputEvent]) -> "Completion":
        choices: dict[int, ChoiceOutput] = {}
        prompts: dict[int, Sequence[int]] = {}
        scores: dict[int, list[TokenLogprob]] = {}
        usage = UsageTotals()
        for event in events:
            if isinstance(event, PromptTokenIds):
                prompts[event.prompt_index] = event.token_ids
                continue
            if isinstance(event, PromptTokenLogprobs):
                scores.setdefault(event.prompt_index, []).extend(event.logprobs)
                continue
            choices.setdefault(event.choice, ChoiceOutput()).add(event)
            if isinstance(event, Finish):
                usage.add(event)
        return Completion(choices, prompts, scores, usage)

    def select_choices(self, metadata: CompletionMetadata) -> list[ChoiceOutput]:
        """Returns the choices of the response in order. If more choices were generated than
        requested, returns the most likely ones for each prompt."""
        selected: list[ChoiceOutput] = []
        for first in range(0, metadata.num_prompts * metadata.best_of, metadata.best_of):
            made = [self.choices[first + place] for place in range(metadata.best_of)]
            if metadata.n < metadata.best_of:
                made.sort(
                    key=lambda output: _mean_logprob(output, echo=metadata.echo), reverse=True
                )
            selected += made[: metadata.n]
        return selected


def _mean_logprob(output: ChoiceOutput, *, echo: bool) -> float:
    """Returns the mean log probability of the sampled tokens, which is OpenAI's ranking criterion.
    A choice without sampled tokens ranks last."""
    prompt = output.finish_event.usage.prompt_tokens if echo else 0
    sampled = [
        token.logprob for token in output.tokens.logprobs[prompt:] if token.logprob is not None
    ]
    return sum(sampled) / len(sampled) if sampled else -math.inf


def render_body(
    metadata: CompletionMetadata, kind: str, completion: Completion, choices: list[JsonObject]
) -> JsonObject:
    return {
        **render_base_fields(metadata, kind),
        "choices": choices,
        "usage": render_usage(completion.totals.usage),
        **completion.totals.render_counters(),
        **render_verbose(metadata),
    }


def render_verbose(metadata: CompletionMetadata) -> JsonObject:
    prompt = metadata.verbose_prompt
    return {} if prompt is None else {"__verbose": {"prompt": prompt}}


def render_base_fields(metadata: CompletionMetadata, kind: str) -> dict[str, Any]:
    tier_fields = {} if metadata.tier is None else {"service_tier": metadata.tier}
    return {
        "id": metadata.id,
        "object": kind,
        "created": metadata.created,
        "model": metadata.model,
        "system_fingerprint": metadata.fingerprint,
        **tier_fields,
    }


def render_stop_reason(finish: Finish) -> str | int | None:
    """Returns the stop string or stop token of the request that ended a choice, as in vLLM."""
    return finish.stop_token_id if finish.stop_string is None else finish.stop_string


class ChatChunkEncoder(ChunkEncoder):
    """Encodes a streamed chat completion."""

    def __init__(self, metadata: CompletionMetadata) -> None:
        super().__init__(metadata, "chat.completion.chunk")
        self._prompt_ids_sent = False

    def delta_choices(self, event: TextDelta | ReasoningDelta | ToolCallDelta) -> list[JsonObject]:
        choice = event.choice
        match event:
            case TextDelta():
                return [self._choice(choice, {"content": event.text})] if event.text else []
            case ReasoningDelta():
                return [self._choice(choice, _reasoning_fields(event.text, self.metadata))]
            case ToolCallDelta():
                return [
                    self._choice(choice, {"tool_calls": [piece]})
                    for piece in _tool_call_deltas(event)
                ]
            case _:
                assert_never(event)

    def begin_choice(self, choice: int) -> list[JsonObject]:
        begin = _delta_choice(choice, {**ROLE, "content": ""})
        return [begin | {"token_ids": list[int]()} if self.metadata.return_token_ids else begin]

    def finish_choice(self, event: Finish) -> JsonObject:
        choice = self._choice(event.choice, {})
        return choice | {"finish_reason": event.reason, "stop_reason": render_stop_reason(event)}

    def extra_fields(self) -> JsonObject:
        """Returns the token IDs of the prompt, for the very first chunk."""
        if self._prompt_ids_sent or not self.metadata.return_token_ids:
            return {}
        self._prompt_ids_sent = True
        return {"prompt_token_ids": self.prompt_ids[0]}

    def _choice(self, choice: int, delta: JsonObject) -> JsonObject:
        entry = _delta_choice(choice, delta)
        tokens = self.tokens.pop(choice, None)
        if tokens is not None and tokens.logprobs:
            entry["logprobs"] = render_chat_logprobs(tokens.logprobs)
        if self.metadata.return_token_ids:
            entry["token_ids"] = [] if tokens is None else tokens.ids
        return entry


def _delta_choice(choice: int, delta: JsonObject) -> JsonObject:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}


def collect_chat(metadata: CompletionMetadata, events: Sequence[OutputEvent]) -> JsonObject:
    """Builds the body of a non-streaming chat completion."""
    completion = Completion.from_events(events)
    choices = [
        _render_choice(metadata, place, output)
        for place, output in enumerate(completion.select_choices(metadata))
    ]
    ids = {"prompt_token_ids": completion.prompt_ids[0]} if metadata.return_token_ids else {}
    body = render_body(metadata, "chat.completion", completion, choices)
    return body | ids | render_prompt_logprobs(completion.prompt_logprobs.get(0))


def _render_choice(metadata: CompletionMetadata, place: int, output: ChoiceOutput) -> JsonObject:
    return {
        "index": place,
        "message": _render_message(output, metadata),
        "logprobs": render_chat_logprobs(output.tokens.logprobs) if metadata.logprobs else None,
        "finish_reason": output.finish_event.reason,
        "stop_reason": render_stop_reason(output.finish_event),
        **({"token_ids": output.tokens.ids} if metadata.return_token_ids else {}),
    }


def _render_message(output: ChoiceOutput, metadata: CompletionMetadata) -> JsonObject:
    """Renders a message. The content is null, not empty, if there are tool calls and no text."""
    content = None if output.calls and not output.text else output.text
    message: JsonObject = {**ROLE, "content": content, "refusal": None}
    if output.reasoning:
        message |= _reasoning_fields(output.reasoning, metadata)
    if output.calls:
        message["tool_calls"] = [_render_tool_call(call) for call in output.calls]
    return message


def _reasoning_fields(text: str, metadata: CompletionMetadata) -> JsonObject:
    """Returns the reasoning under the server's field name. Some clients join the texts of all field
    names that they know, so by default there is only one."""
    if metadata.reasoning_field == "both":
        return {"reasoning_content": text, "reasoning": text}
    return {metadata.reasoning_field: text}


def _render_tool_call(call: ToolCallOutput) -> JsonObject:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool_call_deltas(event: ToolCallDelta) -> list[JsonObject]:
    """Renders a tool call. The first delta contains the name without arguments; later deltas
    contain parts of the arguments."""
    pieces: list[JsonObject] = []
    if event.id is not None:
        function = {"name": event.name, "arguments": ""}
        begun = {"id": event.id, "type": "function", "function": function}
        pieces.append({"index": event.call_index, **begun})
    if event.arguments:
        pieces.append({"index": event.call_index, "function": {"arguments": event.arguments}})
    return pieces


class CompletionChunkEncoder(ChunkEncoder):
    """Encodes a streamed completion."""

    def __init__(self, metadata: CompletionMetadata) -> None:
        super().__init__(metadata, COMPLETION_TYPE)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._prompt_ids_sent: set[int] = set()  # choices whose prompt token IDs were already sent

    def delta_choices(self, event: TextDelta | ReasoningDelta | ToolCallDelta) -> list[JsonObject]:
        # a prompt without a chat template produces only text
        assert isinstance(event, TextDelta)
        return [self._choice(event.choice, event.text)] if event.text else []

    def finish_choice(self, event: Finish) -> JsonObject:
        choice = self._choice(event.choice, "")
        return choice | {"finish_reason": event.reason, "stop_reason": render_stop_reason(event)}

    def _choice(self, choice: int, text: str) -> JsonObject:
        tokens = self.tokens.pop(choice, None) or TokenBuffer()
        columns = self._logprobs.setdefault(choice, CompletionLogprobs())
        return {
            "index": choice,
            "text": text,
            "logprobs": columns.render(tokens.logprobs) if tokens.logprobs else None,
            "finish_reason": None,
            **(
                {"token_ids": tokens.ids, **self._prompt_ids(choice)}
                if self.metadata.return_token_ids
                else {}
            ),
        }

    def _prompt_ids(self, choice: int) -> JsonObject:
        """Returns the token IDs of the prompt, for the first chunk of each choice."""
        if choice in self._prompt_ids_sent:
            return {}
        self._prompt_ids_sent.add(choice)
        return {"prompt_token_ids": self.prompt_ids[choice // self.metadata.best_of]}


def collect_completion(metadata: CompletionMetadata, events: Sequence[OutputEvent]) -> JsonObject:
    """Builds the body of a non-streaming completion."""
    completion = Completion.from_events(events)
    outputs = completion.select_choices(metadata)
    return render_body(
        metadata,
        COMPLETION_TYPE,
        completion,
        [
            _render_text_choice(metadata, place, output, completion)
            for place, output in enumerate(outputs)
        ],
    )


def _render_text_choice(
    metadata: CompletionMetadata, place: int, output: ChoiceOutput, completion: Completion
) -> JsonObject:
    ids = {
        "token_ids": output.tokens.ids,
        "prompt_token_ids": completion.prompt_ids.get(output.finish_event.prompt_index),
    }
    return {
        "index": place,
        "text": output.text,
        "logprobs": CompletionLogprobs().render(output.tokens.logprobs)
        if metadata.logprobs
        else None,
        "finish_reason": output.finish_event.reason,
        "stop_reason": render_stop_reason(output.finish_event),
        **(ids if metadata.return_token_ids else {}),
        **render_prompt_logprobs(completion.prompt_logprobs.get(output.finish_event.prompt_index)),
    }
