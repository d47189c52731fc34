"""Errors caused by requests, files and the environment. Bugs in mlxrunner raise assertion errors
instead.

Knows: error types, error messages, redaction of paths and of text from clients, escapes of
unprintable characters, suggestions for mistyped names. Must not know: status codes, JSON. Dialects
map `ErrorKind` to status codes.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# Matches an absolute path, but not an API route, a part of a URL or a part of a relative path. The
# match ends at the first space in a path, so the rest of a file name may remain, but no folder.
_ABSOLUTE_PATH = re.compile(
    r"(?<![\w./:~-])~?/(?!v1/)(?:[^\s/'\"`:;,)\]]+/)*(?P<name>[^\s/'\"`:;,)\]]+)"
)

# a shorter word could be the beginning of too many names
_MIN_PREFIX_LENGTH = 3


class ErrorKind(StrEnum):
    """The type of an error. Each dialect maps it to its own status code and type name."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextExcess:
    """The token counts of a prompt that is too long. output_tokens: the requested output tokens, if
    the prompt would fit without them."""

    prompt_tokens: int
    context_length: int
    output_tokens: int | None = None


class AppError(Exception):
    """An error to report to the client or operator that caused it.

    message: describes the error and a remedy. marked_message: the message with the marks of
    `mark_client_text`, for code that builds another AppError from it. param: the dotted path of the
    request field (`messages.0.role`). code: a stable machine-readable code that is more specific
    than `kind`. retry_after: the number of seconds after which a retry may succeed, or None.
    excess: the token counts, for a prompt that is too long.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        excess: ContextExcess | None = None,
    ) -> None:
        self.marked_message = message
        self.message = message.translate(_STRIP_MARKS)
        super().__init__(self.message)
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.excess = excess

    def redact(self) -> str:
        """Returns the message without text sent by the client, since that text may be a prompt or a
        key."""
        return _CLIENT_TEXT.sub("…", self.marked_message)


def redact_paths(error: AppError, folder: Path | None, name: str) -> AppError:
    """Returns a copy of the error without folders, so that clients cannot see where files are
    stored.

    folder: the folder of the model, which is replaced by `name`. Other absolute paths are reduced
    to their last component.
    """
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
        excess=error.excess,
    )


# Unicode noncharacters that enclose a client's text in a message. JSON preserves them, so the marks
# survive the transfer between processes. `repr` escapes any such characters in the client's text.
_CLIENT_TEXT_START, _CLIENT_TEXT_END = "\ufdd0", "\ufdd1"
_STRIP_MARKS = str.maketrans("", "", _CLIENT_TEXT_START + _CLIENT_TEXT_END)
_CLIENT_TEXT = re.compile(f"{_CLIENT_TEXT_START}[^{_CLIENT_TEXT_END}]*{_CLIENT_TEXT_END}?")


def mark_client_text(text: str) -> str:
    """Marks client text in the message of an AppError, including text that another program derived
    from it. Responses contain marked text; logs do not."""
    return f"{_CLIENT_TEXT_START}{text.translate(_STRIP_MARKS)}{_CLIENT_TEXT_END}"


class LibraryPanic(Exception):
    """Raised when a library written in Rust panics; see `PanicGuard`."""


class PanicGuard:
    """`with PanicGuard():` raises LibraryPanic instead of pyo3's PanicException.

    An extension written in Rust raises PanicException when its code panics. The exception derives
    from BaseException, so `except Exception` does not catch it. Each extension has its own
    PanicException class, which no module exports. KeyboardInterrupt, SystemExit and CancelledError
    pass unchanged.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, Exception):
            return
        raised = type(error)
        if (raised.__module__, raised.__name__) == ("pyo3_runtime", "PanicException"):
            raise LibraryPanic(" ".join(str(error).split())) from error


def escape_control_characters(text: str) -> str:
    """Escapes unprintable characters, for example control characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """ "; did you mean …?", or "" if no known name is similar to `word`. prefix: the prefix of all
    names, which is not compared, because it would make all names similar."""
    found = find_nearest(word, known, prefix)
    return f"; did you mean {found}?" if found else ""


def find_nearest(word: str, known: Iterable[str], prefix: str = "") -> str | None:
    """Returns the most similar name, or the only name that begins with `word`, or None. Upper case,
    `_` and `-` make no difference."""
    by_key = {_normalize(name, prefix): name for name in known}
    key = _normalize(word, prefix)
    close = difflib.get_close_matches(key, by_key, n=1)
    if close:
        return by_key[close[0]]
    begin = [name for name in by_key if name.startswith(key) and len(key) >= _MIN_PREFIX_LENGTH]
    return by_key[begin[0]] if len(begin) == 1 else None


def _normalize(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("_", "-").lstrip("-")
