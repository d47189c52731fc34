"""Enables tracing if it is configured.

Knows: the optional packages that tracing needs. Must not know: the content of traces.
"""

from collections.abc import Callable
from typing import Protocol

from app.core.embeddings import EmbedRequest
from app.core.errors import AppError, ErrorKind
from app.core.observers import RequestObserver
from app.core.requests import GenerateRequest
from app.core.settings import Settings


class Tracing(Protocol):
    """Collects and exports traces."""

    def observe(self, request: GenerateRequest | EmbedRequest) -> RequestObserver:
        """Starts the trace of a request. This method is an `app.core.observers.ObserverFactory`."""
        ...

    async def stop(self) -> None:
        """Exports the remaining traces. This takes at most a few seconds."""
        ...


def create_tracing(settings: Settings) -> Tracing | None:
    """Creates the tracing backend if tracing is configured. Otherwise, returns None without
    importing any tracing packages. Raises AppError(INVALID) if tracing is configured but not
    available."""
    make = _load_tracing_class(settings)
    return None if make is None else make(settings)


def check_tracing(settings: Settings) -> None:
    """Raises AppError(INVALID) if tracing is configured but its packages are not installed."""
    _load_tracing_class(settings)


def _load_tracing_class(settings: Settings) -> Callable[[Settings], Tracing] | None:
    if settings.otlp is None:
        return None
    try:
        from app.serving.otel_tracing import OtelTracing
    except ModuleNotFoundError as error:
        raise AppError(
            ErrorKind.INVALID,
            f"--otlp needs {error.name}, which is not installed: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http",
            param="otlp",
        ) from None
    return OtelTracing
