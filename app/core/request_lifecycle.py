"""The lifecycle of generation and embedding requests: admits them within their caller's limits,
ends them at the deadline, counts their usage and reports each one to observers.

Knows: callers, the number of their running choices, the clock. Must not know: HTTP, models, how
output is generated, metrics, traces, logs. All code runs on the event loop.

A caller is the name of an API key. All clients without a key are one caller.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar

from app.core.errors import AppError, ErrorKind
from app.core.events import Event, Finish, ReasoningDelta, TextDelta, ToolCallDelta
from app.core.ports import Generate, ResolvedModel
from app.core.requests import Embeddings, EmbedRequest, GenerateRequest, PromptBatch
from app.core.settings import Settings
from app.core.units import pluralize
from app.core.usage import RequestUsage, UsageCounters

Result = TypeVar("Result")


class RequestLimits:
    """The limits of all requests, and the means to end all of them at once. settings: only
    `max_per_key` and `deadline` are used."""

    def __init__(self, settings: Settings, usage: UsageCounters | None = None) -> None:
        """usage: counts requests and tokens per caller; None creates it, without limits."""
        self._usage = usage or UsageCounters()
        self.apply(settings)
        self._active: Counter[str] = Counter()
        self._timeouts: set[asyncio.Timeout] = set()
        self._interrupts: set[Callable[[AppError], None]] = set()
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
        for interrupt in self._interrupts:
            interrupt(error)

    def compute_deadline(self) -> float | None:
        """Returns the deadline of a request that arrives now, on the event loop's clock, or None if
        there is no limit."""
        if self._deadline is None:
            return None
        return asyncio.get_running_loop().time() + self._deadline

    @contextmanager
    def admit(self, caller: str, count: int, param: str) -> Generator[RequestUsage]:
        """Counts `count` choices of a caller while the context is active. Returns the counter of
        the request's tokens. Raises AppError(INVALID) if `count` exceeds the caller's limit, and
        AppError(BUSY) if it exceeds the remaining limit, or if the limits of the caller's key on
        its usage are exceeded."""
        limit, running = self._max_per_caller, self._active[caller]
        if limit is not None and count > limit:
            message = (
                f"the request asks for {pluralize(count, 'choice')}, but an API key can have at "
                f"most {limit} at a time: ask for fewer, or increase --max-per-key"
            )
            raise AppError(ErrorKind.INVALID, message, param=param)
        if limit is not None and running + count > limit:
            message = (
                f"this API key has {pluralize(running, 'choice')} in progress, and the limit is "
                f"{limit}: wait for one of them to finish"
            )
            raise AppError(ErrorKind.BUSY, message, code="too_many_requests", retry_after=1)
        self._usage.admit(caller)
        self._active[caller] += count
        try:
            yield self._usage.count(caller)
        finally:
            self._active[caller] -= count
            if not self._active[caller]:
                del self._active[caller]

    @contextmanager
    def interrupt_at(
        self, deadline: float | None, interrupt: Callable[[AppError], None]
    ) -> Generator[None]:
        """While the context is active, calls `interrupt` with an error at the deadline and on
        `abort_all`."""
        if self._abort_error is not None:
            interrupt(self._abort_error)
        self._interrupts.add(interrupt)
        timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_at(deadline, lambda: interrupt(self._deadline_error()))
        try:
            yield
        finally:
            self._interrupts.discard(interrupt)
            if timer is not None:
                timer.cancel()

    async def wait(
        self, result: Callable[[], Awaitable[Result]], deadline: float | None = None
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


class RequestObserver(Protocol):
    """Observes one request. The methods must return quickly and must not raise."""

    def on_event(self, event: Event) -> None:
        """Called for every event. Only the first delta of each choice is reported."""
        ...

    def on_embeddings(self, found: Embeddings) -> None: ...

    def on_error(self, error: Exception) -> None:
        """Called when the request fails. May be called more than once; the first error is the
        cause."""
        ...

    def on_end(self, *, complete: bool) -> None:
        """Called last, exactly once. complete: whether all choices have finished or all embeddings
        were computed. An incomplete request without an error was cancelled by the client."""
        ...


ObserverFactory = Callable[[GenerateRequest | EmbedRequest], RequestObserver]


def count_choices(request: GenerateRequest) -> int:
    """Returns the number of choices in a request."""
    prompt = request.prompt
    return request.n * (len(prompt.prompts) if isinstance(prompt, PromptBatch) else 1)


class ObservedGenerate:
    """Implements `Generate`: the only wrapper around the router. observers: factories that create
    an observer for each request. limits: None for no limits."""

    def __init__(
        self, generate: Generate, *observers: ObserverFactory, limits: RequestLimits | None = None
    ) -> None:
        self._generate = generate
        self._observer_factories = observers
        self._limits = limits or RequestLimits(Settings())

    async def embed(self, request: EmbedRequest, model: ResolvedModel) -> Embeddings:
        observers = [create(request) for create in self._observer_factories]
        complete = False
        try:
            with self._limits.admit(request.caller, 1, "input") as usage:
                embeddings = await self._limits.wait(
                    lambda: self._generate.embed(request, model), self._limits.compute_deadline()
                )
                usage.add_prompt(embeddings.prompt_tokens)
            complete = True
            for observer in observers:
                observer.on_embeddings(embeddings)
            return embeddings
        except Exception as error:
            for observer in observers:
                observer.on_error(error)
            raise
        finally:
            for observer in observers:
                observer.on_end(complete=complete)

    @asynccontextmanager
    async def open(
        self, request: GenerateRequest, model: ResolvedModel
    ) -> AsyncGenerator[AsyncIterator[Sequence[Event]]]:
        observers = [create(request) for create in self._observer_factories]
        num_choices = count_choices(request)
        param = "n" if request.n > 1 else "prompt"
        deadline = self._limits.compute_deadline()
        stream: _ObservedStream | None = None
        try:
            async with AsyncExitStack() as stack:
                usage = stack.enter_context(self._limits.admit(request.caller, num_choices, param))
                stream = _ObservedStream(observers, usage, num_choices)
                stack.callback(stream.count_unfinished)
                stream.events = await self._limits.wait(
                    lambda: stack.enter_async_context(self._generate.open(request, model)), deadline
                )
                stack.enter_context(self._limits.interrupt_at(deadline, stream.interrupt))
                yield stream
        except Exception as error:
            for observer in observers:
                observer.on_error(error)
            raise
        finally:
            complete = stream is not None and stream.complete
            for observer in observers:
                observer.on_end(complete=complete)


class _ObservedStream:
    """The events of one request. Iterating reports each event to the observers. An error can
    interrupt the stream: the pending `__anext__` call and all later calls raise it, for which
    `asyncio.timeout` would need one object per batch. This class is an iterator rather than a
    generator, so that an unfinished iteration does not have to be closed.

    events: the events of the engine, before the first iteration. usage: counts the tokens.
    """

    events: AsyncIterator[Sequence[Event]]

    def __init__(
        self, observers: Sequence[RequestObserver], usage: RequestUsage, choices: int
    ) -> None:
        self._observers = observers
        self._usage = usage
        self._unfinished_choices = choices
        self._num_deltas: dict[int, int] = {}  # of each unfinished choice
        self._error: AppError | None = None
        self._waiting: asyncio.Task[Any] | None = None

    @property
    def complete(self) -> bool:
        """Whether all choices have finished."""
        return self._unfinished_choices <= 0

    def interrupt(self, error: AppError) -> None:
        """Interrupts the stream. Only the first error takes effect."""
        if self._error is None:
            self._error = error
            if self._waiting is not None:
                self._waiting.cancel()

    def count_unfinished(self) -> None:
        """Counts the output of choices that have not finished. Each delta counts as one token,
        because most of them carry one."""
        self._usage.add_generated(sum(self._num_deltas.values()))

    def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        return self

    async def __anext__(self) -> Sequence[Event]:
        if self._error is not None:
            self._report(self._error)
            raise self._error
        task = asyncio.current_task()
        assert task is not None
        cancel_requests = task.cancelling()
        self._waiting = task
        try:
            batch = await anext(self.events)
        except StopAsyncIteration:
            raise
        except asyncio.CancelledError:
            # like asyncio.timeout, do not convert a cancellation by other code
            if self._error is None or task.cancelling() > cancel_requests + 1:
                raise
            self._report(self._error)
            raise self._error from None
        except Exception as error:  # a streaming response sends the error and then ends normally
            self._report(error)
            raise
        finally:
            self._waiting = None
            if self._error is not None:  # `interrupt` has cancelled the task
                task.uncancel()
        for event in batch:
            if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
                count = self._num_deltas.get(event.choice, 0)
                self._num_deltas[event.choice] = count + 1
                if count:
                    continue
            else:
                self._usage.on_event(event)
                if isinstance(event, Finish):
                    self._unfinished_choices -= 1
                    self._num_deltas.pop(event.choice, None)
            for observer in self._observers:
                observer.on_event(event)
        return batch

    def _report(self, error: Exception) -> None:
        for observer in self._observers:
            observer.on_error(error)
