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
from app.core.errors import AppError, ErrorKind
from app.core.events import Event
from app.core.model_state import ModelState
from app.core.observers import count_choices
from app.core.ports import Generate, ModelCard, RunnerStatus
from app.core.requests import GenerateRequest
from app.core.settings import Settings

Result = TypeVar("Result")


class LimitedGenerate:
    """Implements `Generate`. settings: max_per_key and deadline."""

    def __init__(self, inner: Generate, settings: Settings) -> None:
        self._inner = inner
        self._max_per_caller = settings.max_per_key
        self._deadline = settings.deadline
        self._active: Counter[str] = Counter()
        self._timeouts: set[asyncio.Timeout] = set()
        self._abort_error: AppError | None = None

    def abort_all(self, error: AppError) -> None:
        """Every answer in the making ends with this error, and so does each that is asked for from
        now on."""
        self._abort_error = error
        now = asyncio.get_running_loop().time()
        for wait in self._timeouts:
            if not wait.expired():
                wait.reschedule(now)

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[Event]]:
        until = self._compute_deadline()
        async with AsyncExitStack() as stack:
            param = "n" if request.n > 1 else "prompt"
            stack.enter_context(self._admit(request.caller, count_choices(request), param))
            events = await self._await_until(
                lambda: stack.enter_async_context(self._inner.open(request)), until
            )
            yield await stack.enter_async_context(aclosing(self._stream_until(events, until)))

    async def embed(self, request: EmbedRequest) -> Embeddings:
        with self._admit(request.caller, 1, "input"):
            return await self._await_until(
                lambda: self._inner.embed(request), self._compute_deadline()
            )

    async def tokenize(
        self, text: str, model: str | None = None, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        return await self._await_until(
            lambda: self._inner.tokenize(text, model, add_special_tokens=add_special_tokens),
            self._compute_deadline(),
        )

    async def tokenize_chat(self, request: GenerateRequest) -> Sequence[int]:
        return await self._await_until(
            lambda: self._inner.tokenize_chat(request), self._compute_deadline()
        )

    async def get_token_bytes(
        self, ids: Sequence[int], model: str | None = None
    ) -> Sequence[bytes]:
        return await self._await_until(
            lambda: self._inner.get_token_bytes(ids, model), self._compute_deadline()
        )

    async def get_tokenizer_info(self, model: str | None = None) -> Mapping[str, Any]:
        return await self._await_until(
            lambda: self._inner.get_tokenizer_info(model), self._compute_deadline()
        )

    async def detokenize(self, ids: Sequence[int], model: str | None = None) -> str:
        return await self._await_until(
            lambda: self._inner.detokenize(ids, model), self._compute_deadline()
        )

    async def discover(self, model: str) -> None:
        await self._inner.discover(model)

    def list_models(self) -> Sequence[ModelCard]:
        return self._inner.list_models()

    def status(self) -> RunnerStatus:
        return self._inner.status()

    def list_model_states(self) -> Sequence[ModelState]:
        return self._inner.list_model_states()

    async def load(self, model: str, keep_alive: float | None = None) -> ModelState:
        return await self._await_until(lambda: self._inner.load(model, keep_alive), None)

    async def unload(self, model: str) -> ModelState:
        return await self._await_until(lambda: self._inner.unload(model), None)

    def _compute_deadline(self) -> float | None:
        """When an answer that is asked for now has to be whole, by the event loop's clock."""
        if self._deadline is None:
            return None
        return asyncio.get_running_loop().time() + self._deadline

    @contextmanager
    def _admit(self, caller: str, count: int, param: str) -> Generator[None]:
        """Raises AppError(INVALID) for more than a caller can ever have, AppError(BUSY) for more
        than it can have now."""
        most, here = self._max_per_caller, self._active[caller]
        if most is not None and count > most:
            message = (
                f"the request asks for {count} choices, but an API key can have at most {most} "
                "at a time: ask for fewer, or increase --max-per-key"
            )
            raise AppError(ErrorKind.INVALID, message, param=param)
        if most is not None and here + count > most:
            message = (
                f"{here} choices are in progress for this API key, and the limit is {most}: wait "
                "for one of them to finish"
            )
            raise AppError(ErrorKind.BUSY, message, code="too_many_requests", retry_after=1)
        self._active[caller] += count
        try:
            yield
        finally:
            self._active[caller] -= count
            if not self._active[caller]:
                del self._active[caller]

    async def _stream_until(
        self, events: AsyncIterator[Event], deadline: float | None
    ) -> AsyncGenerator[Event]:
        while True:
            event = await self._await_until(lambda: anext(events, None), deadline)
            if event is None:
                return
            yield event

    async def _await_until(
        self, result: Callable[[], Awaitable[Result]], deadline: float | None
    ) -> Result:
        """Raises AppError(DEADLINE) if it is not there by then, or what all answers end with."""
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
            "ask for a shorter answer, or increase --deadline",
        )
