"""Enables tracing if it is configured.

Knows: the optional packages that tracing needs. Must not know: the content of traces.
"""

from typing import TYPE_CHECKING

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings

if TYPE_CHECKING:
    from app.observability.otel_tracing import OtelTracing


def create_tracing(settings: Settings) -> "OtelTracing | None":
    """Creates the tracing backend if tracing is configured. Otherwise, returns None without
    importing any tracing packages. Raises AppError(INVALID) if tracing is configured but not
    available."""
    make = _load_tracing_class(settings)
    return None if make is None else make(settings)


def check_tracing(settings: Settings) -> None:
    """Raises AppError(INVALID) if tracing is configured but its packages are not installed."""
    _load_tracing_class(settings)


def _load_tracing_class(settings: Settings) -> "type[OtelTracing] | None":
    if settings.otlp is None:
        return None
    try:
        from app.observability.otel_tracing import OtelTracing
    except ModuleNotFoundError as error:
        raise AppError(
            ErrorKind.INVALID,
            f"--otlp needs {error.name}, which is not installed: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http",
            param="otlp",
        ) from None
    return OtelTracing
