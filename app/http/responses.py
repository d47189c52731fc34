"""JSON responses, and error responses with the status and the error object of each error type.

Knows: starlette, orjson, OpenAI's error object, Retry-After, the request context of the access log.
Must not know: routes, the error formats of other dialects, streams.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import orjson
from starlette.responses import Response

from app.core.errors import AppError, ErrorKind
from app.core.request_context import REQUEST_CONTEXT, ErrorFormat

JsonObject = dict[str, Any]

# The number of array items that are encoded in one step.
_ITEMS_PER_PIECE = 512

# OpenAI's and Anthropic's SDKs retry if its value is "true" and do not if it is "false".
SHOULD_RETRY_HEADER = "x-should-retry"

# Errors that a retry may resolve. The SDKs respect the Retry-After header sent with these errors.
RETRYABLE = frozenset({ErrorKind.LOADING, ErrorKind.STOPPING, ErrorKind.BUSY, ErrorKind.OVERLOADED})


def encode_long_array(items: list[Any]) -> list[Any] | orjson.Fragment:
    """Encodes a JSON array for a response. A long array is encoded in several steps, because orjson
    holds the GIL while it encodes, and the log probabilities of a long prompt can take ten
    megabytes. Call this function on a worker thread."""
    if len(items) <= _ITEMS_PER_PIECE:
        return items
    pieces = (
        orjson.dumps(items[at : at + _ITEMS_PER_PIECE])[1:-1]
        for at in range(0, len(items), _ITEMS_PER_PIECE)
    )
    return orjson.Fragment(b"[" + b",".join(pieces) + b"]")


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        orjson.dumps(content), status_code=status, headers=headers, media_type="application/json"
    )


class ErrorStatus(NamedTuple):
    """The status code of an error kind, and its type and code in OpenAI's error object."""

    status: int
    type: str
    code: str | None = None


ERROR_FORMATS: Mapping[ErrorKind, ErrorStatus] = {
    ErrorKind.INVALID: ErrorStatus(400, "invalid_request_error"),
    ErrorKind.CONTEXT_LENGTH: ErrorStatus(400, "invalid_request_error", "context_length_exceeded"),
    ErrorKind.NOT_FOUND: ErrorStatus(404, "invalid_request_error", "not_found"),
    ErrorKind.MODEL_NOT_FOUND: ErrorStatus(404, "invalid_request_error", "model_not_found"),
    ErrorKind.METHOD_NOT_ALLOWED: ErrorStatus(405, "invalid_request_error", "method_not_supported"),
    ErrorKind.UNSUPPORTED_MEDIA_TYPE: ErrorStatus(
        415, "invalid_request_error", "unsupported_media_type"
    ),
    ErrorKind.TOO_LARGE: ErrorStatus(413, "invalid_request_error", "request_too_large"),
    ErrorKind.UNAUTHORIZED: ErrorStatus(401, "invalid_request_error", "invalid_api_key"),
    ErrorKind.FORBIDDEN: ErrorStatus(403, "invalid_request_error", "forbidden"),
    ErrorKind.REQUEST_TIMEOUT: ErrorStatus(408, "invalid_request_error", "request_timeout"),
    ErrorKind.DEADLINE: ErrorStatus(504, "api_error", "deadline_exceeded"),
    ErrorKind.LOADING: ErrorStatus(503, "api_error", "model_loading"),
    ErrorKind.STOPPING: ErrorStatus(503, "api_error", "server_stopping"),
    ErrorKind.OVERLOADED: ErrorStatus(503, "api_error", "server_overloaded"),
    # OpenAI's status for a temporary overload; vLLM's 503 means that the service is unavailable
    ErrorKind.BUSY: ErrorStatus(429, "rate_limit_error", "server_busy"),
    ErrorKind.ENGINE: ErrorStatus(500, "api_error", "engine_error"),
    ErrorKind.MODEL_FILES: ErrorStatus(500, "api_error", "bad_model_files"),
}


def render_error(error: AppError) -> JsonObject:
    """Returns OpenAI's error object, which clients of all four supported APIs can read."""
    error_format = ERROR_FORMATS[error.kind]
    return {
        "error": {
            "message": error.message,
            "type": error_format.type,
            "param": error.param,
            "code": error.code or error_format.code,
        }
    }


def error_response(
    error: AppError, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns an error response in the format of the request's dialect. `status` overrides the
    default status code of the error kind. Records the error in the request context for the access
    log."""
    content, usual_status = render_error(error), ERROR_FORMATS[error.kind].status
    if (context := REQUEST_CONTEXT.get()) is not None:
        context.error, context.reason = error.code or error.kind.value, error.redact()
        if context.error_format is not None:
            usual_status, content = context.error_format.render(error, context.id)
    wait = error.retry_after
    if wait is None and error.kind in RETRYABLE:
        wait = 1  # the interval at which a client would poll anyway
    retry_headers = {} if wait is None else {"Retry-After": str(wait)}
    if error.kind is ErrorKind.DEADLINE:
        # OpenAI's SDKs retry on 500 and above, and a retry would take just as long
        retry_headers[SHOULD_RETRY_HEADER] = "false"
    return json_response(content, status or usual_status, {**retry_headers, **(headers or {})})


class DialectErrors(ErrorFormat, Protocol):
    """The error format of a dialect, and the requests to which it applies. A dialect's module
    defines one as ERRORS."""

    @property
    def path(self) -> str:
        """The path prefix of the dialect's requests."""
        ...

    @property
    def header(self) -> str | None:
        """A request header that also identifies the dialect, in lower case."""
        ...
