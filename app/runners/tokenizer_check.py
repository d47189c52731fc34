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

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.runners.child_process import CompletedChild, describe_exit, run_module
from app.runners.codec import Codec

# exit status of a trial that needed more memory than it was given
OUT_OF_MEMORY_STATUS = 4

# what a trial of the largest published tokenizers, 35 MB, takes is a fifth of this
_BASE_MEMORY = 2 << 30
_MEMORY_PER_BYTE = 32

# The library's threads would each take address space, which is what is limited; where it is told
# to, it leaves out its traces, which are a hundred lines.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
}

# what the allocators write before they end the process
_ALLOCATION_ERRORS = ("memory allocation of", "capacity overflow", "MemoryError")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """memory: bytes beside those that follow from the size of tokenizer.json. cpu, wall: seconds.
    The processor's time is what counts; the other bounds a machine that has none to give."""

    memory: int = _BASE_MEMORY
    cpu: int = 60
    wall: float = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """One line to the process's standard input. parent_pid: the pid of whoever asks. memory_limit:
    bytes of address space. cpu_limit: seconds."""

    parent_pid: int
    files: ModelFiles
    memory_limit: int
    cpu_limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResponse:
    """One line from its standard output. error: the message of the AppError that the tokenizer
    raised; None for one that may be used."""

    error: str | None


@dataclass(frozen=True, slots=True)
class _FileStamp:
    """A file as it was when it was tried."""

    size: int
    mtime_ns: int


class TokenizerChecker:
    """Tries each tokenizer.json once as long as it is the same. Lives on the event loop. trusted:
    whether these files are our own, which are not tried."""

    def __init__(
        self, is_trusted: Callable[[ModelFiles], bool], limits: CheckLimits | None = None
    ) -> None:
        self._is_trusted = is_trusted
        self._limits = limits or CheckLimits()
        # by path; one outcome each
        self._outcomes: dict[str, tuple[_FileStamp, str | None]] = {}
        # one model may have several names
        self._locks: dict[str, asyncio.Lock] = {}

    async def check(self, files: ModelFiles) -> None:
        """Raises AppError(MODEL_FILES) for a tokenizer that must not be used, with the reason in
        one line; AppError(ENGINE) where no process can be started to find out."""
        if self._is_trusted(files):
            return
        path = str(files.tokenizer_path)
        async with self._locks.setdefault(path, asyncio.Lock()):
            identity = _read_stamp(files)
            known, refused = self._outcomes.get(path, (None, None))
            if known != identity:
                refused = await self._run_check(files, identity)
                self._outcomes[path] = (identity, refused)
        if refused is not None:
            raise AppError(ErrorKind.MODEL_FILES, refused)

    async def _run_check(self, files: ModelFiles, stamp: _FileStamp) -> str | None:
        """Why it must not be used, if so."""
        limits = self._limits
        memory = limits.memory + _MEMORY_PER_BYTE * stamp.size
        question = CheckRequest(
            parent_pid=os.getpid(), files=files, memory_limit=memory, cpu_limit=limits.cpu
        )
        line = Codec[CheckRequest](CheckRequest).encode(question)
        try:
            reply = await run_module(
                "app.runners.tokenizer_check_main", line, limits.wall, _ENVIRONMENT
            )
        except TimeoutError:
            why = f"takes longer than {limits.wall:g} s"
        except OSError as error:
            message = (
                f"{files.tokenizer_path}: cannot start a process to check the tokenizer: {error}"
            )
            raise AppError(ErrorKind.ENGINE, message) from error
        else:
            if reply.status == 0 and reply.stdout:
                return Codec[CheckResponse](CheckResponse).decode(reply.stdout).error
            why = _describe_failure(reply, memory, limits.cpu)
        return f"{files.tokenizer_path} is not a usable tokenizer: checking it {why}"


def _read_stamp(files: ModelFiles) -> _FileStamp:
    try:
        found = files.tokenizer_path.stat()
    except OSError as error:
        message = f"{files.tokenizer_path} cannot be read: {error.strerror or error}"
        raise AppError(ErrorKind.MODEL_FILES, message) from error
    return _FileStamp(size=found.st_size, mtime_ns=found.st_mtime_ns)


def _describe_failure(reply: CompletedChild, memory: int, cpu: int) -> str:
    if reply.status == OUT_OF_MEMORY_STATUS or any(
        sign in reply.reason for sign in _ALLOCATION_ERRORS
    ):
        return f"needs more than {memory >> 20} MiB of memory"
    if reply.status == -signal.SIGXCPU:
        return f"takes more than {cpu} s of CPU time"
    return f"fails: its process {describe_exit(reply.status)}{reply.reason and f': {reply.reason}'}"
