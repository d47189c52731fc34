"""Events of a generation request.

Knows: the events of a generation. Must not know: SSE, JSON, the engine.

The stream of each choice is `PromptTokenIds? PromptTokenLogprobs* (TextDelta | ReasoningDelta |
ToolCallDelta)* Finish`; `PrefillProgress` events may occur in between. The events of different
choices may be interleaved in any order. A non-streaming response is built from the same events.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """An alternative token. text: the decoded token, with U+FFFD for invalid UTF-8. token_bytes:
    the exact bytes of the token. logprob: see `TokenLogprob`."""

    text: str
    token_bytes: bytes
    logprob: float
    token_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token of the output or of an echoed prompt, with its log probability.

    logprob: the natural logarithm of the token's probability, computed from the raw logits. It is
    None for the first token of a prompt, which has no preceding token. top_logprobs: the most
    likely tokens at this position, most likely first.
    """

    text: str
    token_bytes: bytes
    logprob: float | None
    top_logprobs: tuple[TopLogprob, ...]
    token_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """The progress of prefill. The first event of a choice is emitted when its job starts. Its
    `computed_tokens` is the number of tokens found in the prefix cache.

    prompt_index: the index of the prompt in the request. computed_tokens: the number of prompt
    tokens in the KV cache so far, including cached ones. total_tokens: the number of tokens in the
    prompt.
    """

    prompt_index: int = 0
    computed_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokenIds:
    """The token IDs of a prompt. The event is emitted before any output, and only if the request
    enables token IDs. prompt_index: the index of the prompt in the request."""

    prompt_index: int = 0
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokenLogprobs:
    """The log probabilities of the next tokens of a prompt. These events are emitted once for each
    prompt, before its output, and only if the request enables them. prompt_index: the index of the
    prompt in the request."""

    prompt_index: int = 0
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The next part of the text. Characters are never split. The text is empty only if the event
    carries logprobs or token IDs.

    logprobs: the tokens since the last delta, including reasoning and tool call tokens, if the
    request enables logprobs. token_ids: the IDs of the same tokens, if the request enables them.
    The text of these tokens may differ from `text`, because partial stop strings and incomplete
    characters are held back.
    """

    choice: int = 0
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """The next part of the model's reasoning; never empty."""

    choice: int = 0
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """The next part of a tool call.

    call_index: the index of the call, in the order in which the calls begin. A call ends before the
    next one begins. id, name: set only in the first delta of a call. arguments: the next part of
    the JSON text. The concatenated parts form a JSON object, unless the output reached its length
    limit or the model generated invalid JSON.
    """

    choice: int = 0
    call_index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts. cached_tokens: prompt tokens found in the prefix cache. completion_tokens:
    sampled tokens, without the end-of-sequence token. reasoning_tokens: completion tokens up to the
    end of the reasoning."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations in nanoseconds. prefill_ns: the time from admission to the first token. decode_ns:
    the time from the first token to the last. total_ns: the time since the request arrived,
    including time in the queue. inter_token_ns: the time between each pair of consecutive
    tokens."""

    prefill_ns: int
    decode_ns: int
    total_ns: int
    inter_token_ns: tuple[int, ...] = ()

    def estimate_eval_ns(self, num_tokens: int, num_first: int = 1) -> int:
        """Returns the duration that gives the rate of decoding when `num_tokens` is divided by it,
        as Ollama's clients do. `decode_ns` contains no step for the first token of a choice, which
        is the end of its prefill. num_first: the number of these tokens. Without any other token,
        there is no rate, and the duration is that of the prefill."""
        if num_tokens > num_first:
            return self.decode_ns * num_tokens // (num_tokens - num_first)
        return self.prefill_ns if num_tokens else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The last event of every choice, unless the choice was cancelled or failed.

    prompt_index: the index of the choice's prompt in the request. stop_string,
    stop_token_id: the stop string or token of the request that ended the output, or None.
    """

    choice: int = 0
    prompt_index: int = 0
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoading:
    """The model is not loaded yet. This event is emitted periodically while the request waits for
    the model.

    progress: the load progress from 0 to 100. queued: whether the load has not begun yet, because
    another model must be loaded or unloaded first.
    """

    progress: int
    queued: bool = False


# events that carry response content
OutputEvent = (
    PromptTokenIds | PromptTokenLogprobs | TextDelta | ReasoningDelta | ToolCallDelta | Finish
)

Event = PrefillProgress | ModelLoading | OutputEvent
