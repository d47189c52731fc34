"""The HTTP request that is being answered, for whoever writes a log line or a trace about it.

Knows: its name, who asks, what came of it so far. Must not know: HTTP, logging, what is answered.

VISIT is the one variable of ours that stands in a module. Its value is no module's: every request
is answered in a task of its own, which has a value of its own, and `asyncio.to_thread` hands a copy
to the thread.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from app.core.embeddings import Embeddings, EmbedRequest
from app.core.errors import AppError
from app.core.events import Event, Finish, PrefillProgress
from app.core.requests import GenerateRequest


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """One request. id: its name, fit for a header. traceparent: what the client sent under that
    name (W3C Trace Context), unread. state: what others noted of the request as it went by.
    finish: finish reasons, an error's kind or "cancelled"; "" for one that generates nothing. The
    counts are of all choices, those of prompts also of prompts that were not read to their end.
    error, reason: why the reply has a status of 400 or more, where this server says so; the reason
    leaves out what the client sent. Not the exception, whose traceback would keep the body in
    memory for as long as the connection's context."""

    id: str
    traceparent: str = ""
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model: str = ""
    finish: str = ""
    error: str = ""
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def caller(self) -> str:
        """Who asks, by the name of the key; "" where there are none."""
        return self.state.get("caller", "")


REQUEST_CONTEXT: ContextVar[RequestContext | None] = ContextVar("visit", default=None)


class RequestContextObserver:
    """Notes what comes of a generating request (`app.core.observers.RequestObserver`)."""

    def __init__(self, request: GenerateRequest | EmbedRequest) -> None:
        self._context = REQUEST_CONTEXT.get() or RequestContext(id="")
        self._context.model = request.model
        # of each prompt: its tokens, and those that were cached
        self._started_prompts: dict[int, tuple[int, int]] = {}
        self._finished_prompts: dict[int, tuple[int, int]] = {}
        self._reasons: list[str] = []
        self._error: str | None = None

    def on_event(self, event: Event) -> None:
        match event:
            case PrefillProgress(prompt_index=prompt, computed_tokens=done, total_tokens=total):
                self._count_prompt(self._started_prompts, prompt, total, done)
            case Finish(prompt_index=prompt, usage=usage):
                self._count_prompt(
                    self._finished_prompts, prompt, usage.prompt_tokens, usage.cached_tokens
                )
                self._on_finish(event)
            case _:
                pass

    def _count_prompt(
        self, seen: dict[int, tuple[int, int]], prompt: int, tokens: int, cached: int
    ) -> None:
        """A prompt counts once, however many answers it gets, as in the usage of the reply. Its
        first Finish corrects what its first Progress said: a start may be repeated."""
        if prompt in seen:
            return
        seen[prompt] = (tokens, cached)
        counts = (self._started_prompts | self._finished_prompts).values()
        self._context.prompt_tokens = sum(tokens for tokens, _ in counts)
        self._context.cached_tokens = sum(cached for _, cached in counts)

    def _on_finish(self, event: Finish) -> None:
        self._context.completion_tokens += event.usage.completion_tokens
        if event.reason not in self._reasons:
            self._reasons.append(event.reason)

    def on_embeddings(self, found: Embeddings) -> None:
        self._context.prompt_tokens = found.prompt_tokens
        self._reasons.append("embedded")

    def on_error(self, error: Exception) -> None:
        kind = error.kind.value if isinstance(error, AppError) else "internal_error"
        self._error = self._error or kind

    def on_end(self, *, complete: bool) -> None:
        if self._error is None and not complete:
            self._error = "cancelled"
        told = self._reasons if self._error is None else [*self._reasons, self._error]
        self._context.finish = ",".join(told)
