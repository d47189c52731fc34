"""Checks, in a separate process, whether a model's tokenizer may be used in the server process.

Knows: the limits and messages of that process, earlier results. Must not know: the `tokenizers`
library, the texts of the check.

A tokenizer.json is untrusted input from the author of the model, and the `tokenizers` library
aborts the process when it runs out of memory. In the server process, this would take down all
models.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from app.core.errors import AppError, ErrorKind
from app.core.model_files import AddedToken, ModelFiles
from app.runners.channel import make_decoder
from app.runners.child_process import EXTERNAL_SIGNALS, CompletedChild, describe_exit, run_module

# The exit status of a check that exceeded its memory limit.
OUT_OF_MEMORY_STATUS = 4

# Five times the memory needed to check the largest published tokenizers (35 MB).
_BASE_MEMORY = 2 << 30
_MEMORY_PER_BYTE = 32

# Each thread of the library would use address space, which counts against the limit. Without
# RUST_BACKTRACE=0, a panic may print a hundred lines.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
}

# How often a check runs if its process is killed from outside each time.
_MAX_ATTEMPTS = 3

# The Retry-After value in seconds if a check was interrupted or took too long.
_RETRY_AFTER = 10

# The messages that allocators print before they abort the process.
_ALLOCATION_ERRORS = ("memory allocation of", "capacity overflow", "MemoryError")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """The limits of a check.

    memory: the number of bytes in addition to a limit derived from the size of tokenizer.json.
    cpu: the CPU time in seconds, which is the effective limit.
    wall: the wall-clock time in seconds, for an overloaded machine.
    """

    memory: int = _BASE_MEMORY
    cpu: int = 60
    wall: float = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """The message on the stdin of the process.

    parent_pid: the process ID of the parent.
    memory_limit: the number of bytes of address space.
    cpu_limit: the number of seconds of CPU time.
    """

    parent_pid: int
    files: ModelFiles
    memory_limit: int
    cpu_limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResponse:
    """The output of the process. `error` is the message of the AppError raised by the
    check; None if the tokenizer may be used."""

    error: str | None


@dataclass(frozen=True, slots=True)
class _FileStamp:
    """The size and the modification time of a file when it was checked, and the tokens that were
    added to it."""

    size: int
    mtime_ns: int
    added: tuple[AddedToken, ...]


class TokenizerChecker:
    """Checks each tokenizer.json until there is a verdict, and then only after it has changed. A
    check whose process was killed from outside is repeated at once, up to a limit. A check without
    a verdict, whose process crashed, was killed too often or took too long on an overloaded
    machine, is repeated by the next call. Runs on the event loop. `is_trusted` returns whether a
    model is the built-in model, whose tokenizer is not checked."""

    def __init__(
        self, is_trusted: Callable[[ModelFiles], bool], limits: CheckLimits | None = None
    ) -> None:
        self._is_trusted = is_trusted
        self._limits = limits or CheckLimits()
        # Maps paths to the stamp of the checked file and the error (None if it may be used).
        self._verdicts: dict[str, tuple[_FileStamp, str | None]] = {}
        # Keyed by path, because one model may have several names.
        self._locks: dict[str, asyncio.Lock] = {}

    async def check(self, files: ModelFiles) -> None:
        """Raises AppError(MODEL_FILES) for a tokenizer that must not be used. The message gives the
        reason in one line. Raises AppError(OVERLOADED) if the processes for the check were killed
        from outside or took too long, and AppError(ENGINE) if it cannot be started."""
        if self._is_trusted(files):
            return
        path = str(files.tokenizer_path)
        async with self._locks.setdefault(path, asyncio.Lock()):
            identity = _read_stamp(files)
            known, refused = self._verdicts.get(path, (None, None))
            if known != identity:
                refused = await self._run_check(files, identity)
                self._verdicts[path] = (identity, refused)
        if refused is not None:
            raise AppError(ErrorKind.MODEL_FILES, refused)

    async def _run_check(self, files: ModelFiles, stamp: _FileStamp) -> str | None:
        """Runs the check. Returns the verdict: the reason why the tokenizer must not be used, or
        None. Raises AppError if there is no verdict."""
        limits = self._limits
        memory = limits.memory + _MEMORY_PER_BYTE * stamp.size
        question = CheckRequest(
            parent_pid=os.getpid(), files=files, memory_limit=memory, cpu_limit=limits.cpu
        )
        try:
            reply = await _run_process(question, limits.wall)
        except TimeoutError as error:
            # A file that needs much computation exceeds the CPU limit, which is lower.
            what = f"took longer than {limits.wall:g} s"
            raise _retry_error(files, what) from error
        except OSError as error:
            message = (
                f"{files.tokenizer_path}: cannot start a process to check the tokenizer: {error}"
            )
            raise AppError(ErrorKind.ENGINE, message) from error
        if reply.status == 0 and reply.stdout:
            response: CheckResponse = make_decoder(CheckResponse).decode(reply.stdout)
            return response.error
        unusable = f"{files.tokenizer_path} is not a usable tokenizer: checking it "
        if (limit := _find_exceeded_limit(reply, memory, limits.cpu)) is not None:
            return unusable + limit
        if -reply.status in EXTERNAL_SIGNALS:
            raise _retry_error(files, f"failed: its process {describe_exit(reply.status)}")
        reason = reply.reason and f": {reply.reason}"
        message = f"{unusable}fails: its process {describe_exit(reply.status)}{reason}"
        raise AppError(ErrorKind.MODEL_FILES, message)


async def _run_process(request: CheckRequest, seconds: float) -> CompletedChild:
    """Runs the process of a check, and repeats it if it was killed from outside."""
    for _ in range(_MAX_ATTEMPTS - 1):
        reply = await run_module("app.runners.tokenizer_check_main", request, seconds, _ENVIRONMENT)
        if -reply.status not in EXTERNAL_SIGNALS:
            return reply
    return await run_module("app.runners.tokenizer_check_main", request, seconds, _ENVIRONMENT)


def _retry_error(files: ModelFiles, what: str) -> AppError:
    message = f"{files.tokenizer_path}: the check of the tokenizer {what}: try again later"
    return AppError(ErrorKind.OVERLOADED, message, retry_after=_RETRY_AFTER)


def _read_stamp(files: ModelFiles) -> _FileStamp:
    try:
        found = files.tokenizer_path.stat()
    except OSError as error:
        message = f"{files.tokenizer_path} cannot be read: {error.strerror or error}"
        raise AppError(ErrorKind.MODEL_FILES, message) from error
    return _FileStamp(size=found.st_size, mtime_ns=found.st_mtime_ns, added=files.added_tokens)


def _find_exceeded_limit(reply: CompletedChild, memory: int, cpu: int) -> str | None:
    """Returns a clause about the limit that a failed check has exceeded, or None."""
    if reply.status == OUT_OF_MEMORY_STATUS or any(
        sign in reply.reason for sign in _ALLOCATION_ERRORS
    ):
        return f"needs more than {memory >> 20} MiB of memory"
    if reply.status == -signal.SIGXCPU:
        return f"takes more than {cpu} s of CPU time"
    return None
