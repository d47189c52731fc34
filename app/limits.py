"""What one caller may take, and how long an answer may take: a `Generate` around a `Generate`.

Knows: who asks, how many answers are in the making, the clock. Must not know: HTTP, models, how
answers are made. Everything here runs on the event loop.

A caller is the name of a key; all who come without one are one caller.
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
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from app.core.embeddings import Embeddings, EmbedRequest
from app.core.errors import AppError, Kind
from app.core.events import Event
from app.core.ports import Generate, ModelCard, RunnerStatus
from app.core.requests import GenerateRequest
from app.core.residents import ModelState
from app.core.settings import Settings
from app.core.watched import choices_of

Result = TypeVar("Result")


class Limited:
    """Implements `Generate`. settings: max_per_key and deadline."""

    def __init__(self, inner: Generate, settings: Settings) -> None:
        self._inner = inner
        self._per_caller = settings.max_per_key
        self._deadline = settings.deadline
        self._making: Counter[str] = Counter()
        self._waits: set[asyncio.Timeout] = set()
        self._over: AppError | None = None

    def end(self, why: AppError) -> None:
        """Every answer in the making ends with this error, and so does each that is asked for from
        now on."""
        self._over = why
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now)

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[Event]]:
        until = self._until()
        async with AsyncExitStack() as stack:
            param = "n" if request.n > 1 else "prompt"
            stack.enter_context(self._place(request.caller, choices_of(request), param))
            events = await self._in_time(
                lambda: stack.enter_async_context(self._inner.open(request)), until
            )
            yield await stack.enter_async_context(aclosing(self._told(events, until)))

    async def embed(self, request: EmbedRequest) -> Embeddings:
        with self._place(request.caller, 1, "input"):
            return await self._in_time(lambda: self._inner.embed(request), self._until())

    async def tokenize(
        self, text: str, model: str | None = None, *, add_special: bool = True
    ) -> Sequence[int]:
        return await self._in_time(
            lambda: self._inner.tokenize(text, model, add_special=add_special), self._until()
        )

    async def prompt_ids(self, request: GenerateRequest) -> Sequence[int]:
        return await self._in_time(lambda: self._inner.prompt_ids(request), self._until())

    async def token_bytes(self, ids: Sequence[int], model: str | None = None) -> Sequence[bytes]:
        return await self._in_time(lambda: self._inner.token_bytes(ids, model), self._until())

    async def tokenizer_info(self, model: str | None = None) -> Mapping[str, Any]:
        return await self._in_time(lambda: self._inner.tokenizer_info(model), self._until())

    async def detokenize(self, ids: Sequence[int], model: str | None = None) -> str:
        return await self._in_time(lambda: self._inner.detokenize(ids, model), self._until())

    async def look_for(self, model: str) -> None:
        await self._inner.look_for(model)

    def models(self) -> Sequence[ModelCard]:
        return self._inner.models()

    def status(self) -> RunnerStatus:
        return self._inner.status()

    def states(self) -> Sequence[ModelState]:
        return self._inner.states()

    async def load(self, model: str, keep_alive: float | None = None) -> ModelState:
        return await self._in_time(lambda: self._inner.load(model, keep_alive), None)

    async def unload(self, model: str) -> ModelState:
        return await self._in_time(lambda: self._inner.unload(model), None)

    def _until(self) -> float | None:
        """When an answer that is asked for now has to be whole, by the event loop's clock."""
        if self._deadline is None:
            return None
        return asyncio.get_running_loop().time() + self._deadline

    @contextmanager
    def _place(self, caller: str, wanted: int, param: str) -> Generator[None]:
        """Raises AppError(INVALID) for more than a caller can ever have, AppError(BUSY) for more
        than it can have now."""
        most, here = self._per_caller, self._making[caller]
        if most is not None and wanted > most:
            message = (
                f"the request asks for {wanted} choices, but an API key can have at most {most} "
                "at a time: ask for fewer, or increase --max-per-key"
            )
            raise AppError(Kind.INVALID, message, param=param)
        if most is not None and here + wanted > most:
            message = (
                f"{here} choices are in progress for this API key, and the limit is {most}: wait "
                "for one of them to finish"
            )
            raise AppError(Kind.BUSY, message, code="too_many_requests", retry_after=1)
        self._making[caller] += wanted
        try:
            yield
        finally:
            self._making[caller] -= wanted
            if not self._making[caller]:
                del self._making[caller]

    async def _told(
        self, events: AsyncIterator[Event], until: float | None
    ) -> AsyncGenerator[Event]:
        while True:
            event = await self._in_time(lambda: anext(events, None), until)
            if event is None:
                return
            yield event

    async def _in_time(
        self, result: Callable[[], Awaitable[Result]], until: float | None
    ) -> Result:
        """Raises AppError(DEADLINE) if it is not there by then, or what all answers end with."""
        if self._over is not None:
            raise self._over
        if until is not None and asyncio.get_running_loop().time() >= until:
            raise self._too_late()
        wait = asyncio.timeout_at(until)
        self._waits.add(wait)
        try:
            async with wait:
                return await result()
        except TimeoutError:
            if not wait.expired():
                raise
            raise self._over or self._too_late() from None
        finally:
            self._waits.discard(wait)

    def _too_late(self) -> AppError:
        return AppError(
            Kind.DEADLINE,
            f"the request exceeded the deadline of {self._deadline:g} s: "
            "ask for a shorter answer, or increase --deadline",
        )
