"""Messages to and from an engine: jobs, their updates, and the state of the engine thread.

Knows: token IDs, counts, timestamps. Must not know: text, tensors. All types are plain data, so
that an engine can run in another process.

The updates of a job are `Started (PixelsNeeded | Prefilled)* PromptLogprobs? Token* Ended`. A job
that was preempted may also need pixels between two tokens. End-of-sequence tokens are not reported
as `Token`s, but the last token before a length limit is. The reported `Token`s are therefore
exactly the output.

An engine thread sends `LoadProgress` while the model loads, then `EngineReady`, and then one
`StepOutput` per step. If the thread ends with an error, it sends `EngineFailed`.
"""

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from msgspec import Struct

from app.core.errors import ErrorKind
from app.core.images import ImageSpan
from app.core.requests import EmbedResult, Grammar
from app.core.sampling_params import SamplingParams
from app.core.settings import MEBIBYTE

IDLE = "idle"

# The maximum number of nodes in a snapshot. The most recently used nodes are included.
MAX_SNAPSHOT_NODES = 200


class Heartbeat(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A heartbeat of the engine thread. timestamp_ns: monotonic time in ns. stage: the work that
    the thread started at that time, for example "decode, batch size 8", or `IDLE` while the thread
    waits for work."""

    timestamp_ns: int
    stage: str


class LoadProgress(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The progress of a load. progress: a percentage from 0 to 100. allocated_bytes: the bytes held
    by the allocator."""

    progress: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeBackend:
    """The device and the libraries that compute a model.

    kernels: the instruction set of mlxrunner's CPU kernels; None if only MLX's operations are used.
    blas: the BLAS library that MLX uses on the CPU; None if MLX uses the library that it was built
    with. threads: the number of threads that compute one operation. All three are None on a GPU.
    activations: the precision of activations in 4- and 8-bit layers, and on tiles in bfloat16 ones,
    in bits; None if the model has no such layers that the kernels compute.
    """

    device: Literal["cpu", "gpu"]
    kernels: str | None = None
    blas: str | None = None
    threads: int | None = None
    activations: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of a loaded engine.

    parallel: the maximum number of concurrent sequences. context_length: the maximum number of
    positions in a sequence, given the model and the memory. kv_budget: the bytes available for KV
    caches and cached prefixes. kv_bytes_per_sequence: the KV cache size of a sequence with
    `context_length` positions. limited_by_memory: whether the context is limited by memory rather
    than by the model. hidden_size: the hidden size of the model, which is the maximum width of
    embeddings; None if the model returns only logits. needs_checkpoints: whether cached prefixes
    can be resumed only at checkpoints. backend: the compute backend; None if unknown. kv_dtype: the
    type of the keys and values in KV caches, such as "bfloat16"; None without attention layers.
    wirable: the maximum number of bytes that the engine wires; 0 if the device cannot wire memory.
    vision: whether the model processes images.
    """

    parallel: int
    context_length: int
    kv_budget: int
    kv_bytes_per_sequence: int
    limited_by_memory: bool = False
    hidden_size: int | None = None
    needs_checkpoints: bool = True
    backend: ComputeBackend | None = None
    kv_dtype: str | None = None
    wirable: int = 0
    vision: bool = False


# empty: no cached sequence begins with the same tokens · diverged: the next tokens differ ·
# no_state: the tokens match, but a layer has no saved state to resume from · unwanted: the request
# disabled reuse
CacheMissReason = Literal["empty", "diverged", "no_state", "unwanted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """The maximum length of a request, and the setting that determines it. model_context: the
    maximum number of positions that the model supports. configured_context: the value of
    Settings.context. capacity: the engine's capacity; None until the model is loaded.
    request_context: the request's own limit; None if it has none."""

    model_context: int
    configured_context: int | None
    capacity: Capacity | None
    request_context: int | None = None

    @property
    def context_length(self) -> int:
        own = self.server_context
        return own if self.request_context is None else min(own, self.request_context)

    @property
    def server_context(self) -> int:
        """The maximum length without the request's own limit."""
        if self.capacity is not None:
            return self.capacity.context_length
        return (
            self.model_context
            if self.configured_context is None
            else min(self.model_context, self.configured_context)
        )

    def explain_too_long(self, num_tokens: int) -> str:
        """Returns an explanation of why a prompt of `num_tokens` tokens is rejected, with a remedy.
        The rejection is permanent: the prompt would not fit even if no other request were
        running."""
        capacity = self.capacity
        need = "at least one of which is needed for the output"
        if self.context_length < self.server_context:
            return (
                f"but the request limits its context to {self.context_length} tokens, {need}: "
                "shorten the prompt, or increase that limit"
            )
        if capacity is not None and capacity.limited_by_memory:
            required = (
                (num_tokens + 1)
                / capacity.context_length
                * capacity.kv_bytes_per_sequence
                / MEBIBYTE
            )
            return (
                f"but only {capacity.context_length} tokens fit in memory, {need} (it needs about "
                f"{required:.1f} MiB of KV cache, and a request can have "
                f"{capacity.kv_bytes_per_sequence / MEBIBYTE:.1f} MiB): shorten the "
                "prompt, or increase --memory"
            )
        if self.context_length < self.model_context:
            return (
                f"but the server's context is {self.context_length} tokens, {need} (the "
                f"model's own is {self.model_context}): shorten the prompt, or increase --context"
            )
        return (
            f"but the model's context is {self.context_length} tokens, {need}: shorten the prompt"
        )


class Ledger(Struct, frozen=True, kw_only=True, array_like=True):
    """The engine's memory budget and its breakdown, in bytes.

    budget: the total that the engine may use. weights: the model's weights. kv: the layer caches of
    running sequences, including memory reserved for their growth, and the layer caches of running
    embedding jobs. prefix: cached prefixes that no running sequence uses. working: memory reserved
    for the temporary arrays of a step. prefix_limit: the maximum of `prefix`; lower while the
    system is short of memory. wired: the bytes that Metal may keep resident for this engine; 0 on
    other devices, and while the engine is idle.

    0 <= free = budget - weights - kv - prefix - working.
    """

    budget: int = 0
    weights: int = 0
    kv: int = 0
    prefix: int = 0
    working: int = 0
    prefix_limit: int = 0
    wired: int = 0

    @property
    def free(self) -> int:
        return self.budget - self.in_use - self.prefix

    @property
    def prefix_share(self) -> float:
        """The part of the KV cache memory that cached prefixes may use, from 0 to 1."""
        return self.prefix_limit / max(1, self.budget - self.weights - self.working)

    @property
    def in_use(self) -> int:
        """The bytes that the engine needs for its current work."""
        return self.weights + self.kv + self.working


# upper bounds of the histogram of cached prefix lengths; the last bucket has no upper bound
PREFIX_HIT_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


class EngineStats(Struct, frozen=True, kw_only=True, array_like=True):
    """Counters since the engine started, and current gauges.

    allocated_bytes: the bytes held by the allocator, including its pool of free buffers.
    cached_tokens, prefilled_tokens: prompt tokens of started jobs that were found in the prefix
    cache, and prompt tokens that were computed. The tokens of a preempted sequence are computed and
    counted again. prefix_query_tokens: tokens of all prompts that were looked up in the prefix
    cache. generated_tokens: reported tokens. embedding_jobs: running and waiting embedding jobs.
    embedded_tokens: tokens computed for embedding jobs. prefix_hit_counts: the number of lookups by
    cached length, one count per bucket of PREFIX_HIT_BUCKETS and one for longer prefixes.
    prefix_miss_counts: the number of lookups by `CacheMiss` reason. prefix_evictions: cached
    prefixes evicted to free memory. preemptions: sequences restarted to free memory. failures: jobs
    that ended with an engine error. images_encoded: images that the vision tower has encoded.
    image_cache_hits: images whose features were cached when a sequence needed them.
    """

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
    images_encoded: int = 0
    image_cache_hits: int = 0


class EngineReady(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The model is loaded, or its capacity has changed. stats: the current statistics, including
    the ledger."""

    stats: EngineStats
    capacity: Capacity


class EngineFailed(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The engine thread has ended with an error. is_internal_error: whether the cause is a bug, for
    example a failed assertion. The traceback of a bug is in the log. For other errors, `kind` and
    `message` come from the AppError."""

    kind: ErrorKind
    message: str
    is_internal_error: bool = False


EndReason = Literal["stop", "length", "cancelled", "error"]


class Ended(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The job has ended, and its slot is free.

    timestamp_ns: monotonic time in ns. stop_token_id: the end-of-sequence token that ended the
    output, or None. error: one sentence if the reason is "error", else None. engine_lost: whether
    the engine exited unexpectedly while the job was running. invalid_request: whether the request
    caused the error.
    """

    job_id: str
    reason: EndReason
    timestamp_ns: int
    stop_token_id: int | None = None
    error: str | None = None
    engine_lost: bool = False
    invalid_request: bool = False


class PixelsNeeded(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The job waits for the pixels of these images of `Job.images`, without duplicates. They are
    provided with `Submission.provide_images`, in any order."""

    job_id: str
    keys: tuple[bytes, ...]


class Prefilled(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The KV cache now holds `computed_tokens` prompt tokens, including cached ones. While an image
    of the prompt is encoded, the number is repeated."""

    job_id: str
    computed_tokens: int


class PromptLogprobs(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The log probabilities of the prompt tokens. logprobs: one (logprob, top_logprobs) pair for
    every token except the first, as in `Token`."""

    job_id: str
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


class CacheMiss(Struct, frozen=True, kw_only=True, array_like=True):
    """The reason why the prefix cache did not find a longer prefix. position: the first position
    that was not cached. cached_ids: the first few tokens that are cached at that position instead,
    if any."""

    position: int
    reason: CacheMissReason
    cached_ids: tuple[int, ...] = ()


class Started(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The job has left the queue. cached_tokens: the number of prompt tokens that need no prefill.
    timestamp_ns: monotonic time in ns. miss: the reason for a cache miss; None if the whole prompt
    was cached, except its last token."""

    job_id: str
    cached_tokens: int
    timestamp_ns: int
    miss: CacheMiss | None = None


class Token(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """One sampled token. timestamp_ns: the monotonic time in ns at which the token became
    available. logprob: the log probability, computed from the raw logits in float32; None unless
    the job enables logprobs. top_logprobs: (token ID, logprob) pairs, most likely first; empty
    unless the job enables them."""

    job_id: str
    id: int
    timestamp_ns: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


JobUpdate = Started | PixelsNeeded | Prefilled | PromptLogprobs | Token | Ended


class StepOutput(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The output of one step of the engine loop. updates: job updates, in order. embed_results: the
    results of finished embedding jobs."""

    updates: tuple[JobUpdate, ...]
    stats: EngineStats
    embed_results: tuple[EmbedResult, ...] = ()


EngineMessage = LoadProgress | EngineReady | EngineFailed | StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence to generate.

    prompt_token_ids: the prompt, at least one token. max_tokens: the maximum number of output
    tokens, at least 1. The prompt and max_tokens together never exceed the context. stop_token_ids:
    the end-of-sequence tokens. top_logprobs: the number of alternatives per token; None for no
    logprobs. cache_prompt: whether the prefix cache may be used for the prompt. num_keep: the
    number of leading tokens that a context shift never discards. grammar: a constraint on the
    sampled tokens. When the grammar allows no more tokens, the sequence ends with finish reason
    "stop". min_tokens: the number of tokens to sample before a token of stop_token_ids is allowed;
    0 with a grammar. prompt_logprobs: like top_logprobs, but for the prompt; `PromptLogprobs` are
    then sent before the first token. caller: the owner of the job. Scheduling is round-robin
    between callers. message_ends: the positions of the prompt at which other prompts are likely to
    diverge, in ascending order; None if unknown. adapter: the key of the model's adapter; "" for
    none. images: the images of the prompt, in order; their rows have negative IDs in
    prompt_token_ids, see `app.core.images`.
    """

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
    message_ends: tuple[int, ...] | None = None
    adapter: str = ""
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixNode:
    """The cached tokens of positions [start, start + tokens).

    parent: the index of the parent in `PrefixSnapshot.nodes`; None if the node starts at 0.
    last_used: the Unix time of the last use. branches: the number of child nodes, including those
    that the snapshot omits. running: the number of running sequences that contain these tokens.
    """

    parent: int | None
    start: int
    tokens: int
    last_used: float
    branches: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSnapshot:
    """nodes: the most recently used nodes; each parent precedes its children. total_nodes: the
    number of nodes in the cache."""

    nodes: tuple[PrefixNode, ...] = ()
    total_nodes: int = 0


CallResult = TypeVar("CallResult")


class EngineCall(Struct, Generic[CallResult], frozen=True, kw_only=True, array_like=True):
    """A call that the engine handles between two steps, and that has a reply. A new call needs a
    struct here, an entry in `AnyEngineCall`, and a case in `app.engine.loop.Loop.call`."""


class GetPrefixSnapshot(
    EngineCall[PrefixSnapshot], frozen=True, kw_only=True, array_like=True, tag=True
):
    """Returns a snapshot of the prefix cache."""


class SetSpareMemory(EngineCall[int], frozen=True, kw_only=True, array_like=True, tag=True):
    """Sets the memory in bytes that cached prefixes may use in addition to the engine's memory
    budget. Returns how much of it may be in use now, which is more than `num_bytes` if running
    requests use memory that is taken back."""

    num_bytes: int


class LoadAdapter(EngineCall[None], frozen=True, kw_only=True, array_like=True, tag=True):
    """Loads an adapter, which jobs then select by its key. path: its folder, or a GGUF file. Raises
    AppError(MODEL_FILES), and then changes nothing."""

    key: str
    path: str


class UnloadAdapter(EngineCall[None], frozen=True, kw_only=True, array_like=True, tag=True):
    """Unloads an adapter that no job uses. Does nothing if it is not loaded."""

    key: str


AnyEngineCall = GetPrefixSnapshot | SetSpareMemory | LoadAdapter | UnloadAdapter

# The values of all replies.
EngineReply = PrefixSnapshot | int | None
