"""The interfaces between packages, as protocols; classes receive implementations as arguments.

Knows: the types of app.core. Must not know: implementations.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeVar

from app.core.context_shift import ShiftResult
from app.core.embeddings import Embeddings, EmbedJob, EmbedRequest
from app.core.events import Event
from app.core.jobs import CacheMiss, Capacity, EngineStats, Job, JobUpdate
from app.core.model_files import ModelFiles
from app.core.model_state import ModelState
from app.core.requests import GenerateRequest

RunnerState = Literal["loading", "ready", "stalled", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStatus:
    """The last known status of a runner; reading it never waits.

    progress: 0 to 100 while loading. error: one sentence if the state is "failed" or "stalled"
    (loaded, but the engine has made no step for too long). capacity: None until loaded. rejected:
    jobs rejected since the start because the queue was full. preparing: admitted jobs whose prompt
    is being rendered and encoded. compiling: submitted jobs whose grammar is being compiled. pid:
    process id of a runner that has its own process."""

    state: RunnerState
    progress: int
    stats: EngineStats
    error: str | None = None
    capacity: Capacity | None = None
    rejected: int = 0
    preparing: int = 0
    compiling: int = 0
    pid: int | None = None


class Submission(Protocol):
    """A submitted job. Iterating yields its updates, `Ended` last."""

    @property
    def started_ns(self) -> int | None:
        """Monotonic time in ns at which the job left the engine's queue."""
        ...

    @property
    def ended_ns(self) -> int | None:
        """Monotonic time in ns at which its place in the engine was free again; set before `Ended`
        is read."""
        ...

    def __aiter__(self) -> AsyncIterator[JobUpdate]: ...

    def limit_cached_tokens(self, tokens: int) -> None:
        """Cache only the first `tokens` sampled tokens, since the client received no more."""
        ...


class ReservedSlots(Protocol):
    """Reserved places in a model's queue, one for each job of a request."""

    def submit(self, job: Job) -> AbstractAsyncContextManager[Submission]:
        """Like `Runner.submit`, in one of the reserved places."""
        ...

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """Like `Runner.embed`, in one of the reserved places."""
        ...


class Engine(Protocol):
    """The interface through which generation runs jobs of one model."""

    def reserve(self, count: int = 1) -> AbstractContextManager[ReservedSlots]:
        """Reserves places for `count` jobs until the context exits. Must be entered before any work
        is done for the jobs. Raises AppError(BUSY) if the queue is full."""
        ...

    def status(self) -> RunnerStatus: ...


