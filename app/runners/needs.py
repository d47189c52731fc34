"""What a model needs, asked of a process that lives only for that.

Knows: what it is asked and answers. Must not know: MLX, how a model is measured. Laying out
a model makes arrays, which is nothing for the process that all requests go through.
"""

import os
from dataclasses import dataclass

from app.core.errors import AppError, ErrorKind
from app.core.files import ModelFiles
from app.core.residents import MemoryRequirement
from app.core.settings import Settings
from app.runners.codec import Codec
from app.runners.helper import run_module
from app.runners.output import describe_exit


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """One line to the process's standard input, which stays open as long as somebody waits for the
    answer. parent_pid: the pid of whoever asks. loaded_bytes: bytes that models have which are
    loaded already."""

    parent_pid: int
    files: ModelFiles
    settings: Settings
    loaded_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateError:
    """kind, message: of the AppError that measuring raised."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateResponse:
    """One line from its standard output."""

    result: MemoryRequirement | EstimateError


async def estimate_memory(
    files: ModelFiles, settings: Settings, loaded_bytes: int
) -> MemoryRequirement:
    """loaded_bytes: bytes that models have which are loaded already. Raises AppError(MODEL_FILES)
    for files that cannot become a model, or if the process broke over them or took longer than
    `settings.load_timeout`; AppError(ENGINE) where there can be no process."""
    question = EstimateRequest(
        parent_pid=os.getpid(), files=files, settings=settings, loaded_bytes=loaded_bytes
    )
    try:
        reply = await run_module(
            "app.runners.measuring",
            Codec[EstimateRequest](EstimateRequest).encode(question),
            settings.load_timeout,
        )
    except TimeoutError:
        why = f"took longer than {settings.load_timeout:g} s"
        raise _build_error(ErrorKind.MODEL_FILES, files, why) from None
    except OSError as error:
        raise _build_error(ErrorKind.ENGINE, files, f"cannot start a process: {error}") from error
    if reply.status != 0 or not reply.stdout:
        why = f"its process {describe_exit(reply.status)}{reply.reason and f': {reply.reason}'}"
        raise _build_error(ErrorKind.MODEL_FILES, files, why)
    found = Codec[EstimateResponse](EstimateResponse).decode(reply.stdout).result
    if isinstance(found, EstimateError):
        raise AppError(found.kind, found.message)
    return found


def _build_error(kind: ErrorKind, files: ModelFiles, reason: str) -> AppError:
    return AppError(
        kind, f"{files.path}: estimating the memory that the model needs failed: {reason}"
    )
