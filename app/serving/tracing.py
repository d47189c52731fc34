"""Whether requests are traced.

Knows: that traces need packages which not everybody has installed. Must not know: what a trace is.
"""

from collections.abc import Callable
from typing import Protocol

from app.core.embeddings import EmbedRequest
from app.core.errors import AppError, ErrorKind
from app.core.observers import RequestObserver
from app.core.requests import GenerateRequest
from app.core.settings import Settings


class Tracing(Protocol):
    """Collects traces, and delivers them."""

    def observe(self, request: GenerateRequest | EmbedRequest) -> RequestObserver:
        """To be told of every request (`app.core.observers.ObserverFactory`)."""
        ...

    async def stop(self) -> None:
        """Delivers what is there, for a few seconds at most."""
        ...


def create_tracing(settings: Settings) -> Tracing | None:
    """None where nobody asked for traces: then nothing of them is even imported. Raises
    AppError(INVALID) where somebody did, and they cannot be had."""
    make = _load_tracing_class(settings)
    return None if make is None else make(settings)


def check_tracing(settings: Settings) -> None:
    """Raises AppError(INVALID) where traces are configured and their packages are not installed."""
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
