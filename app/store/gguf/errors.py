"""Errors of GGUF files that are valid, but that this program does not support.

Knows: the kind of such an error. Must not know: its reasons.
"""

from app.core.errors import AppError, ErrorKind
from models.gguf.reader import GGUFError, UnsupportedError


class UnsupportedGGUFError(AppError):
    """The file has an architecture, a type of tensors or a tokenizer that is not supported. The
    same model in a different format may be."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.MODEL_FILES, message)


def to_app_error(error: GGUFError) -> AppError:
    """Returns the error with the same message."""
    if isinstance(error, UnsupportedError):
        return UnsupportedGGUFError(str(error))
    return AppError(ErrorKind.MODEL_FILES, str(error))
