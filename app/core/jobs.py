"""The engine's wire format: ids in, ids out.

Knows: token ids, counts, clock readings. Must not know: text, tensors. Everything here is plain
data, so that an engine may live in another process one day.

The life of a job is `Started Prefilled* PromptScores? Token* Ended`. A token that ends a sequence
by being an end-of-sequence id is never reported as a `Token`; a token that ends it by being the
last one allowed is. So: every `Token` is text, and nothing else is.

What an engine thread says: the model loads, is there, has turned, or is lost.
"""

from dataclasses import dataclass
from typing import Literal

from app.core.embeddings import EmbedResult
from app.core.errors import ErrorKind
from app.core.requests import Grammar, SamplingParams

IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """timestamp_ns: monotonic ns. stage: what the thread began then, such as (
        "decode of 8 "
        "sequences"
    ); `IDLE`
    while it waits for something to do, for as long as that takes."""

    timestamp_ns: int
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """progress: 0 to 100. allocated_bytes: bytes held by the allocator."""

    progress: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeBackend:
    """What a model is computed with. kernels: the instruction set of our own operations; None where
    all are MLX's. blas: the library behind MLX's products on the CPU; None for the one that MLX
    was built with. threads: that compute one operation. A GPU has no use for any of them."""

    device: Literal["cpu", "gpu"]
    kernels: str | None = None
    blas: str | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a loaded engine can do. parallel: sequences at once. context_length: positions that one
    sequence may have, by the model and by memory. kv_budget: bytes for KV caches and cached
    prefixes. kv_bytes_per_sequence: what a sequence of `context_length` positions takes of it.
    limited_by_memory: whether memory, not the model, sets the context. hidden_size: numbers of a
    hidden state, of which vectors of inputs are made; None where the model gives only logits.
    backend: None where nobody knows."""

    parallel: int
    context_length: int
    kv_budget: int
    kv_bytes_per_sequence: int
    limited_by_memory: bool = False
    hidden_size: int | None = None
    backend: ComputeBackend | None = None


# nothing cached begins like it · other ids follow · the ids match, but a layer has no state to go
# back to · the request wanted no reuse
CacheMissReason = Literal["empty", "diverged", "no_state", "unwanted"]


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
PREFIX_HIT_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started, and gauges of now. allocated_bytes: bytes held by the
    allocator, its pool of free buffers included. cached_tokens + prefilled_tokens is every prompt
    token that was ever started on; the first is work skipped, the second work done (again, for a
    sequence that was preempted). prefix_query_tokens: of prompts that were looked up in the prefix
    cache, whole. generated_tokens: reported ones. embedding_jobs: jobs whose inputs are embedded or
    wait for it; embedded_tokens: computed for such. prefix_hit_counts: lookups by cached length,
    one count for each of HIT_BOUNDS and one beyond. prefix_miss_counts: lookups by the reason why
    they did not get more. prefix_evictions: cached prefixes given up for room. preemptions:
    sequences that had to begin again for room. failures: jobs that ended in an error of the
    engine."""

    allocated_bytes: int = 0
    running: int = 0
    waiting: int = 0
    cached_tokens: int = 0
    prefix_query_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    embedding_jobs: int = 0
    embedded_tokens: int = 0
    ledger: Ledger = Ledger()
    prefix_hit_counts: tuple[int, ...] = (0,) * (len(PREFIX_HIT_BUCKETS) + 1)
    prefix_miss_counts: tuple[tuple[CacheMissReason, int], ...] = ()
    prefix_evictions: int = 0
    preemptions: int = 0
    failures: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """stats: those of an engine that has done nothing yet, its ledger above all."""

    stats: EngineStats
    capacity: Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    """The thread has ended. is_internal_error: whether it was a fault of ours, an assertion for
    example, whose traceback is in the log; else `kind` and `message` are those of the AppError."""

    kind: ErrorKind
    message: str
    is_internal_error: bool = False


EndReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The job is over and its place is free. error: a sentence, only when reason is "error".
    timestamp_ns: monotonic ns. engine_lost: the error is that the engine ended before the job did,
    though nothing stopped it. invalid_request: the error is of what the request asked for."""

    job_id: str
    reason: EndReason
    timestamp_ns: int
    error: str | None = None
    engine_lost: bool = False
    invalid_request: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """`computed_tokens` prompt tokens are in the KV cache, cached ones included."""

    job_id: str
    computed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """The prompt's ids as if they had been sampled, all but the first: one (logprob, top) each, as
    in `Token`."""

    job_id: str
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMiss:
    """Why the prefix cache did not serve more. position: the first position that was not served.
    cached_ids: a few of the ids that are cached there, if other ones are."""

    position: int
    reason: CacheMissReason
    cached_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The job left the queue; `cached_tokens` prompt tokens need no evaluation. timestamp_ns:
    monotonic ns. miss: None when everything was cached that can be."""

    job_id: str
    cached_tokens: int
    timestamp_ns: int
    miss: CacheMiss | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One sampled id. logprob and top (id, logprob; most likely first) are from the raw logits in
    float32, and None and empty unless the job asked. timestamp_ns: monotonic ns when its value was
    known."""

    job_id: str
    id: int
    timestamp_ns: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


JobUpdate = Started | Prefilled | PromptLogprobs | Token | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Everything one turn of the engine loop has to say, in order. embed_results: jobs of inputs
    that are over."""

    updates: tuple[JobUpdate, ...]
    stats: EngineStats
    embed_results: tuple[EmbedResult, ...] = ()


EngineMessage = LoadProgress | EngineReady | EngineFailed | StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence to generate. prompt_token_ids: the prompt, at least one. max_tokens: at least
    one, and prompt plus max_tokens never exceeds the context. stop_token_ids: end-of-sequence ids.
    top_logprobs: None for no logprobs. cache_prompt: whether the prefix cache may serve the prompt.
    keep: ids at the beginning that a context shift never discards. grammar: what the sampled ids
    must spell; a sequence that can only end ends there, with "stop". min_tokens: so many are
    sampled before one of stop_ids may be; 0 with a grammar. prompt_logprobs: like top_logprobs, for
    the prompt's own prompt_token_ids: then `PromptLogprobs` come before the first token. caller:
    whose it is; those who wait take turns by it."""

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    top_logprobs: int | None = None
    cache_prompt: bool = True
    num_keep: int = 0
    grammar: Grammar | None = None
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    caller: str = ""
