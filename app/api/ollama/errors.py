"""Ollama's error responses: `{"error": TEXT}` with the status codes of Ollama's server.

Knows: the format, and the messages that clients check for. Must not know: routes, requests.
"""

from app.core.errors import AppError, ErrorKind
from app.http.responses import ERROR_FORMATS, JsonObject
from app.http.streaming import encode_json_line

# clients compare these messages
_BUSY = "server busy, please try again.  maximum pending requests exceeded"
_TOO_LONG = "the input length exceeds the context length"

_OWN_STATUSES = {ErrorKind.BUSY: 503}


def render_message(error: AppError) -> str:
    match error.kind:
        case ErrorKind.BUSY if error.code is None:
            return f"{_BUSY}: {error.message}"
        case ErrorKind.CONTEXT_LENGTH:
            return f"{_TOO_LONG}: {error.message}"
        case _:
            return error.message


def encode_error_line(error: AppError) -> bytes:
    """Encodes the last line of a failed stream."""
    return encode_json_line({"error": render_message(error)})


class OllamaErrors:
    """Implements `app.http.responses.DialectErrors`."""

    path = "/api"
    header = None

    def render(self, error: AppError, request_id: str) -> tuple[int, JsonObject]:
        status = _OWN_STATUSES.get(error.kind, ERROR_FORMATS[error.kind].status)
        return status, {"error": render_message(error)}