FailureCause = Literal["fault", "unknown", "outside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFailure:
    """Why a ready runner failed without having been stopped. message: one sentence. cause: "fault"
    is an error, a hang or a fault signal of its own; "outside" is a signal from a user or another
    program; "unknown" is a signal that the system may have sent because it was out of memory."""

    message: str
    cause: FailureCause = "fault"


class Runner(Protocol):
    """Keeps one model in memory and generates from it."""

    async def start(self, files: ModelFiles) -> None:
        """Loads the model; returns when it is ready. Raises AppError(MODEL_FILES) if it cannot be
        loaded."""
        ...

    def submit(self, job: Job) -> AbstractAsyncContextManager[Submission]:
        """Submits a job. Leaving the context early cancels it, within one prefill chunk or two
        steps. Raises AppError(LOADING) or AppError(ENGINE) if no engine is available,
        AppError(INVALID) for an unsupported grammar."""
        ...

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """Returns the vectors of the job's inputs. Cancelling the call cancels the job. Raises
        AppError as `submit` does, and AppError(ENGINE) if the engine fails meanwhile. Must not be
        called if the capacity's hidden_size is None."""
        ...

    def status(self) -> RunnerStatus: ...

    async def wait_for_failure(self) -> RunnerFailure:
        """Returns when a ready runner fails without having been stopped. Any number of tasks may
        wait."""
        ...

    async def stop(self) -> None:
        """Stops the runner immediately; its jobs end with errors. May be called again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The public description of a model. created: Unix time. system_fingerprint: changes with
    everything that may change the output for the same seed: the model's files, versions and
    settings."""

    id: str
    created: int
    context_length: int
    system_fingerprint: str = "fp_mlxrunner"


class ResolvedModel(Protocol):
    """The model that a request named, resolved once. Its files and state may change afterwards."""

    @property
    def card(self) -> ModelCard: ...


class Models(Protocol):
    """The models that requests may use."""

    async def resolve(self, name: str | None) -> ResolvedModel:
        """Returns the model of that name, even if it was installed only just now; Ollama's clients
        may append ":latest". name: None is the server's default model. Raises
        AppError(MODEL_NOT_FOUND), and AppError(LOADING) if no model is known yet."""
        ...

    async def rescan(self) -> None:
        """Finds models that were installed since the last scan."""
        ...

    def list_models(self) -> Sequence[ModelCard]:
        """All models, the server's default model first."""
        ...

    def list_model_states(self) -> Sequence[ModelState]:
        """In the order of `list_models`."""
        ...

    def model_state(self, model: ResolvedModel) -> ModelState: ...

    def status(self) -> RunnerStatus:
        """The status of the whole server: the state of the models that are always loaded, and sums
        over all models."""
        ...

    async def load(self, model: ResolvedModel, keep_alive: float | None = None) -> ModelState:
        """Loads a model; returns when it is ready. keep_alive: seconds that it stays loaded without
        requests; None leaves that unchanged. Raises AppError."""
        ...

    async def unload(self, model: ResolvedModel) -> ModelState:
        """Unloads a model after its requests have finished; returns when its memory is free. Raises
        AppError for a pinned model."""
        ...

    async def tokenize(
        self, model: ResolvedModel, text: str, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        """The token ids of a text. add_special_tokens: add the special tokens of a prompt. The
        model need not be loaded."""
        ...

    async def tokenize_chat(self, model: ResolvedModel, request: GenerateRequest) -> Sequence[int]:
        """The prompt ids of a conversation, even if they exceed the context. The model need not be
        loaded. Raises AppError as `Generate.open` does."""
        ...

    async def get_token_bytes(self, model: ResolvedModel, ids: Sequence[int]) -> Sequence[bytes]:
        """The bytes of each token by itself; b"" for an id that is not a token."""
        ...

    async def get_tokenizer_info(self, model: ResolvedModel) -> Mapping[str, Any]:
        """Returns the result of `app.text.chat_template.build_tokenizer_info`."""
        ...

    async def detokenize(self, model: ResolvedModel, ids: Sequence[int]) -> str:
        """The text of token ids. Raises AppError(INVALID) for an id outside the vocabulary."""
        ...


class Generate(Protocol):
    """Generation and embedding; limits, metrics and tracing wrap an implementation."""

    def open(
        self, request: GenerateRequest, model: ResolvedModel
    ) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Entering validates, encodes and queues the request, or raises AppError. Leaving early
        cancels it. Iterating yields events, `Finish` last; raises AppError(ENGINE) if the engine
        fails."""
        ...

    async def embed(self, request: EmbedRequest, model: ResolvedModel) -> Embeddings:
        """Computes embeddings. Raises AppError, also for a model without embeddings. Cancelling the
        call cancels the request."""
        ...


class LayerKV(Protocol):
    """The interface of a layer cache for the prefix cache. models/kv.py has the implementations.

    Layers are of two kinds. A sliceable layer stores data per position: any range of positions can
    be copied out and appended to another layer. Other layers can only be copied as a whole, and
    possibly trimmed by a few positions.
    """

    @property
    def offset(self) -> int:
        """The number of positions processed."""
        ...

    @property
    def nbytes(self) -> int:
        """Allocated bytes, including unused capacity."""
        ...

    @property
    def sliceable(self) -> bool: ...

    def can_trim(self, count: int) -> bool: ...

    def trim(self, count: int) -> None:
        """Removes the last `count` positions."""
        ...

    def copy(self) -> Self:
        """An independent copy without unused capacity."""
        ...

    def slice(self, start: int, end: int) -> Self:
        """An independent copy of positions [start, end), without unused capacity; its offset is
        end - start. Only for sliceable layers."""
        ...

    def append(self, other: Self, start: int, end: int) -> None:
        """Appends a copy of positions [start, end) of `other`. Only for sliceable layers."""
        ...

    def reserve(self, length: int) -> None:
        """Allocates capacity, so that growing to `length` positions copies nothing."""
        ...


Layer = TypeVar("Layer", bound=LayerKV)
Layer_co = TypeVar("Layer_co", bound=LayerKV, covariant=True)


class Lease(Protocol[Layer_co]):
    """A sequence's temporary ownership of layer caches."""

    @property
    def kv(self) -> Sequence[Layer_co]:
        """The layer caches, to read and write until the lease ends."""
        ...

    @property
    def cached(self) -> int:
        """The number of leading ids of the prompt that the caches already hold."""
        ...

    @property
    def miss(self) -> CacheMiss | None:
        """Why `cached` is not larger; None if only the last id is left to evaluate."""
        ...

    @property
    def checkpoint_positions(self) -> Sequence[int]:
        """Positions of the prompt, ascending, each beyond `cached`, at which prefill must pause and
        call `publish`, so that the cache can copy the state of the layers there."""
        ...

    def publish(self, ids: Sequence[int]) -> None:
        """Reports that the caches now hold exactly these ids. Other sequences may copy them."""
        ...

    def commit(self, ids: Sequence[int], *, keep: int) -> None:
        """Ends the lease and keeps the caches for other sequences.

        ids: all ids evaluated into the caches, in order. keep: number of these to keep; the rest is
        trimmed if the layers support it.
        """
        ...

    def discard(self) -> None:
        """Ends the lease and drops the caches, whose content may be invalid."""
        ...


class ShiftingLease(Lease[Layer_co], Protocol[Layer_co]):
    """A lease that supports context shift."""

    def shift(
        self,
        ids: Sequence[int],
        *,
        num_keep: int,
        remove: Callable[[Sequence[Layer_co], int, int], bool],
    ) -> ShiftResult:
        """Discards the older half of the ids after the first `num_keep`, once the context is full.

        ids: all ids evaluated into the layers, in order. remove(kv, start, end): removes positions
        [start, end) from the layers and moves the following ones up; returns False, without any
        change, if the layers do not support it; then all remaining ids must be evaluated again."""
        ...


class PrefixCache(Protocol[Layer_co]):
    """Keeps evaluated prefixes, so that prompts with the same prefix skip its evaluation."""

    def begin(
        self,
        ids: Sequence[int],
        *,
        turn_ends: Sequence[int] = (),
        reuse: bool = True,
        reserve_length: int = 0,
    ) -> Lease[Layer_co]:
        """Leases caches for a prompt. At least one id is always left to evaluate.

        turn_ends: ends of turns, ascending; positions at which prompts often diverge. reuse: False
        ignores cached prefixes, but still caches this prompt. reserve_length: positions to allocate
        capacity for, if more than the prompt and one id need.
        """
        ...

    @property
    def shares_live(self) -> bool:
        """Whether other sequences can use the computed prefix of a running sequence."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of cached prefixes that are not leased."""
        ...

    @property
    def evictions(self) -> int:
        """The number of prefixes evicted to free memory."""
        ...

    def evict(self, num_bytes: int) -> int:
        """Evicts the prefixes that are least likely to be reused until at least `num_bytes` bytes
        are free or only leased caches are left. Returns the number of bytes freed."""
        ...

    def clear(self) -> None:
        """Drops everything that is not leased."""
        ...

    def check(self) -> None:
        """Asserts all invariants; called in tests and while the engine is idle."""
        ...
