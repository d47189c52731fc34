"""The seams between rooms, as protocols. Whoever needs one gets it through its constructor."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from app.core.events import Event
from app.core.files import ModelFiles
from app.core.jobs import EngineStats, Job, Update
from app.core.requests import GenerateRequest

RunnerState = Literal["loading", "ready", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStatus:
    """The last thing a runner is known to have said; reading it waits for nothing.
    progress: 0 to 100 while loading. error: one sentence when the state is "failed"."""

    state: RunnerState
    progress: int
    stats: EngineStats
    error: str | None = None


class Submission(Protocol):
    """A job on its way. Iterate to get its updates, `Ended` last."""

    def __aiter__(self) -> AsyncIterator[Update]: ...

    def keep(self, tokens: int) -> None:
        """The client saw only the first `tokens` sampled tokens: cache no more than those."""
        ...


class Runner(Protocol):
    """Keeps one model in memory and generates from it."""

    async def start(self, files: ModelFiles) -> None:
        """Returns when the model is ready. Raises AppError(MODEL_FILES) if it cannot be."""
        ...

    def submit(self, job: Job) -> AbstractAsyncContextManager[Submission]:
        """Leaving the context early cancels the job, within one prefill chunk or two steps.
        Raises AppError(LOADING) or AppError(ENGINE) when there is nobody to run it."""
        ...

    def status(self) -> RunnerStatus: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What /v1/models tells about a model. created: Unix time."""

    id: str
    created: int
    context_length: int


class Generate(Protocol):
    """What HTTP knows of everything below it."""

    def open(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Entering validates, encodes and queues the request, or raises AppError. Leaving ends it:
        early leaving cancels. Iterating yields events, `Finish` last; AppError(ENGINE) if the
        engine broke meanwhile."""
        ...

    async def tokenize(self, text: str) -> Sequence[int]:
        """The ids which `text` would be evaluated as, were it a plain prompt."""
        ...

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Raises AppError(INVALID) for an id outside the vocabulary."""
        ...

    def models(self) -> Sequence[ModelCard]: ...

    def status(self) -> RunnerStatus: ...


class LayerKV(Protocol):
    """What a prefix cache knows of one layer's state: how far it got and whether it can go back.
    The real ones are in models/kv.py."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def can_trim(self, count: int) -> bool: ...

    def trim(self, count: int) -> None: ...


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

    def commit(self, ids: Sequence[int], *, keep: int) -> None:
        """End the lease; the caches may serve others.

        ids: everything that was evaluated into them, in order. keep: how many of these are worth
        remembering; the rest is cut off where the layers can be cut.
        """
        ...

    def discard(self) -> None:
        """End the lease; the caches are in doubt and must serve nobody."""
        ...


class PrefixCache(Protocol[Layer_co]):
    """Remembers what was evaluated, so that a prompt which begins the same way skips it."""

    def begin(self, ids: Sequence[int]) -> Lease[Layer_co]:
        """Caches for a prompt. At least one id is always left to evaluate."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered and not on loan."""
        ...

    def clear(self) -> None:
        """Forget everything that is not on loan."""
        ...

    def check(self) -> None:
        """Assert every invariant; for tests and for idle moments."""
        ...
