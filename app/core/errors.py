"""The world's mistakes. Ours are assertions.

Knows: what can go wrong, in words. Must not know: status codes or JSON; dialects map `Kind`.
"""

from enum import StrEnum


class Kind(StrEnum):
    """What went wrong. Each dialect maps these to its status codes and type names."""

    INVALID = "invalid_request"
    CONTEXT_LENGTH = "context_length_exceeded"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    METHOD = "method_not_allowed"
    MEDIA_TYPE = "unsupported_media_type"
    TOO_LARGE = "request_too_large"
    UNAUTHORIZED = "invalid_api_key"
    FORBIDDEN = "forbidden"
    TIMEOUT = "request_timeout"
    DEADLINE = "deadline_exceeded"
    LOADING = "model_loading"
    STOPPING = "server_stopping"
    OVERLOADED = "server_overloaded"
    BUSY = "server_busy"
    ENGINE = "engine_error"
    MODEL_FILES = "bad_model_files"


class AppError(Exception):
    """A mistake to be told to whoever made it.

    message: says what is wrong and what to do. param: the request field, dotted
    (`messages.0.role`). code: a stable word for programs, where `kind` is not precise enough.
    retry_after: seconds after which trying again makes sense, where it does.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
