"""The seams between rooms, as protocols. Whoever needs one gets it through its constructor."""

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
    """The last thing a runner is known to have said; reading it waits for nothing.
    progress: 0 to 100 while loading. error: one sentence when the state is "failed" or "stalled"
    (loaded, but the engine has not turned for too long). capacity: None until loaded. rejected:
    jobs that were refused since the start because too many waited. preparing: admitted jobs whose
    prompt is rendered and encoded. compiling: submitted jobs whose grammar is compiled. pid: of the
    process that it has for itself, if it has one."""

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
    """A job on its way. Iterate to get its updates, `Ended` last."""

    @property
    def started_ns(self) -> int | None:
        """When the job left the engine's queue; monotonic ns."""
        ...

    @property
    def ended_ns(self) -> int | None:
        """When its place in the engine was free again; known before `Ended` is read."""
        ...

    def __aiter__(self) -> AsyncIterator[JobUpdate]: ...

    def limit_cached_tokens(self, tokens: int) -> None:
        """The client saw only the first `tokens` sampled tokens: cache no more than those."""
        ...


class ReservedSlots(Protocol):
    """Room for a request's jobs in a model's queue. Each job takes one place."""

    def submit(self, job: Job) -> AbstractAsyncContextManager[Submission]:
        """As `Runner.submit`."""
        ...

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """As `Runner.embed`."""
        ...


class Engine(Protocol):
    """What generation knows of whatever runs jobs of one model."""

    def reserve(self, count: int = 1) -> AbstractContextManager[ReservedSlots]:
        """Places for so many jobs until the context is left, to be reserved before any work is done
        for them. Raises AppError(BUSY) when too many are here already."""
        ...

    def status(self) -> RunnerStatus: ...


