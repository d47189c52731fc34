"""The keys in force, and their file, which may change while the server runs.

Knows: the file, its permissions, when to look at it again. Must not know: HTTP, formats.

The owner is the event loop; the file is read on a thread, since a disk may take its time.
"""

import asyncio
import logging
import os
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from app.core.errors import AppError, Kind
from app.core.settings import Settings
from app.door.keys import Key, distinct, from_environment, from_file, match

log = logging.getLogger(__name__)

# Seconds. A key that was taken out of the file is refused after as many.
_EVERY = 1.0

# Seconds that requests wait for a disk that does not answer, before they go by the old keys.
_PATIENCE = 1.0

# Bytes: ten thousand keys.
_LARGEST = 4 << 20

# What a change of the file changes. The time of the inode tells of permissions too.
Seen = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a look at the file found. keys: those that it holds, None where it cannot be used and
    `problem` says why. warning: what should be mended and keeps nobody from using it."""

    seen: Seen
    keys: tuple[Key, ...] | None
    problem: str = ""
    warning: str = ""


class Keyring:
    """Whether there are keys at all is decided at the start, for good: no accident to the file
    opens the door."""

    def __init__(self, fixed: tuple[Key, ...] = (), file: Path | None = None) -> None:
        """fixed: keys beside those of the file. Raises AppError(INVALID) if it cannot be used."""
        self._fixed = fixed
        self._file = file
        self._keys = fixed
        self._seen: Seen = ()
        self._look: asyncio.Task[None] | None = None
        self._looked_at = float("-inf")
        if file is not None:
            reading = read(file)
            if reading.keys is None:
                raise AppError(Kind.INVALID, f"--api-keys: {reading.problem}", param="api_keys")
            self._keys = distinct((*fixed, *reading.keys))
            self._note(reading)

    @classmethod
    def of(cls, settings: Settings, environment: MutableMapping[str, str]) -> Self:
        """The keys of the environment, which are taken out of it, and of the file that settings
        name. Raises AppError(INVALID)."""
        file = settings.api_keys
        return cls(from_environment(environment), None if file is None else Path(file))

    @property
    def in_force(self) -> bool:
        return self._file is not None or bool(self._fixed)

    async def match(self, shown: str) -> Key | None:
        """The key that `shown` is, by the file as it was a second ago or later."""
        await self._renew()
        return match(self._keys, shown)

    async def _renew(self) -> None:
        if self._file is None:
            return
        now = asyncio.get_running_loop().time()
        if self._look is None and now - self._looked_at >= _EVERY:
            self._looked_at = now
            self._look = asyncio.create_task(self._look_again(self._file))
        left = self._looked_at + _PATIENCE - now
        if self._look is not None and left > 0:
            # not `wait_for`: one that is cancelled must not cancel it for the others
            await asyncio.wait({self._look}, timeout=left)

    async def _look_again(self, file: Path) -> None:
        try:
            reading = await asyncio.to_thread(reread, file, self._seen)
            if reading is not None:
                self._take(reading)
        finally:
            self._look = None

    def _take(self, reading: Reading) -> None:
        problem = reading.problem
        if reading.keys is not None:
            try:
                self._keys = distinct((*self._fixed, *reading.keys))
            except AppError as error:
                problem = error.message
        self._note(reading)
        if problem:
            log.error("--api-keys: %s; keeping the previous keys", problem)
        else:
            log.info("--api-keys: reloaded %s (%d keys)", self._file, len(self._keys))

    def _note(self, reading: Reading) -> None:
        self._seen = reading.seen
        if reading.warning:
            log.warning("--api-keys: %s", reading.warning)


def reread(file: Path, seen: Seen) -> Reading | None:
    """None if it is as it was."""
    return None if _traits(file) == seen else read(file)


def read(file: Path) -> Reading:
    """Waits for the disk. Whoever may write the file may let anyone in, so it is not used if that
    is somebody else."""
    # before it is read: what is written meanwhile is noticed by the next look
    seen = _traits(file)
    try:
        status = file.stat()
        # a pipe would wait for its writer
        if not stat.S_ISREG(status.st_mode):
            raise AppError(Kind.INVALID, "is not a regular file")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or _replaceable(file):
            raise AppError(Kind.INVALID, f"is writable by other users: chmod 600 {file}")
        if status.st_size > _LARGEST:
            raise AppError(Kind.INVALID, f"is larger than {_LARGEST:,} bytes")
        keys = from_file(file.read_text("utf-8"))
    except AppError as error:
        return Reading(seen=seen, keys=None, problem=f"{file} {error.message}")
    except UnicodeDecodeError:
        return Reading(seen=seen, keys=None, problem=f"{file} is not valid UTF-8")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        return Reading(seen=seen, keys=None, problem=f"{file} cannot be read: {why}")
    readable = status.st_mode & (stat.S_IRGRP | stat.S_IROTH)
    warning = f"{file} is readable by other users: chmod 600 {file}"
    return Reading(seen=seen, keys=keys, warning=warning if readable else "")


def _replaceable(file: Path) -> bool:
    """Whether anyone may put another file in its place."""
    mode = file.resolve().parent.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def _traits(file: Path) -> Seen:
    try:
        status = os.stat(file)
    except OSError as error:
        return (-(error.errno or 1),)
    return (
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_size,
        status.st_ino,
        status.st_dev,
    )
