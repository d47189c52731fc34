"""A `Generate` around a `Generate`, with somebody watching every request.

Knows: how a request lives and ends. Must not know: what watchers count, or where they tell it.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from app.core.embeddings import Embeddings, EmbedRequest
from app.core.events import Event, Finish
from app.core.ports import Generate, ModelCard, RunnerStatus
from app.core.requests import GenerateRequest, Several
from app.core.residents import ModelState


class Watch(Protocol):
    """One request, as it is watched. Nothing here may take long, or raise."""

    def note(self, event: Event) -> None: ...

    def embedded(self, found: Embeddings) -> None: ...

    def fail(self, error: Exception) -> None:
        """The first error is how it ended; the same one may be told again."""
        ...

    def end(self, *, complete: bool) -> None:
        """It is over: told last, and once. complete: whether all choices have finished, or all
        vectors are there. One that is not, and told no error, was left by its client."""
        ...


Watcher = Callable[[GenerateRequest | EmbedRequest], Watch]


def choices_of(request: GenerateRequest) -> int:
    """How many answers it asks for."""
    prompt = request.prompt
    return request.n * (len(prompt.prompts) if isinstance(prompt, Several) else 1)


class Watched:
    """Implements `Generate`. watchers: called at the arrival of each request."""

    def __init__(self, generate: Generate, *watchers: Watcher) -> None:
        self._generate = generate
        self._watchers = watchers

    def open(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        return self._watched(request)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        watches = [watcher(request) for watcher in self._watchers]
        complete = False
        try:
            found = await self._generate.embed(request)
            complete = True
            for watch in watches:
                watch.embedded(found)
            return found
        except Exception as error:
            for watch in watches:
                watch.fail(error)
            raise
        finally:
            for watch in watches:
                watch.end(complete=complete)

    async def tokenize(
        self, text: str, model: str | None = None, *, add_special: bool = True
    ) -> Sequence[int]:
        return await self._generate.tokenize(text, model, add_special=add_special)

    async def prompt_ids(self, request: GenerateRequest) -> Sequence[int]:
        return await self._generate.prompt_ids(request)

    async def token_bytes(self, ids: Sequence[int], model: str | None = None) -> Sequence[bytes]:
        return await self._generate.token_bytes(ids, model)

    async def tokenizer_info(self, model: str | None = None) -> Mapping[str, Any]:
        return await self._generate.tokenizer_info(model)

    async def detokenize(self, ids: Sequence[int], model: str | None = None) -> str:
        return await self._generate.detokenize(ids, model)

    async def look_for(self, model: str) -> None:
        await self._generate.look_for(model)

    def models(self) -> Sequence[ModelCard]:
        return self._generate.models()

    def status(self) -> RunnerStatus:
        return self._generate.status()

    def states(self) -> Sequence[ModelState]:
        return self._generate.states()

    async def load(self, model: str, keep_alive: float | None = None) -> ModelState:
        return await self._generate.load(model, keep_alive)

    async def unload(self, model: str) -> ModelState:
        return await self._generate.unload(model)

    @asynccontextmanager
    async def _watched(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[Event]]:
        seen = _Seen([watcher(request) for watcher in self._watchers], choices_of(request))
        try:
            async with self._generate.open(request) as events:
                yield _Events(events, seen)
        except Exception as error:
            seen.fail(error)
            raise
        finally:
            seen.end()


class _Seen:
    """What all who watch one request are told."""

    def __init__(self, watches: Sequence[Watch], choices: int) -> None:
        self._watches = watches
        self._left = choices

    def note(self, event: Event) -> None:
        if isinstance(event, Finish):
            self._left -= 1
        for watch in self._watches:
            watch.note(event)

    def fail(self, error: Exception) -> None:
        for watch in self._watches:
            watch.fail(error)

    def end(self) -> None:
        for watch in self._watches:
            watch.end(complete=self._left <= 0)


class _Events:
    """Events on their way up. An iterator and no generator: leaving one half-way leaves nothing
    behind that would have to be closed."""

    def __init__(self, events: AsyncIterator[Event], seen: _Seen) -> None:
        self._events = events
        self._seen = seen

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            raise
        except Exception as error:  # a stream tells its client, and leaves as if all were well
            self._seen.fail(error)
            raise
        self._seen.note(event)
        return event
