"""Events of a generation request, in the order in which they occur.

Knows: the events that generation emits and dialects convert. Must not know: SSE, JSON, how tokens
are generated.

The stream of each choice is `PromptTokenIds? (TextDelta | ReasoningDelta | ToolCallDelta)* Finish`,
with `PrefillProgress` in between. The events of several choices may be interleaved in any order. A
non-streaming response is built from the same events.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """An alternative token. text: may contain U+FFFD if the token is not valid UTF-8 by itself.
    token_bytes: its exact bytes. logprob: as in `TokenLogprob`."""

    text: str
    token_bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token of the output or of an echoed prompt, with its log-probability.

    logprob: natural logarithm of its probability under the raw logits; None for the first token of
    a prompt, which has no predecessor. top_logprobs: the most likely tokens at this position, most
    likely first."""

    text: str
    token_bytes: bytes
    logprob: float | None
    top_logprobs: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """The progress of prefill. The first event of a choice is emitted when its job starts; its
    `computed_tokens` is the number of tokens that the prefix cache provided.

    prompt_index: index of the prompt in the request. computed_tokens: prompt tokens in the KV cache
    so far, including cached ones. total_tokens: tokens of the prompt."""

    prompt_index: int = 0
    computed_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokenIds:
    """The token ids of a prompt, if the request asked for them; emitted before any output.
    prompt_index: index of the prompt in the request."""

    prompt_index: int = 0
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The next piece of text. It never splits a character, and is empty only if the event carries
    logprobs or token ids.

    logprobs: tokens since the last delta, if the request asked for them, including those of
    reasoning and tool calls. token_ids: the same tokens, if it asked for ids. The text of these
    tokens and `text` may differ, since a partial stop string or character is held back.
    """

    choice: int = 0
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """The next piece of the model's reasoning; never empty."""

    choice: int = 0
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """The next piece of a tool call.

    call_index: 0, 1, 2 … in the order in which the calls begin; a call ends before the next one
    begins. id, name: set in the first piece of a call only. arguments: next piece of the JSON text;
    the pieces form an object, unless the output was cut by its length or the model produced invalid
    JSON."""

    choice: int = 0
    call_index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts. cached_tokens: prompt tokens whose evaluation was actually skipped.
    completion_tokens: sampled tokens, without the end-of-sequence token. reasoning_tokens: those of
    them that precede the end of the reasoning."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations in nanoseconds. prefill_ns: from admission to the first token. decode_ns: from the
    first token to the last. total_ns: from the arrival of the request, so it includes waiting.
    inter_token_ns: between each pair of consecutive tokens."""

    prefill_ns: int
    decode_ns: int
    total_ns: int
    inter_token_ns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The last event of every choice that was not cancelled and did not fail.

    prompt_index: index of the choice's prompt in the request. stop_string: the request's stop
    string that ended the output, or None."""

    choice: int = 0
    prompt_index: int = 0
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_string: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoading:
    """The model is not in memory yet; emitted from time to time while the request waits for it.

    progress: 0 to 100. queued: whether the load has not begun yet, because another model is loaded
    or unloaded first."""

    progress: int
    queued: bool = False


# events with content of the response
OutputEvent = PromptTokenIds | TextDelta | ReasoningDelta | ToolCallDelta | Finish

Event = PrefillProgress | ModelLoading | OutputEvent