FailureCause = Literal["fault", "unknown", "outside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFailure:
    """Why a runner that was ready serves no more, though nothing stopped it. message: one sentence.
    cause: "fault" is what it computed: an error, a hang, a fault signal. "outside" is a signal that
    a person or a program sent. "unknown" is one that the system may have sent because memory ran
    out."""

    message: str
    cause: FailureCause = "fault"


class Runner(Protocol):
    """Keeps one model in memory and generates from it."""

    async def start(self, files: ModelFiles) -> None:
        """Returns when the model is ready. Raises AppError(MODEL_FILES) if it cannot be."""
        ...

    def submit(self, job: Job) -> AbstractAsyncContextManager[Submission]:
        """Leaving the context early cancels the job, within one prefill chunk or two steps.
        Raises AppError(LOADING) or AppError(ENGINE) when there is nobody to run it,
        AppError(INVALID) for a grammar that cannot be followed."""
        ...

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """The vectors of the job's inputs. Being cancelled cancels the job. Raises AppError as
        `submit` does, AppError(ENGINE) if the engine broke meanwhile. Not to be asked of a runner
        whose capacity has no width."""
        ...

    def status(self) -> RunnerStatus: ...

    async def wait_for_failure(self) -> RunnerFailure:
        """Returns when a runner that was ready can serve no more, though nothing stopped it. Any
        number may wait."""
        ...

    async def stop(self) -> None:
        """Ends it, whatever it is at. Its jobs end in errors. May be called again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What is told about a model. created: Unix time. system_fingerprint: changes with whatever may
    change answers to one and the same seed: the model's files, versions, settings."""

    id: str
    created: int
    context_length: int
    system_fingerprint: str = "fp_mlxrunner"


class Generate(Protocol):
    """What HTTP knows of everything below it."""

    def open(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Entering validates, encodes and queues the request, or raises AppError. Leaving ends it:
        early leaving cancels. Iterating yields events, `Finish` last; AppError(ENGINE) if the
        engine broke meanwhile."""
        ...

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """Raises AppError, also for a model that has no vectors to give. Being cancelled ends the
        request."""
        ...

    async def tokenize(
        self, text: str, model: str | None = None, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        """The ids of a text: with add_special those which it would be evaluated as, were it a plain
        prompt, else those of the text alone. model: None is the server's own choice; it need not be
        loaded."""
        ...

    async def tokenize_chat(self, request: GenerateRequest) -> Sequence[int]:
        """The ids of the prompt of a request whose prompt is a conversation, also of one that has
        more than the context has room for. The model need not be loaded. Raises AppError as `open`
        does for a conversation or tools that it refuses."""
        ...

    async def get_token_bytes(
        self, ids: Sequence[int], model: str | None = None
    ) -> Sequence[bytes]:
        """What each token spells, alone; b"" for an id that is no token."""
        ...

    async def get_tokenizer_info(self, model: str | None = None) -> Mapping[str, Any]:
        """What a client needs to know of a tokenizer: see `app.text.chat_template.build_tokenizer_info`."""
        ...

    async def detokenize(self, ids: Sequence[int], model: str | None = None) -> str:
        """Raises AppError(INVALID) for an id outside the vocabulary."""
        ...

    async def discover(self, model: str) -> None:
        """To be called with the name in a request before `models` is asked: what was installed
        since the last look is found now. Finding nothing is no error yet."""
        ...

    def list_models(self) -> Sequence[ModelCard]:
        """Those that a request may name, the first one being the server's own choice."""
        ...

    def status(self) -> RunnerStatus:
        """Of the whole server: how it stands with the models that are to be loaded always, and the
        figures of all that are."""
        ...

    def list_model_states(self) -> Sequence[ModelState]:
        """In the order of `models`."""
        ...

    async def load(self, model: str, keep_alive: float | None = None) -> ModelState:
        """Returns when it is ready. Raises AppError."""
        ...

    async def unload(self, model: str) -> ModelState:
        """Returns when it has left memory; its requests are answered first. Raises AppError for an
        unknown one and for a pinned one."""
        ...


class LayerKV(Protocol):
    """What a prefix cache knows of one layer's state. The real ones are in models/kv.py.

    Layers are of two kinds. A divisible one keeps something for each position: any range of it can
    be taken out and appended to another. Any other one is a whole: it can be copied as it is, and
    perhaps cut back a little.
    """

    @property
    def offset(self) -> int:
        """Positions it has seen."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held, free room included."""
        ...

    @property
    def sliceable(self) -> bool: ...

    def can_trim(self, count: int) -> bool: ...

    def trim(self, count: int) -> None:
        """Forget the last `count` positions."""
        ...

    def copy(self) -> Self:
        """An independent one with the same content and no free room."""
        ...

    def slice(self, start: int, end: int) -> Self:
        """An independent one that holds positions [start, end) only, and no free room. Its own
        offset is end - start. Only of a divisible one."""
        ...

    def append(self, other: Self, start: int, end: int) -> None:
        """Copy positions [start, end) of `other` behind those held here. Only divisible ones."""
        ...

    def reserve(self, length: int) -> None:
        """Make room, so that growing to `length` positions will copy nothing."""
        ...


Layer = TypeVar("Layer", bound=LayerKV)
Layer_co = TypeVar("Layer_co", bound=LayerKV, covariant=True)


class Lease(Protocol[Layer_co]):
    """A sequence's loan of layer caches."""

    @property
    def kv(self) -> Sequence[Layer_co]:
        """To be read and written until the lease ends."""
        ...

    @property
    def cached(self) -> int:
        """How many of the prompt's first ids the caches already stand for."""
        ...

    @property
    def miss(self) -> CacheMiss | None:
        """Why it is not more; None when only the last id is left."""
        ...

    @property
    def checkpoint_positions(self) -> Sequence[int]:
        """Positions of the prompt, ascending, each beyond `cached`, where prefill should stop for
        a moment and call `reached`: the cache wants to keep the layers' state there."""
        ...

    def publish(self, ids: Sequence[int]) -> None:
        """The caches stand for exactly these ids now. Others may copy from them."""
        ...

    def commit(self, ids: Sequence[int], *, keep: int) -> None:
        """End the lease; the caches may serve others.

        ids: everything that was evaluated into them, in order. keep: how many of these are worth
        remembering; the rest is cut off where the layers can be cut.
        """
        ...

    def discard(self) -> None:
        """End the lease; the caches are in doubt and must serve nobody."""
        ...


class ShiftingLease(Lease[Layer_co], Protocol[Layer_co]):
    """A lease whose sequence may outgrow its context."""

    def shift(
        self,
        ids: Sequence[int],
        *,
        num_keep: int,
        remove: Callable[[Sequence[Layer_co], int, int], bool],
    ) -> ShiftResult:
        """Forget the older half of what follows the first `num_keep` ids, once the context is full.

        ids: everything that was evaluated into the layers, in order. remove(kv, start, end): makes
        the layers forget positions [start, end) and moves those behind up; False, with nothing
        changed, where they cannot: then all that is left must be evaluated again."""
        ...


class PrefixCache(Protocol[Layer_co]):
    """Remembers what was evaluated, so that a prompt which begins the same way skips it."""

    def begin(
        self,
        ids: Sequence[int],
        *,
        turn_ends: Sequence[int] = (),
        reuse: bool = True,
        reserve_length: int = 0,
    ) -> Lease[Layer_co]:
        """Caches for a prompt. At least one id is always left to evaluate.

        turn_ends: positions, ascending, where prompts often part: the ends of turns. reuse: False
        serves nothing that is cached (and still remembers what this prompt will leave). room:
        positions to make room for, if that is more than the prompt and one id take.
        """
        ...

    @property
    def shares_live(self) -> bool:
        """Whether what a sequence has computed serves others while it still runs."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered and not on loan."""
        ...

    @property
    def evictions(self) -> int:
        """How often something was given up for room."""
        ...

    def evict(self, num_bytes: int) -> int:
        """Give up what is least likely to be missed until at least `num_bytes` bytes are free, or
        nothing is left that is not on loan. How many bytes it came to."""
        ...

    def clear(self) -> None:
        """Forget everything that is not on loan."""
        ...

    def check(self) -> None:
        """Assert every invariant; for tests and for idle moments."""
        ...
