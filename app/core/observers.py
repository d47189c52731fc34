"""Wraps a `Generate` and reports the events of each request to observers.

Knows: the lifecycle of a request. Must not know: metrics, traces, logs.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from app.core.embeddings import Embeddings, EmbedRequest
from app.core.events import Event, Finish, ReasoningDelta, TextDelta, ToolCallDelta
from app.core.ports import Generate, ResolvedModel
from app.core.requests import GenerateRequest, PromptBatch


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
    """Implements `Generate`. watchers: factories that create an observer for each request."""

    def __init__(self, generate: Generate, *watchers: ObserverFactory) -> None:
        self._generate = generate
        self._observer_factories = watchers

    def open(
        self, request: GenerateRequest, model: ResolvedModel
    ) -> AbstractAsyncContextManager[AsyncIterator[Sequence[Event]]]:
        return self._open_observed(request, model)

    async def embed(self, request: EmbedRequest, model: ResolvedModel) -> Embeddings:
        watches = [watcher(request) for watcher in self._observer_factories]
        complete = False
        try:
            found = await self._generate.embed(request, model)
            complete = True
            for watch in watches:
                watch.on_embeddings(found)
            return found
        except Exception as error:
            for watch in watches:
                watch.on_error(error)
            raise
        finally:
            for watch in watches:
                watch.on_end(complete=complete)

    @asynccontextmanager
    async def _open_observed(
        self, request: GenerateRequest, model: ResolvedModel
    ) -> AsyncGenerator[AsyncIterator[Sequence[Event]]]:
        seen = _ObserverGroup(
            [watcher(request) for watcher in self._observer_factories], count_choices(request)
        )
        try:
            async with self._generate.open(request, model) as events:
                yield _ObservedEvents(events, seen)
        except Exception as error:
            seen.on_error(error)
            raise
        finally:
            seen.on_end()


class _ObserverGroup:
    """Forwards each call to all observers of one request."""

    def __init__(self, watches: Sequence[RequestObserver], choices: int) -> None:
        self._observers = watches
        self._unfinished_choices = choices
        self._started_choices: set[int] = set()

    def on_event(self, event: Event) -> None:
        if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
            if event.choice in self._started_choices:
                return
            self._started_choices.add(event.choice)
        elif isinstance(event, Finish):
            self._unfinished_choices -= 1
        for watch in self._observers:
            watch.on_event(event)

    def on_error(self, error: Exception) -> None:
        for watch in self._observers:
            watch.on_error(error)

    def on_end(self) -> None:
        for watch in self._observers:
            watch.on_end(complete=self._unfinished_choices <= 0)


class _ObservedEvents:
    """Iterates over the events and reports each event to the observers. This class is an iterator
    rather than a generator, so that an unfinished iteration does not have to be closed."""

    def __init__(self, events: AsyncIterator[Sequence[Event]], seen: _ObserverGroup) -> None:
        self._events = events
        self._observers = seen

    def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        return self

    async def __anext__(self) -> Sequence[Event]:
        try:
            batch = await anext(self._events)
        except StopAsyncIteration:
            raise
        except Exception as error:  # a streaming response sends the error and then ends normally
            self._observers.on_error(error)
            raise
        for event in batch:
            self._observers.on_event(event)
        return batch
