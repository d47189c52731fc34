"""Errors of GGUF files that are valid, but that this program does not support.

Knows: the kind of such an error. Must not know: its reasons.
"""

import contextlib
from collections.abc import Generator

from app.core.errors import AppError, ErrorKind
from models.gguf.reader import GGUFError, UnsupportedError


class UnsupportedGGUFError(AppError):
    """The file has an architecture, a type of tensors or a tokenizer that is not supported. The
    same model in a different format may be."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.MODEL_FILES, message)


@contextlib.contextmanager
def translate_gguf_errors() -> Generator[None]:
    """Raises AppError(MODEL_FILES) with the message of a GGUFError."""
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedGGUFError(str(error)) from error
    except GGUFError as error:
        raise AppError(ErrorKind.MODEL_FILES, str(error)) from error
