"""Errors caused by requests, files and the environment; bugs of mlxrunner are assertions.

Knows: kinds of errors, their messages, redaction of paths and of text from clients. Must not know:
status codes, JSON; dialects map `ErrorKind` to these.
"""

import re
from enum import StrEnum
from pathlib import Path
from types import TracebackType

# An absolute path; not a route of the API, nor a part of a URL or of a relative path. The match
# ends at the first blank of a file name, so a part of such a name remains, but no folder.
_ABSOLUTE_PATH = re.compile(
    r"(?<![\w./:~-])~?/(?!v1/)(?:[^\s/'\"`:;,)\]]+/)*(?P<name>[^\s/'\"`:;,)\]]+)"
)


class ErrorKind(StrEnum):
    """The kind of an error. Each dialect maps these to its status codes and type names."""

    INVALID = "invalid_request"
    CONTEXT_LENGTH = "context_length_exceeded"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    TOO_LARGE = "request_too_large"
    UNAUTHORIZED = "invalid_api_key"
    FORBIDDEN = "forbidden"
    REQUEST_TIMEOUT = "request_timeout"
    DEADLINE = "deadline_exceeded"
    LOADING = "model_loading"
    STOPPING = "server_stopping"
    OVERLOADED = "server_overloaded"
    BUSY = "server_busy"
    ENGINE = "engine_error"
    MODEL_FILES = "bad_model_files"


class AppError(Exception):
    """An error to report to the client or the operator who caused it.

    message: describes the error and a remedy. marked_message: the message with the marks of
    `mark_client_text`, for code that builds another AppError from it. param: dotted path of the
    request field (`messages.0.role`). code: stable machine-readable code, if `kind` is not precise
    enough. retry_after: seconds after which a retry may succeed, or None.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        self.marked_message = message
        self.message = message.translate(_STRIP_MARKS)
        super().__init__(self.message)
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def redact(self) -> str:
        """The message without the text that the client sent, which may be a prompt or a key."""
        return _CLIENT_TEXT.sub("…", self.marked_message)


def redact_paths(error: AppError, folder: Path | None, name: str) -> AppError:
    """Returns a copy of the error without folders, so that clients do not learn where files are.

    folder: folder of the model, which is replaced by `name`; of other absolute paths only the last
    component remains."""
    message = error.marked_message
    if folder is not None:
        message = message.replace(str(folder), name)
    message = " ".join(_ABSOLUTE_PATH.sub(r"\g<name>", message).split())
    return AppError(
        error.kind,
        message,
        param=error.param,
        code=error.code,
        retry_after=error.retry_after,
    )


# Unicode noncharacters that enclose a client's text in a message. `repr` escapes them, and JSON
# keeps them, so the marks are preserved between processes.
_CLIENT_TEXT_START, _CLIENT_TEXT_END = "\ufdd0", "\ufdd1"
_STRIP_MARKS = str.maketrans("", "", _CLIENT_TEXT_START + _CLIENT_TEXT_END)
_CLIENT_TEXT = re.compile(f"{_CLIENT_TEXT_START}[^{_CLIENT_TEXT_END}]*{_CLIENT_TEXT_END}?")


def mark_client_text(text: str) -> str:
    """Marks a part of an AppError's message that repeats text sent by the client, or that another
    program derived from it. The response contains it, the log does not."""
    return f"{_CLIENT_TEXT_START}{text.translate(_STRIP_MARKS)}{_CLIENT_TEXT_END}"


class LibraryPanic(Exception):
    """A library written in Rust panicked; see `PanicGuard`."""


class PanicGuard:
    """`with PanicGuard():` raises LibraryPanic in place of pyo3's PanicException.

    An extension written in Rust raises PanicException where its code panics. It derives from
    BaseException, so `except Exception` misses it, and each extension has a class of its own that
    no module exports. KeyboardInterrupt, SystemExit and CancelledError pass unchanged.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exception_type is None or issubclass(exception_type, Exception):
            return
        if (exception_type.__module__, exception_type.__name__) == (
            "pyo3_runtime",
            "PanicException",
        ):
            raise LibraryPanic(" ".join(str(error).split())) from error
