"""The context of the current HTTP request, for log lines and traces.

Knows: the request ID, the caller, the outcome so far. Must not know: HTTP, logging, the content of
the response.

REQUEST_CONTEXT is a context variable, and the only mutable global of the code base. Each request is
handled in its own task with its own value. `asyncio.to_thread` passes a copy of the context to the
thread.
"""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.core.errors import AppError
from app.core.events import Event, Finish, PrefillProgress
from app.core.requests import Embeddings, EmbedRequest, GenerateRequest

# The index in a path such as `messages.3.name`.
_ARRAY_INDEX = re.compile(r"\.\d+(?=\.|$)", re.ASCII)

# Limits for the notice about ignored fields, and the names that a log may contain.
_MAX_IGNORED_PATHS, _MAX_PATH_CHARS = 16, 80
_FIELD_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_.$]*", re.ASCII)


def _show_path(path: str, *, redact: bool) -> str:
    if _FIELD_NAME.fullmatch(path):
        return path
    return "…" if redact else repr(path)


class ErrorFormat(Protocol):
    """The error responses of a dialect."""

    def render(self, error: AppError, request_id: str) -> tuple[int, dict[str, Any]]:
        """Returns the status code and the body. request_id: the ID of the request."""
        ...


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """The context of one request.

    id: the request ID, valid as a header value. traceparent: the unparsed value of the traceparent
    header (W3C Trace Context). state: values that middleware sets during the request. finish: the
    finish reasons, an error type or "cancelled"; "" for a request that generates nothing. error,
    reason: the error type and the error message, if the response has a status of 400 or more and
    this server caused it. The reason omits text that the client sent. The exception itself is not
    stored, because its traceback would keep the request body in memory as long as the connection's
    context. prompt_tokens, cached_tokens, completion_tokens: sums over all choices, including
    prompts whose prefill did not finish. decoded_tokens, decode_ns: the tokens after the first one
    of each choice, and the longest decode time of a choice. error_format: the format of this
    request's error responses; None is OpenAI's format. strict_fields: whether an unknown field at
    the top level of the body is an error. notices: describe the parts of the request that were
    omitted, without client text. ignored_fields: the number of unknown fields that were ignored.
    """

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
    decoded_tokens: int = 0
    decode_ns: int = 0
    error_format: ErrorFormat | None = None
    strict_fields: bool = False
    notices: list[str] = field(default_factory=list[str])
    ignored_fields: int = 0
    # the paths without array indices, each once, in order
    _ignored_paths: dict[str, None] = field(default_factory=dict[str, None])

    def report_ignored_field(self, path: str) -> None:
        """Reports an unknown field that has no effect. path: its dotted path, as sent."""
        self.ignored_fields += 1
        # a long conversation has the same fields in each message
        path = _ARRAY_INDEX.sub("", path[:_MAX_PATH_CHARS])
        if len(self._ignored_paths) <= _MAX_IGNORED_PATHS:
            self._ignored_paths[path] = None

    def build_notice(self, *, redact: bool = False) -> str:
        """Returns the notices as one line of visible ASCII, or "". redact: whether to omit names
        that could contain client text other than a name."""
        parts = list(self.notices)
        if self._ignored_paths:
            paths = [_show_path(path, redact=redact) for path in self._ignored_paths]
            more = ", …" if len(paths) > _MAX_IGNORED_PATHS else ""
            shown = ", ".join(dict.fromkeys(paths[:_MAX_IGNORED_PATHS]))
            parts.insert(0, f"ignored unknown fields: {shown}{more}")
        return "; ".join(parts).encode("ascii", "backslashreplace").decode()

    @property
    def caller(self) -> str:
        """The name of the request's API key, or "" if the server uses no keys."""
        return self.state.get("caller", "")

    @property
    def decode_tokens_per_second(self) -> float:
        """The speed of decoding, summed over the choices. 0 if at most one token was generated."""
        return 1e9 * self.decoded_tokens / self.decode_ns if self.decode_ns else 0.0


REQUEST_CONTEXT: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)


def add_notice(text: str) -> None:
    """Reports a part of the current request that was omitted. text: without client text."""
    context = REQUEST_CONTEXT.get()
    if context is not None and text not in context.notices:
        context.notices.append(text)


def omit_image(error: AppError) -> str:
    """Reports an image as omitted, and returns the text that replaces it. error: the reason, whose
    message may begin with the path of the request field."""
    path = f"{error.param}: "
    add_notice(f"images are omitted: {error.redact().removeprefix(path)}")
    return f"[image omitted: {error.message.removeprefix(path)}]"


class RequestContextObserver:
    """Records the outcome of a generation or embedding request in its context.

    Implements `app.core.request_lifecycle.RequestObserver`."""

    def __init__(self, request: GenerateRequest | EmbedRequest) -> None:
        self._context = REQUEST_CONTEXT.get() or RequestContext(id="")
        self._context.model = request.model
        # maps the prompt index to (tokens, cached tokens)
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
        """Counts each prompt once, regardless of the number of choices, like the usage in the
        response. The first Finish overrides the first PrefillProgress, since a job may be
        restarted."""
        if prompt in seen:
            return
        seen[prompt] = (tokens, cached)
        counts = (self._started_prompts | self._finished_prompts).values()
        self._context.prompt_tokens = sum(tokens for tokens, _ in counts)
        self._context.cached_tokens = sum(cached for _, cached in counts)

    def _on_finish(self, event: Finish) -> None:
        self._context.completion_tokens += event.usage.completion_tokens
        self._context.decoded_tokens += max(event.usage.completion_tokens - 1, 0)
        self._context.decode_ns = max(self._context.decode_ns, event.timings.decode_ns)
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
        reasons = self._reasons if self._error is None else [*self._reasons, self._error]
        self._context.finish = ",".join(reasons)
