"""Limits on the concurrent choices of a caller and on the duration of a request.

Knows: callers, the number of their running choices, the clock. Must not know: HTTP, models, how
output is generated. All code runs on the event loop.

A caller is the name of an API key. All clients without a key are one caller.
"""

import asyncio
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from app.core.embeddings import Embeddings, EmbedRequest
from app.core.errors import AppError, ErrorKind
from app.core.events import Event
from app.core.model_defaults import ModelDefaults
from app.core.model_details import ModelDetails, TensorDetails
from app.core.model_state import ModelState
from app.core.observers import count_choices
from app.core.ports import (
    Generate,
    ModelCard,
    ModelLibrary,
    Models,
    ResolvedModel,
    RunnerStatus,
)
from app.core.prefix_snapshot import PrefixSnapshot
from app.core.requests import GenerateRequest
from app.core.settings import Settings
from app.core.units import pluralize
from app.core.usage import RequestUsage, UsageCounters

Result = TypeVar("Result")


class RequestLimits:
    """Wraps a `Generate` and a `Models`, and implements both. settings: only `max_per_key` and
    `deadline` are used."""

    def __init__(
        self,
        generate: Generate,
        models: Models,
        settings: Settings,
        usage: UsageCounters | None = None,
    ) -> None:
        """usage: counts requests and tokens per caller; None creates it, without limits."""
        self._usage = usage or UsageCounters()
        self._generate = generate
        self._models = models
        self.apply(settings)
        self._active: Counter[str] = Counter()
        self._timeouts: set[asyncio.Timeout] = set()
        self._streams: set[_InterruptibleStream] = set()
        self._abort_error: AppError | None = None

    def apply(self, settings: Settings) -> None:
        """Applies new limits, to requests that arrive from now on."""
        self._max_per_caller = settings.max_per_key
        self._deadline = settings.deadline

    def abort_all(self, error: AppError) -> None:
        """Fails all running and future requests with this error."""
        self._abort_error = error
        now = asyncio.get_running_loop().time()
        for wait in self._timeouts:
            if not wait.expired():
                wait.reschedule(now)
        for stream in self._streams:
            stream.interrupt(error)

    @asynccontextmanager
    async def open(
        self, request: GenerateRequest, model: ResolvedModel
    ) -> AsyncGenerator[AsyncIterator[Sequence[Event]]]:
        until = self._compute_deadline()
        async with AsyncExitStack() as stack:
            param = "n" if request.n > 1 else "prompt"
            stack.enter_context(self._admit(request.caller, count_choices(request), param))
            used = self._usage.count(request.caller)
            stack.callback(used.on_end)
            events = await self._await_until(
                lambda: stack.enter_async_context(self._generate.open(request, model)), until
            )
            yield stack.enter_context(self._interrupt_at(events, until, used))

    async def embed(self, request: EmbedRequest, model: ResolvedModel) -> Embeddings:
        with self._admit(request.caller, 1, "input"):
            found = await self._await_until(
                lambda: self._generate.embed(request, model), self._compute_deadline()
            )
            self._usage.add_tokens(
                request.caller, prompt=found.prompt_tokens, cached=0, generated=0
            )
            return found

    async def resolve(self, name: str | None) -> ResolvedModel:
        return await self._models.resolve(name)

    async def rescan(self) -> None:
        await self._models.rescan()

    def list_models(self) -> Sequence[ModelCard]:
        return self._models.list_models()

    def list_model_states(self) -> Sequence[ModelState]:
        return self._models.list_model_states()

    def model_state(self, model: ResolvedModel) -> ModelState:
        return self._models.model_state(model)

    def get_prefix_snapshot(self, name: str) -> PrefixSnapshot | None:
        return self._models.get_prefix_snapshot(name)

    def status(self) -> RunnerStatus:
        return self._models.status()

    @property
    def library(self) -> ModelLibrary:
        return self._models.library

    async def describe(self, model: ResolvedModel) -> ModelDetails:
        return await self._await_until(lambda: self._models.describe(model), None)

    async def list_details(self) -> Sequence[ModelDetails]:
        return await self._await_until(lambda: self._models.list_details(), None)

    async def list_tensors(self, model: ResolvedModel) -> Sequence[TensorDetails]:
        return await self._await_until(lambda: self._models.list_tensors(model), None)

    async def load(
        self, model: ResolvedModel, keep_alive: float | None = None, *, admin: bool = True
    ) -> ModelState:
        return await self._await_until(
            lambda: self._models.load(model, keep_alive, admin=admin), None
        )

    def get_defaults(self, model: ResolvedModel) -> ModelDefaults:
        return self._models.get_defaults(model)

    async def set_defaults(self, model: ResolvedModel, defaults: ModelDefaults) -> bool:
        return await self._models.set_defaults(model, defaults)

    async def unload(self, model: ResolvedModel) -> ModelState:
        return await self._await_until(lambda: self._models.unload(model), None)

    async def tokenize(
        self, model: ResolvedModel, text: str, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        return await self._await_until(
            lambda: self._models.tokenize(model, text, add_special_tokens=add_special_tokens),
            self._compute_deadline(),
        )

    async def tokenize_chat(self, model: ResolvedModel, request: GenerateRequest) -> Sequence[int]:
        return await self._await_until(
            lambda: self._models.tokenize_chat(model, request), self._compute_deadline()
        )

    async def render_chat(self, model: ResolvedModel, request: GenerateRequest) -> str:
        return await self._await_until(
            lambda: self._models.render_chat(model, request), self._compute_deadline()
        )

    async def get_token_bytes(self, model: ResolvedModel, ids: Sequence[int]) -> Sequence[bytes]:
        return await self._await_until(
            lambda: self._models.get_token_bytes(model, ids), self._compute_deadline()
        )

    async def get_tokenizer_info(self, model: ResolvedModel) -> Mapping[str, Any]:
        return await self._await_until(
            lambda: self._models.get_tokenizer_info(model), self._compute_deadline()
        )

    async def detokenize(self, model: ResolvedModel, ids: Sequence[int]) -> str:
        return await self._await_until(
            lambda: self._models.detokenize(model, ids), self._compute_deadline()
        )

    def _compute_deadline(self) -> float | None:
        """Returns the deadline of a request that arrives now, on the event loop's clock, or None if
        there is no limit."""
        if self._deadline is None:
            return None
        return asyncio.get_running_loop().time() + self._deadline

    @contextmanager
    def _admit(self, caller: str, count: int, param: str) -> Generator[None]:
        """Counts `count` choices of a caller while the context is active. Raises AppError(INVALID)
        if `count` exceeds the caller's limit, and AppError(BUSY) if it exceeds what is left of the
        limit, or if the limits of the caller's key on its usage are exceeded."""
        most, here = self._max_per_caller, self._active[caller]
        if most is not None and count > most:
            message = (
                f"the request asks for {pluralize(count, 'choice')}, but an API key can have at "
                f"most {most} at a time: ask for fewer, or increase --max-per-key"
            )
            raise AppError(ErrorKind.INVALID, message, param=param)
        if most is not None and here + count > most:
            message = (
                f"this API key has {pluralize(here, 'choice')} in progress, and the limit is "
                f"{most}: wait for one of them to finish"
            )
            raise AppError(ErrorKind.BUSY, message, code="too_many_requests", retry_after=1)
        self._usage.admit(caller)
        self._active[caller] += count
        try:
            yield
        finally:
            self._active[caller] -= count
            if not self._active[caller]:
                del self._active[caller]

    @contextmanager
    def _interrupt_at(
        self, events: AsyncIterator[Sequence[Event]], deadline: float | None, used: RequestUsage
    ) -> Generator[AsyncIterator[Sequence[Event]]]:
        """Wraps the events in a stream that fails at the deadline or on `abort_all`."""
        stream = _InterruptibleStream(events, used)
        if self._abort_error is not None:
            stream.interrupt(self._abort_error)
        self._streams.add(stream)
        timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_at(deadline, lambda: stream.interrupt(self._deadline_error()))
        try:
            yield stream
        finally:
            self._streams.discard(stream)
            if timer is not None:
                timer.cancel()

    async def _await_until(
        self, result: Callable[[], Awaitable[Result]], deadline: float | None
    ) -> Result:
        """Awaits a result. Raises AppError(DEADLINE) at the deadline, or the error passed to
        `abort_all`."""
        if self._abort_error is not None:
            raise self._abort_error
        if deadline is not None and asyncio.get_running_loop().time() >= deadline:
            raise self._deadline_error()
        wait = asyncio.timeout_at(deadline)
        self._timeouts.add(wait)
        try:
            async with wait:
                return await result()
        except TimeoutError:
            if not wait.expired():
                raise
            raise self._abort_error or self._deadline_error() from None
        finally:
            self._timeouts.discard(wait)

    def _deadline_error(self) -> AppError:
        return AppError(
            ErrorKind.DEADLINE,
            f"the request exceeded the deadline of {self._deadline:g} s: "
            "request a shorter response, or increase --deadline",
        )


class _InterruptibleStream:
    """A stream of events that an error can interrupt. The pending `__anext__` call and all later
    calls raise the error. `asyncio.timeout` would need one object per batch. used: counts the
    tokens."""

    def __init__(self, events: AsyncIterator[Sequence[Event]], used: RequestUsage) -> None:
        self._events = events
        self._used = used
        self._error: AppError | None = None
        self._waiting: asyncio.Task[Any] | None = None

    def interrupt(self, error: AppError) -> None:
        """Interrupts the stream. Only the first error takes effect."""
        if self._error is None:
            self._error = error
            if self._waiting is not None:
                self._waiting.cancel()

    def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        return self

    async def __anext__(self) -> Sequence[Event]:
        if self._error is not None:
            raise self._error
        task = asyncio.current_task()
        assert task is not None
        cancel_requests = task.cancelling()
        self._waiting = task
        try:
            batch = await anext(self._events)
            for event in batch:
                self._used.on_event(event)
            return batch
        except asyncio.CancelledError:
            # like asyncio.timeout, do not convert a cancellation by other code
            if self._error is None or task.cancelling() > cancel_requests + 1:
                raise
            raise self._error from None
        finally:
            self._waiting = None
            if self._error is not None:  # `interrupt` has cancelled the task
                task.uncancel()
