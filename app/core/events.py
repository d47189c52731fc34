"""What happens while an answer is made, in the order in which it happens.

Knows: the alphabet that generation speaks and dialects translate. A stream is
`Progress* TextDelta* Finish`; a collected answer is a fold over the same events.
Must not know: SSE, JSON, token ids as the engine sees them.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """`text` may hold U+FFFD where the token is not whole UTF-8; `raw` is its exact bytes."""

    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A sampled token: natural log of its probability under the raw logits, and its rivals,
    most likely first."""

    text: str
    raw: bytes
    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Prompt tokens that are in the KV cache so far (cached ones included), of how many."""

    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The next piece of text: never empty unless it carries logprobs, never half a character.

    logprobs: the tokens read since the last delta, when the request asked for them. Their text
    and the delta's text need not line up (a stop string or a character may be held back).
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts. cached_tokens: prompt tokens whose evaluation was really skipped.
    completion_tokens: sampled tokens, the end-of-sequence token excluded."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Nanoseconds. prompt: from admission to the first token; evaluation: from the first token to
    the last; total: from the arrival of the request, so that waiting is in it."""

    prompt_ns: int
    eval_ns: int
    total_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The last event of every answer that ended by itself."""

    reason: FinishReason
    usage: Usage
    timings: Timings


Event = Progress | TextDelta | Finish
