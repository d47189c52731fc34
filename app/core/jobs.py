"""The messages to and from an engine: jobs, their updates, and the state of the engine thread.

Knows: token ids, counts, timestamps. Must not know: text, tensors. All types are plain data, so
that an engine can run in another process.

The updates of a job are `Started Prefilled* PromptLogprobs? Token* Ended`. An end-of-sequence id is
never reported as a `Token`; the last id before a length limit is. So every `Token` is part of the
output, and the output consists of `Token`s only.

An engine thread sends `LoadProgress` while the model loads, then `EngineReady`, a `StepOutput` per
step, and `EngineFailed` when it ends with an error.
"""

from dataclasses import dataclass
from typing import Literal

from app.core.embeddings import EmbedResult
from app.core.errors import ErrorKind
from app.core.requests import Grammar
from app.core.sampling_params import SamplingParams

IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """timestamp_ns: monotonic time in ns. stage: what the engine thread began at that time, such as
    "decode of 8 sequences"; `IDLE` while it waits for work, however long."""

    timestamp_ns: int
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """progress: 0 to 100. allocated_bytes: bytes held by the allocator."""

    progress: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeBackend:
    """The device and the libraries that compute a model.

    kernels: instruction set of mlxrunner's CPU kernels; None if only MLX's operations are used.
    blas: library that computes MLX's matrix products on the CPU; None for the one that MLX was
    built with. threads: number of threads that compute one operation. All three are None on a
    GPU."""

    device: Literal["cpu", "gpu"]
    kernels: str | None = None
    blas: str | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of a loaded engine.

    parallel: maximum number of concurrent sequences. context_length: maximum positions of a
    sequence, given the model and the memory. kv_budget: bytes for KV caches and cached prefixes.
    kv_bytes_per_sequence: bytes of a sequence of `context_length` positions. limited_by_memory:
    whether memory, not the model, limits the context. hidden_size: width of the hidden states, from
    which embeddings are computed; None if the model returns logits only. backend: None if
    unknown."""

    parallel: int
    context_length: int
    kv_budget: int
    kv_bytes_per_sequence: int
    limited_by_memory: bool = False
    hidden_size: int | None = None
    backend: ComputeBackend | None = None


# empty: no cached sequence has the same first ids · diverged: the next ids differ · no_state: the
# ids match, but a layer has no saved state to resume from · unwanted: the request disabled reuse
CacheMissReason = Literal["empty", "diverged", "no_state", "unwanted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The engine's memory budget and its uses, in bytes.

    budget: total that the engine may use. weights: the model. kv: layer caches of running
    sequences, including the space reserved for their growth, and of inputs being embedded. prefix:
    cached prefixes that no running sequence uses. working: reserved for the temporary arrays of a
    step.

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


# upper bounds of the histogram of cached prefix lengths; the last bucket has none
PREFIX_HIT_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started, and current gauges.

    allocated_bytes: bytes held by the allocator, including its pool of free buffers. cached_tokens,
    prefilled_tokens: prompt tokens of started jobs that were skipped and that were computed; a
    preempted sequence is computed again and counts again. prefix_query_tokens: tokens of all
    prompts that were looked up in the prefix cache. generated_tokens: reported tokens.
    embedding_jobs: embedding jobs that run or wait. embedded_tokens: tokens computed for them.
    prefix_hit_counts: lookups by cached length, one count per PREFIX_HIT_BUCKETS and one above.
    prefix_miss_counts: lookups by the reason why no longer prefix was found. prefix_evictions:
    cached prefixes evicted to free memory. preemptions: sequences restarted to free memory.
    failures: jobs that ended in an error of the engine."""

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
    """The model is loaded. stats: initial statistics, in particular the ledger."""

    stats: EngineStats
    capacity: Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    """The engine thread has ended with an error. is_internal_error: whether the cause is a bug,
    such as a failed assertion, whose traceback is in the log; else `kind` and `message` are those
    of the AppError."""

    kind: ErrorKind
    message: str
    is_internal_error: bool = False


EndReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The job has ended and its place is free.

    timestamp_ns: monotonic time in ns. error: one sentence if reason is "error", else None.
    engine_lost: whether the engine ended unexpectedly before the job did. invalid_request: whether
    the request caused the error."""

    job_id: str
    reason: EndReason
    timestamp_ns: int
    error: str | None = None
    engine_lost: bool = False
    invalid_request: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """`computed_tokens` prompt tokens are in the KV cache, including cached ones."""

    job_id: str
    computed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's ids. logprobs: (logprob, top_logprobs) of every id but the
    first, as in `Token`."""

    job_id: str
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMiss:
    """Why the prefix cache found no longer prefix. position: first position that was not cached.
    cached_ids: the first few ids cached at that position instead, if any."""

    position: int
    reason: CacheMissReason
    cached_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The job left the queue. cached_tokens: prompt tokens that need no evaluation. timestamp_ns:
    monotonic time in ns. miss: None if all tokens that can be cached were."""

    job_id: str
    cached_tokens: int
    timestamp_ns: int
    miss: CacheMiss | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One sampled id. timestamp_ns: monotonic time in ns at which the id was known. logprob: from
    the raw logits in float32; None unless the job asked for it. top_logprobs: (id, logprob), most
    likely first; empty unless the job asked for them."""

    job_id: str
    id: int
    timestamp_ns: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


JobUpdate = Started | Prefilled | PromptLogprobs | Token | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The output of one step of the engine loop. updates: in order. embed_results: results of
    finished embedding jobs."""

    updates: tuple[JobUpdate, ...]
    stats: EngineStats
    embed_results: tuple[EmbedResult, ...] = ()


EngineMessage = LoadProgress | EngineReady | EngineFailed | StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence to generate.

    prompt_token_ids: at least one id. max_tokens: at least 1; prompt plus max_tokens never exceeds
    the context. stop_token_ids: end-of-sequence ids. top_logprobs: number of alternatives per
    token; None for no logprobs. cache_prompt: whether a cached prefix may be used for the prompt.
    num_keep: leading ids that a context shift never discards. grammar: constraint on the sampled
    ids; when nothing but the end can follow, the sequence ends with "stop". min_tokens: number of
    ids to sample before one of stop_token_ids is allowed; 0 with a grammar. prompt_logprobs: like
    top_logprobs, for the prompt; `PromptLogprobs` are then sent before the first token. caller:
    owner of the job; callers with waiting jobs take turns."""

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
