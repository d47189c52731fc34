"""What a model needs, asked of a process that lives only for that.

Knows: how to start it, what it is told and says. Must not know: MLX, how a model is measured.
Laying out a model makes arrays, which is nothing for the process that all requests go through.
"""

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.residents import Need
from app.core.settings import Settings
from app.runners.codec import Codec

# where our packages lie, wherever this process found them
_ROOT = Path(__file__).resolve().parents[2]

# characters of a complaint that are worth telling
_TOLD = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One line to the process's standard input."""

    files: ModelFiles
    settings: Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """kind, message: of the AppError that measuring raised."""

    kind: Kind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One line from its standard output."""

    found: Need | Refused


async def need(files: ModelFiles, settings: Settings) -> Need:
    """Raises AppError(MODEL_FILES) for files that cannot become a model, or if the process broke
    over them or took longer than `settings.load_timeout`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "app.runners.measuring",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, _search_path()))},
        start_new_session=True,
    )
    question = Codec[Question](Question).encode(Question(files=files, settings=settings))
    try:
        async with asyncio.timeout(settings.load_timeout):
            said, complaint = await process.communicate(question + b"\n")
    except TimeoutError:
        raise _broken(files, f"took longer than {settings.load_timeout:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0 or not said:
        words = complaint.decode(errors="replace").strip()[-_TOLD:]
        raise _broken(files, words or f"ended with status {process.returncode}")
    found = Codec[Answer](Answer).decode(said).found
    if isinstance(found, Refused):
        raise AppError(found.kind, found.message)
    return found


def _search_path() -> tuple[str, str | None]:
    return str(_ROOT), os.environ.get("PYTHONPATH")


def _broken(files: ModelFiles, why: str) -> AppError:
    message = f"{files.path}: finding out how much memory the model needs failed: {why}"
    return AppError(Kind.MODEL_FILES, message)
