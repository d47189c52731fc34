"""What a model needs, asked of a process that lives only for that.

Knows: what it is asked and answers. Must not know: MLX, how a model is measured. Laying out
a model makes arrays, which is nothing for the process that all requests go through.
"""

import os
from dataclasses import dataclass

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.residents import Need
from app.core.settings import Settings
from app.runners.codec import Codec
from app.runners.helper import ask
from app.runners.output import ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One line to the process's standard input, which stays open as long as somebody waits for the
    answer. parent: the pid of whoever asks. held: bytes that models have which are loaded
    already."""

    parent: int
    files: ModelFiles
    settings: Settings
    held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """kind, message: of the AppError that measuring raised."""

    kind: Kind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One line from its standard output."""

    found: Need | Refused


async def need(files: ModelFiles, settings: Settings, held: int) -> Need:
    """held: bytes that models have which are loaded already. Raises AppError(MODEL_FILES) for files
    that cannot become a model, or if the process broke over them or took longer than
    `settings.load_timeout`; AppError(ENGINE) where there can be no process."""
    question = Question(parent=os.getpid(), files=files, settings=settings, held=held)
    try:
        reply = await ask(
            "app.runners.measuring",
            Codec[Question](Question).encode(question),
            settings.load_timeout,
        )
    except TimeoutError:
        why = f"took longer than {settings.load_timeout:g} s"
        raise _failed(Kind.MODEL_FILES, files, why) from None
    except OSError as error:
        raise _failed(Kind.ENGINE, files, f"cannot start a process: {error}") from error
    if reply.status != 0 or not reply.answer:
        why = f"its process {ended(reply.status)}{reply.reason and f': {reply.reason}'}"
        raise _failed(Kind.MODEL_FILES, files, why)
    found = Codec[Answer](Answer).decode(reply.answer).found
    if isinstance(found, Refused):
        raise AppError(found.kind, found.message)
    return found


def _failed(kind: Kind, files: ModelFiles, why: str) -> AppError:
    return AppError(kind, f"{files.path}: estimating the memory that the model needs failed: {why}")
