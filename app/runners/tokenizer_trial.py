"""Whether a model's tokenizer may work in the server's process, found out in a process of its own.

Knows: which limits that process gets, what it is asked and answers, what was found out before. Must
not know: the `tokenizers` library, what the tokenizer is tried with.

A tokenizer.json comes from whoever made the model, and the library that works with it ends its
process where memory is short. In the server's process that would end every model.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.runners.codec import Codec
from app.runners.helper import Reply, ask
from app.runners.output import ended

# exit status of a trial that needed more memory than it was given
OUT_OF_MEMORY = 4

# what a trial of the largest published tokenizers, 35 MB, takes is a fifth of this
_MEMORY = 2 << 30
_MEMORY_PER_BYTE = 32

# The library's threads would each take address space, which is what is limited; where it is told
# to, it leaves out its traces, which are a hundred lines.
_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
}

# what the allocators write before they end the process
_ALLOCATION = ("memory allocation of", "capacity overflow", "MemoryError")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """memory: bytes beside those that follow from the size of tokenizer.json. cpu, wall: seconds.
    The processor's time is what counts; the other bounds a machine that has none to give."""

    memory: int = _MEMORY
    cpu: int = 60
    wall: float = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One line to the process's standard input. parent: the pid of whoever asks. memory: bytes of
    address space. cpu: seconds."""

    parent: int
    files: ModelFiles
    memory: int
    cpu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One line from its standard output. refused: the message of the AppError that the tokenizer
    raised; None for one that may be used."""

    refused: str | None


@dataclass(frozen=True, slots=True)
class _Identity:
    """A file as it was when it was tried."""

    size: int
    mtime_ns: int


class TokenizerTrials:
    """Tries each tokenizer.json once as long as it is the same. Lives on the event loop. trusted:
    whether these files are our own, which are not tried."""

    def __init__(self, trusted: Callable[[ModelFiles], bool], limits: Limits | None = None) -> None:
        self._trusted = trusted
        self._limits = limits or Limits()
        # by path; one outcome each
        self._outcomes: dict[str, tuple[_Identity, str | None]] = {}
        # one model may have several names
        self._locks: dict[str, asyncio.Lock] = {}

    async def check(self, files: ModelFiles) -> None:
        """Raises AppError(MODEL_FILES) for a tokenizer that must not be used, with the reason in
        one line; AppError(ENGINE) where no process can be started to find out."""
        if self._trusted(files):
            return
        path = str(files.tokenizer)
        async with self._locks.setdefault(path, asyncio.Lock()):
            identity = _identity(files)
            known, refused = self._outcomes.get(path, (None, None))
            if known != identity:
                refused = await self._tried(files, identity)
                self._outcomes[path] = (identity, refused)
        if refused is not None:
            raise AppError(Kind.MODEL_FILES, refused)

    async def _tried(self, files: ModelFiles, identity: _Identity) -> str | None:
        """Why it must not be used, if so."""
        limits = self._limits
        memory = limits.memory + _MEMORY_PER_BYTE * identity.size
        question = Question(parent=os.getpid(), files=files, memory=memory, cpu=limits.cpu)
        line = Codec[Question](Question).encode(question)
        try:
            reply = await ask("app.runners.tokenizer_child", line, limits.wall, _VARIABLES)
        except TimeoutError:
            why = f"takes longer than {limits.wall:g} s"
        except OSError as error:
            message = f"{files.tokenizer}: cannot start a process to check the tokenizer: {error}"
            raise AppError(Kind.ENGINE, message) from error
        else:
            if reply.status == 0 and reply.answer:
                return Codec[Answer](Answer).decode(reply.answer).refused
            why = _why(reply, memory, limits.cpu)
        return f"{files.tokenizer} is not a usable tokenizer: checking it {why}"


def _identity(files: ModelFiles) -> _Identity:
    try:
        found = files.tokenizer.stat()
    except OSError as error:
        message = f"{files.tokenizer} cannot be read: {error.strerror or error}"
        raise AppError(Kind.MODEL_FILES, message) from error
    return _Identity(size=found.st_size, mtime_ns=found.st_mtime_ns)


def _why(reply: Reply, memory: int, cpu: int) -> str:
    if reply.status == OUT_OF_MEMORY or any(sign in reply.reason for sign in _ALLOCATION):
        return f"needs more than {memory >> 20} MiB of memory"
    if reply.status == -signal.SIGXCPU:
        return f"takes more than {cpu} s of CPU time"
    return f"fails: its process {ended(reply.status)}{reply.reason and f': {reply.reason}'}"
