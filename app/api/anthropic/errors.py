"""Error responses in Anthropic's format.

Knows: the status code and type of each kind of error, the messages that make Claude Code compact a
conversation. Must not know: where errors are raised.

    {"type": "error", "error": {"type", "message", "details": {"error_code"}}, "request_id"}

Format: Anthropic's API reference, "Errors". `error_code` is a newer, optional field.
"""

from collections.abc import Mapping
from typing import NamedTuple

from app.core.errors import AppError, ErrorKind
from app.http.responses import ERROR_FORMATS, JsonObject

VERSION_HEADER = "anthropic-version"

# the error code for a request with a `thread`; the SDK's tool runner then sends whole conversations
THREAD_UNSUPPORTED = "thread_unsupported_request"

# Claude Code requests models by Anthropic's names unless these variables are set.
_MODEL_VARIABLES = (
    "Claude Code takes its models from ANTHROPIC_MODEL, ANTHROPIC_DEFAULT_OPUS_MODEL, "
    "ANTHROPIC_DEFAULT_SONNET_MODEL, ANTHROPIC_DEFAULT_HAIKU_MODEL and CLAUDE_CODE_SUBAGENT_MODEL"
)


class ErrorType(NamedTuple):
    """The status code of an error kind, and its type in the error object."""

    status: int
    type: str


ERROR_TYPES: Mapping[ErrorKind, ErrorType] = {
    ErrorKind.INVALID: ErrorType(400, "invalid_request_error"),
    ErrorKind.CONTEXT_LENGTH: ErrorType(400, "invalid_request_error"),
    ErrorKind.NOT_FOUND: ErrorType(404, "not_found_error"),
    ErrorKind.MODEL_NOT_FOUND: ErrorType(404, "not_found_error"),
    ErrorKind.METHOD_NOT_ALLOWED: ErrorType(405, "invalid_request_error"),
    ErrorKind.UNSUPPORTED_MEDIA_TYPE: ErrorType(415, "invalid_request_error"),
    ErrorKind.TOO_LARGE: ErrorType(413, "request_too_large"),
    ErrorKind.UNAUTHORIZED: ErrorType(401, "authentication_error"),
    ErrorKind.FORBIDDEN: ErrorType(403, "permission_error"),
    ErrorKind.REQUEST_TIMEOUT: ErrorType(408, "timeout_error"),
    ErrorKind.DEADLINE: ErrorType(504, "timeout_error"),
    ErrorKind.LOADING: ErrorType(529, "overloaded_error"),
    ErrorKind.STOPPING: ErrorType(529, "overloaded_error"),
    ErrorKind.OVERLOADED: ErrorType(529, "overloaded_error"),
    ErrorKind.BUSY: ErrorType(429, "rate_limit_error"),
    ErrorKind.ENGINE: ErrorType(500, "api_error"),
    ErrorKind.MODEL_FILES: ErrorType(500, "api_error"),
}


def render_messages_error(error: AppError, request_id: str) -> JsonObject:
    """Returns the body of an error response, which is also the data of an error event."""
    content: JsonObject = {"type": ERROR_TYPES[error.kind].type, "message": _build_message(error)}
    code = error.code or ERROR_FORMATS[error.kind].code or error.kind.value
    details: JsonObject = {"error_code": code}
    if error.code == THREAD_UNSUPPORTED:
        details["unsupported"] = []
    return {"type": "error", "error": {**content, "details": details}, "request_id": request_id}


class AnthropicErrors:
    """Implements `app.http.responses.DialectErrors`."""

    path = "/v1/messages"
    header = VERSION_HEADER

    def render(self, error: AppError, request_id: str) -> tuple[int, JsonObject]:
        return ERROR_TYPES[error.kind].status, render_messages_error(error, request_id)


def _build_message(error: AppError) -> str:
    """Returns the message. Like Anthropic's messages, it begins with the path of the field."""
    excess = error.excess
    if excess is not None and excess.output_tokens is not None:
        return (
            f"input length and `max_tokens` exceed context limit: {excess.prompt_tokens} + "
            f"{excess.output_tokens} > {excess.context_length}, decrease input length or "
            "`max_tokens` and try again"
        )
    if excess is not None:
        # one token of the context is reserved for the output
        most = excess.context_length - 1
        return f"prompt is too long: {excess.prompt_tokens} tokens > {most} maximum"
    if error.kind is ErrorKind.CONTEXT_LENGTH:
        return f"prompt is too long: {error.message}"
    message = _begin_with_path(error)
    return f"{message}. {_MODEL_VARIABLES}" if error.kind is ErrorKind.MODEL_NOT_FOUND else message


def _begin_with_path(error: AppError) -> str:
    path, message = error.param, error.message
    if path is None:
        return message
    rest = message.removeprefix(path)
    # a longer path with the same prefix does not count
    return f"{path}: {rest.lstrip(' :') if rest[:1] in (' ', ':') else message}"
