"""The engine's wire format: ids in, ids out.

Knows: token ids, counts, clock readings. Must not know: text, tensors. Everything here is plain
data, so that an engine may live in another process one day.

The life of a job is `Started Prefilled* PromptScores? Token* Ended`. A token that ends a sequence
by being an end-of-sequence id is never reported as a `Token`; a token that ends it by being the
last one allowed is. So: every `Token` is text, and nothing else is.
"""

from dataclasses import dataclass
from typing import Literal

from app.core.embeddings import Embedded
from app.core.requests import Grammar, Sampling

EndReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence to generate. ids: the prompt, at least one. max_tokens: at least one, and
    prompt plus max_tokens never exceeds the context. stop_ids: end-of-sequence ids.
    top_logprobs: None for no logprobs. reuse: whether the prefix cache may serve the prompt. keep:
    ids at the beginning that a context shift never discards. grammar: what the sampled ids must
    spell; a sequence that can only end ends there, with "stop". min_tokens: so many are sampled
    before one of stop_ids may be; 0 with a grammar. prompt_logprobs: like top_logprobs, for the
    prompt's own ids: then `PromptScores` come before the first token. caller: whose it is; those
    who wait take turns by it."""

    id: str
    ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: frozenset[int]
    top_logprobs: int | None = None
    reuse: bool = True
    keep: int = 0
    grammar: Grammar | None = None
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    caller: str = ""


# nothing cached begins like it · other ids follow · the ids match, but a layer has no state to go
# back to · the request wanted no reuse
MissReason = Literal["empty", "diverged", "no_state", "unwanted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Why the prefix cache did not serve more. at: the first position that was not served. had: a
    few of the ids that are cached there, if other ones are."""

    at: int
    reason: MissReason
    had: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The job left the queue; `cached` prompt tokens need no evaluation. at: monotonic ns.
    miss: None when everything was cached that can be."""

    job: str
    cached: int
    at: int
    miss: Miss | None = None


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
class PromptScores:
    """The prompt's ids as if they had been sampled, all but the first: one (logprob, top) each, as
    in `Token`."""

    job: str
    scores: tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The job is over and its place is free. error: a sentence, only when reason is "error".
    at: monotonic ns. lost: the error is that the engine ended before the job did, though nothing
    stopped it."""

    job: str
    reason: EndReason
    at: int
    error: str | None = None
    lost: bool = False


Update = Started | Prefilled | PromptScores | Token | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where the engine's memory is, in bytes. budget: what the engine may use in all. weights: the
    model. kv: layer caches of running sequences, the room they will grow into included, and of
    inputs that are embedded. prefix: cached prefixes that nobody runs on. working: kept free for
    what a step needs while it runs.

    0 <= free = budget - weights - kv - prefix - working.
    """

    budget: int = 0
    weights: int = 0
    kv: int = 0
    prefix: int = 0
    working: int = 0

    @property
    def free(self) -> int:
        return self.budget - self.weights - self.kv - self.prefix - self.working


# upper bounds of the prefix lengths that hits are counted by; the last class has none
HIT_BOUNDS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started, and gauges of now. memory: bytes held by the allocator,
    its pool of free buffers included. cached_tokens + prefilled_tokens is every prompt token that
    was ever started on; the first is work skipped, the second work done (again, for a sequence that
    was preempted). looked_up_tokens: of prompts that were looked up in the prefix cache, whole.
    generated_tokens: reported ones. embedding: jobs whose inputs are embedded or
    wait for it; embedded_tokens: computed for such. hits: lookups by cached length, one count for
    each of HIT_BOUNDS and one beyond. misses: lookups by the reason why they did not get more.
    evictions: cached prefixes given up for room. preemptions: sequences that had to begin again
    for room. failures: jobs that ended in an error of the engine."""

    memory: int = 0
    running: int = 0
    waiting: int = 0
    cached_tokens: int = 0
    looked_up_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    embedding: int = 0
    embedded_tokens: int = 0
    ledger: Ledger = Ledger()
    hits: tuple[int, ...] = (0,) * (len(HIT_BOUNDS) + 1)
    misses: tuple[tuple[MissReason, int], ...] = ()
    evictions: int = 0
    preemptions: int = 0
    failures: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What a model is computed with. kernels: the instruction set of our own operations; None where
    all are MLX's. blas: the library behind MLX's products on the CPU; None for the one that MLX
    was built with. threads: that compute one operation. A GPU has no use for any of them."""

    device: Literal["cpu", "gpu"]
    kernels: str | None = None
    blas: str | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a loaded engine can do. parallel: sequences at once. context: positions that one
    sequence may have, by the model and by memory. kv_budget: bytes for KV caches and cached
    prefixes. kv_bytes: what a sequence of `context` positions takes of it. limited_by_memory:
    whether memory, not the model, sets the context. width: numbers of
    a hidden state, of which vectors of inputs are made; None where the model gives only logits.
    backend: None where nobody knows."""

    parallel: int
    context: int
    kv_budget: int
    kv_bytes: int
    limited_by_memory: bool = False
    width: int | None = None
    backend: Backend | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Everything one turn of the engine loop has to say, in order. embedded: jobs of inputs that
    are over."""

    updates: tuple[Update, ...]
    stats: EngineStats
    embedded: tuple[Embedded, ...] = ()
