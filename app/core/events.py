"""What happens while an answer is made, in the order in which it happens.

Knows: the alphabet that generation speaks and dialects translate. A stream is, for each choice,
`PromptTokenIds? (TextDelta | ReasoningDelta | CallDelta)* Finish`, with `PrefillProgress` in
between, and the choices in any order beside each other; a collected answer is a fold over the same
events. Must not know: SSE, JSON, how ids are made.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """`text` may hold U+FFFD where the token is not whole UTF-8; `token_bytes` is its exact
    bytes."""

    text: str
    token_bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token of the answer, or of an echoed prompt: natural log of its probability under the raw
    logits (None for the first of a prompt, which nothing stands before), and its rivals, most
    likely first."""

    text: str
    token_bytes: bytes
    logprob: float | None
    top_logprobs: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """Prompt tokens that are in the KV cache so far (cached ones included), of how many. prompt:
    which one of the request. The first of a choice comes when its job starts, and its
    `computed_tokens` is what the prefix cache had."""

    prompt_index: int = 0
    computed_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokenIds:
    """The ids that a prompt came to. Told where they were asked for, before anything is said.
    prompt_index: which one of the request."""

    prompt_index: int = 0
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The next piece of text: never empty unless it carries logprobs or ids, never half a
    character.

    logprobs: the tokens read since the last delta, when the request asked for them, those of
    reasoning and of calls too. token_ids: the same tokens, when it asked for ids. Their text and
    the delta's text need not line up (a stop string or a character may be held back).
    """

    choice: int = 0
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """The next piece of what the model thinks before it answers; never empty."""

    choice: int = 0
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """The next piece of a tool call. call_index: 0, 1, 2 … in the order in which they begin; one is
    over before the next one begins. id, name: with the first piece of each, and only there.
    arguments: the next piece of their JSON text; joined, it is an object, unless the answer was cut
    by length or the model made a mistake in it."""

    choice: int = 0
    call_index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts. cached_tokens: prompt tokens whose evaluation was really skipped.
    completion_tokens: sampled tokens, the end-of-sequence token excluded. reasoning_tokens: those
    of them that came before the reasoning was over."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Nanoseconds. prompt: from admission to the first token; evaluation: from the first token to
    the last; total: from the arrival of the request, so that waiting is in it. gaps: between each
    two tokens that followed each other."""

    prefill_ns: int
    decode_ns: int
    total_ns: int
    inter_token_ns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The last event of every choice that ended by itself. prompt_index: which one of the request
    it answers. stop_string: the stop string that ended it, if one of the request's did."""

    choice: int = 0
    prompt_index: int = 0
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_string: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoading:
    """The model is not in memory yet; told now and then while the request waits for it. progress:
    0 to 100. queued: whether it has not begun, because another model is loaded before it or has to
    leave first."""

    progress: int
    queued: bool = False


# what an answer is made of
OutputEvent = PromptTokenIds | TextDelta | ReasoningDelta | ToolCallDelta | Finish

Event = PrefillProgress | ModelLoading | OutputEvent
