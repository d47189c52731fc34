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

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.door.keys import ApiKey, find_key, load_env_keys, parse_key_file, require_distinct

log = logging.getLogger(__name__)

# Seconds. A key that was taken out of the file is refused after as many.
_RELOAD_INTERVAL = 1.0

# Seconds that requests wait for a disk that does not answer, before they go by the old keys.
_RELOAD_TIMEOUT = 1.0

# Bytes: ten thousand keys.
_MAX_FILE_BYTES = 4 << 20

# What a change of the file changes. The time of the inode tells of permissions too.
FileStamp = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFileSnapshot:
    """What a look at the file found. keys: those that it holds, None where it cannot be used and
    `error` says why. warning: what should be mended and keeps nobody from using it."""

    stamp: FileStamp
    keys: tuple[ApiKey, ...] | None
    error: str = ""
    warning: str = ""


class Keyring:
    """Whether there are keys at all is decided at the start, for good: no accident to the file
    opens the door."""

    def __init__(self, env_keys: tuple[ApiKey, ...] = (), file: Path | None = None) -> None:
        """env_keys: keys beside those of the file. Raises AppError(INVALID) if it cannot be
        used."""
        self._env_keys = env_keys
        self._file = file
        self._keys = env_keys
        self._stamp: FileStamp = ()
        self._reload_task: asyncio.Task[None] | None = None
        self._reloaded_at = float("-inf")
        if file is not None:
            reading = read_key_file(file)
            if reading.keys is None:
                raise AppError(ErrorKind.INVALID, f"--api-keys: {reading.error}", param="api_keys")
            self._keys = require_distinct((*env_keys, *reading.keys))
            self._remember(reading)

    @classmethod
    def from_settings(cls, settings: Settings, environment: MutableMapping[str, str]) -> Self:
        """The keys of the environment, which are taken out of it, and of the file that settings
        name. Raises AppError(INVALID)."""
        file = settings.api_keys
        return cls(load_env_keys(environment), None if file is None else Path(file))

    @property
    def enabled(self) -> bool:
        return self._file is not None or bool(self._env_keys)

    async def find(self, presented: str) -> ApiKey | None:
        """The key that `presented` is, by the file as it was a second ago or later."""
        await self._reload_if_due()
        return find_key(self._keys, presented)

    async def _reload_if_due(self) -> None:
        if self._file is None:
            return
        now = asyncio.get_running_loop().time()
        if self._reload_task is None and now - self._reloaded_at >= _RELOAD_INTERVAL:
            self._reloaded_at = now
            self._reload_task = asyncio.create_task(self._reload(self._file))
        left = self._reloaded_at + _RELOAD_TIMEOUT - now
        if self._reload_task is not None and left > 0:
            # not `wait_for`: one that is cancelled must not cancel it for the others
            await asyncio.wait({self._reload_task}, timeout=left)

    async def _reload(self, file: Path) -> None:
        try:
            reading = await asyncio.to_thread(read_if_changed, file, self._stamp)
            if reading is not None:
                self._apply(reading)
        finally:
            self._reload_task = None

    def _apply(self, reading: KeyFileSnapshot) -> None:
        problem = reading.error
        if reading.keys is not None:
            try:
                self._keys = require_distinct((*self._env_keys, *reading.keys))
            except AppError as error:
                problem = error.message
        self._remember(reading)
        if problem:
            log.error("--api-keys: %s; keeping the previous keys", problem)
        else:
            log.info("--api-keys: reloaded %s (%d keys)", self._file, len(self._keys))

    def _remember(self, reading: KeyFileSnapshot) -> None:
        self._stamp = reading.stamp
        if reading.warning:
            log.warning("--api-keys: %s", reading.warning)


def read_if_changed(file: Path, stamp: FileStamp) -> KeyFileSnapshot | None:
    """None if it is as it was."""
    return None if _stat_stamp(file) == stamp else read_key_file(file)


def read_key_file(file: Path) -> KeyFileSnapshot:
    """Waits for the disk. Whoever may write the file may let anyone in, so it is not used if that
    is somebody else."""
    # before it is read: what is written meanwhile is noticed by the next look
    seen = _stat_stamp(file)
    try:
        status = file.stat()
        # a pipe would wait for its writer
        if not stat.S_ISREG(status.st_mode):
            raise AppError(ErrorKind.INVALID, "is not a regular file")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or _is_replaceable(file):
            raise AppError(ErrorKind.INVALID, f"is writable by other users: chmod 600 {file}")
        if status.st_size > _MAX_FILE_BYTES:
            raise AppError(ErrorKind.INVALID, f"is larger than {_MAX_FILE_BYTES:,} bytes")
        keys = parse_key_file(file.read_text("utf-8"))
    except AppError as error:
        return KeyFileSnapshot(stamp=seen, keys=None, error=f"{file} {error.message}")
    except UnicodeDecodeError:
        return KeyFileSnapshot(stamp=seen, keys=None, error=f"{file} is not valid UTF-8")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        return KeyFileSnapshot(stamp=seen, keys=None, error=f"{file} cannot be read: {why}")
    readable = status.st_mode & (stat.S_IRGRP | stat.S_IROTH)
    warning = f"{file} is readable by other users: chmod 600 {file}"
    return KeyFileSnapshot(stamp=seen, keys=keys, warning=warning if readable else "")


def _is_replaceable(file: Path) -> bool:
    """Whether anyone may put another file in its place."""
    mode = file.resolve().parent.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def _stat_stamp(file: Path) -> FileStamp:
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
