"""A `Generate` around a `Generate`, with somebody watching every request.

Knows: how a request lives and ends. Must not know: what watchers count, or where they tell it.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from app.core.embeddings import Embeddings, EmbedRequest
from app.core.events import Event, Finish
from app.core.model_state import ModelState
from app.core.ports import Generate, ModelCard, RunnerStatus
from app.core.requests import GenerateRequest, PromptBatch


class RequestObserver(Protocol):
    """One request, as it is watched. Nothing here may take long, or raise."""

    def on_event(self, event: Event) -> None: ...

    def on_embeddings(self, found: Embeddings) -> None: ...

    def on_error(self, error: Exception) -> None:
        """The first error is how it ended; the same one may be told again."""
        ...

    def on_end(self, *, complete: bool) -> None:
        """It is over: told last, and once. complete: whether all choices have finished, or all
        vectors are there. One that is not, and told no error, was left by its client."""
        ...


ObserverFactory = Callable[[GenerateRequest | EmbedRequest], RequestObserver]


def count_choices(request: GenerateRequest) -> int:
    """How many answers it asks for."""
    prompt = request.prompt
    return request.n * (len(prompt.prompts) if isinstance(prompt, PromptBatch) else 1)


class ObservedGenerate:
    """Implements `Generate`. watchers: called at the arrival of each request."""

    def __init__(self, generate: Generate, *watchers: ObserverFactory) -> None:
        self._generate = generate
        self._observer_factories = watchers

    def open(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        return self._open_observed(request)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        watches = [watcher(request) for watcher in self._observer_factories]
        complete = False
        try:
            found = await self._generate.embed(request)
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

    async def tokenize(
        self, text: str, model: str | None = None, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        return await self._generate.tokenize(text, model, add_special_tokens=add_special_tokens)

    async def tokenize_chat(self, request: GenerateRequest) -> Sequence[int]:
        return await self._generate.tokenize_chat(request)

    async def get_token_bytes(
        self, ids: Sequence[int], model: str | None = None
    ) -> Sequence[bytes]:
        return await self._generate.get_token_bytes(ids, model)

    async def get_tokenizer_info(self, model: str | None = None) -> Mapping[str, Any]:
        return await self._generate.get_tokenizer_info(model)

    async def detokenize(self, ids: Sequence[int], model: str | None = None) -> str:
        return await self._generate.detokenize(ids, model)

    async def discover(self, model: str) -> None:
        await self._generate.discover(model)

    def list_models(self) -> Sequence[ModelCard]:
        return self._generate.list_models()

    def status(self) -> RunnerStatus:
        return self._generate.status()

    def list_model_states(self) -> Sequence[ModelState]:
        return self._generate.list_model_states()

    async def load(self, model: str, keep_alive: float | None = None) -> ModelState:
        return await self._generate.load(model, keep_alive)

    async def unload(self, model: str) -> ModelState:
        return await self._generate.unload(model)

    @asynccontextmanager
    async def _open_observed(
        self, request: GenerateRequest
    ) -> AsyncGenerator[AsyncIterator[Event]]:
        seen = _ObserverGroup(
            [watcher(request) for watcher in self._observer_factories], count_choices(request)
        )
        try:
            async with self._generate.open(request) as events:
                yield _ObservedEvents(events, seen)
        except Exception as error:
            seen.on_error(error)
            raise
        finally:
            seen.on_end()


class _ObserverGroup:
    """What all who watch one request are told."""

    def __init__(self, watches: Sequence[RequestObserver], choices: int) -> None:
        self._observers = watches
        self._unfinished_choices = choices

    def on_event(self, event: Event) -> None:
        if isinstance(event, Finish):
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
    """Events on their way up. An iterator and no generator: leaving one half-way leaves nothing
    behind that would have to be closed."""

    def __init__(self, events: AsyncIterator[Event], seen: _ObserverGroup) -> None:
        self._events = events
        self._observers = seen

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            raise
        except Exception as error:  # a stream tells its client, and leaves as if all were well
            self._observers.on_error(error)
            raise
        self._observers.on_event(event)
        return event
