"""What a model needs, asked of a process that lives only for that.

Knows: how to start it, what it is told and says. Must not know: MLX, how a model is measured.
Laying out a model makes arrays, which is nothing for the process that all requests go through.
"""

import asyncio
import os
from asyncio.subprocess import PIPE, Process
from collections import deque
from dataclasses import dataclass

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.residents import Need
from app.core.settings import Settings
from app.runners.codec import Codec
from app.runners.interpreter import command, environment
from app.runners.output import Output, ended

_CHUNK = 1 << 16


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
        process = await asyncio.create_subprocess_exec(
            *command("app.runners.measuring"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=environment(),
            process_group=0,  # as in `app.runners.spawned`
        )
    except OSError as error:
        raise _failed(Kind.ENGINE, files, f"no process can be started: {error}") from error
    complaint = Output()
    try:
        async with asyncio.timeout(settings.load_timeout):
            said = await _answered(process, Codec[Question](Question).encode(question), complaint)
    except TimeoutError:
        why = f"took longer than {settings.load_timeout:g} s"
        raise _failed(Kind.MODEL_FILES, files, why) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0 or not said:
        how, reason = ended(process.returncode or 0), complaint.reason()
        why = f"its process {how}{reason and f': {reason}'}"
        raise _failed(Kind.MODEL_FILES, files, why)
    found = Codec[Answer](Answer).decode(said).found
    if isinstance(found, Refused):
        raise AppError(found.kind, found.message)
    return found


async def _answered(process: Process, question: bytes, complaint: Output) -> bytes:
    """What it says until it ends; what it complains of is kept."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(question + b"\n")
    try:
        said, _, _ = await asyncio.gather(
            process.stdout.read(), _listen(process, complaint), process.wait()
        )
    finally:
        process.stdin.close()
    return said


async def _listen(process: Process, complaint: Output) -> None:
    assert process.stderr is not None
    while data := await process.stderr.read(_CHUNK):
        deque(complaint.feed(data), maxlen=0)
    deque(complaint.flush(), maxlen=0)


def _failed(kind: Kind, files: ModelFiles, why: str) -> AppError:
    return AppError(
        kind, f"{files.path}: finding out how much memory the model needs failed: {why}"
    )
