"""The engine's wire format: ids in, ids out.

Knows: token ids, counts, clock readings. Must not know: text, tensors. Everything here is plain
data, so that an engine may live in another process one day.

The life of a job is `Started Prefilled* Token* Ended`. A token that ends a sequence by being an
end-of-sequence id is never reported as a `Token`; a token that ends it by being the last one
allowed is. So: every `Token` is text, and nothing else is.
"""

from dataclasses import dataclass
from typing import Literal

from app.core.requests import Sampling

EndReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence to generate. ids: the prompt, at least one. max_tokens: at least one, and
    prompt plus max_tokens never exceeds the context. stop_ids: end-of-sequence ids.
    top_logprobs: None for no logprobs."""

    id: str
    ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: frozenset[int]
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The job left the queue; `cached` prompt tokens need no evaluation. at: monotonic ns."""

    job: str
    cached: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """`done` prompt tokens are in the KV cache, cached ones included."""

    job: str
    done: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One sampled id. logprob and top (id, logprob; most likely first) are from the raw logits in
    float32, and None and empty unless the job asked. at: monotonic ns when its value was known."""

    job: str
    id: int
    at: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The job is over and its place is free. error: a sentence, only when reason is "error".
    at: monotonic ns."""

    job: str
    reason: EndReason
    at: int
    error: str | None = None


Update = Started | Prefilled | Token | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started, and gauges of now. memory: bytes held by the allocator,
    its pool of free buffers included. cached_tokens + prefilled_tokens is every prompt token that
    was ever started on; the first is work skipped, the second work done."""

    memory: int = 0
    running: int = 0
    waiting: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    prefix_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Everything one turn of the engine loop has to say, in order."""

    updates: tuple[Update, ...]
    stats: EngineStats
