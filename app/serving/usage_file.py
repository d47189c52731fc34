"""Keeps the tokens that each API key has used today in a file, so that a restart does not reset
daily limits.

Knows: the file and its format. Must not know: how usage is counted and limited.

The file is written every few seconds while counts change, and at the shutdown. A crash loses the
tokens of the last few seconds. Counters that only appear in metrics start at zero, like those of
other programs.
"""

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from app.core.usage import DailyTokens, UsageCounters

log = logging.getLogger(__name__)

_WRITE_INTERVAL = 5.0  # in seconds

# ten thousand keys take less; a larger file was not written by this module
_MAX_FILE_BYTES = 4 << 20


def name_usage_file(folder: Path, key_file: str, port: int) -> Path:
    """Returns the path for a server. Servers with different keys or ports count separately."""
    digest = hashlib.sha256(os.fsencode(Path(key_file).absolute())).hexdigest()
    return folder / f"usage-{port}-{digest[:16]}.json"


class UsageFile:
    """The file of one server. Use it on the event loop; the disk is used on threads."""

    def __init__(self, path: Path, usage: UsageCounters) -> None:
        self._path = path
        self._usage = usage
        self._written: Mapping[str, DailyTokens] = {}
        self._failed = False

    @asynccontextmanager
    async def keep(self) -> AsyncGenerator[None]:
        """Reads the counts, and writes them while the context is entered and when it exits."""
        self._written = await asyncio.to_thread(_read, self._path)
        self._usage.restore_daily_tokens(self._written)
        writing = asyncio.create_task(self._write_regularly())
        try:
            yield
        finally:
            writing.cancel()
            with suppress(asyncio.CancelledError):
                await writing
            await self._write()

    async def _write_regularly(self) -> None:
        while True:
            await asyncio.sleep(_WRITE_INTERVAL)
            await self._write()

    async def _write(self) -> None:
        counts = self._usage.get_daily_tokens()
        if counts == self._written:
            return
        try:
            await asyncio.to_thread(_write, self._path, counts)
        except OSError as error:
            if not self._failed:  # once; a full disk is not reported every few seconds
                why = error.strerror or error
                log.warning(
                    "daily token counts of API keys cannot be saved: %s: %s", self._path, why
                )
            self._failed = True
        else:
            self._written, self._failed = counts, False


def _read(path: Path) -> Mapping[str, DailyTokens]:
    """Returns the counts by caller; empty if there is no file, or one that cannot be used."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_FILE_BYTES))
        return {
            str(name): DailyTokens(day=_as_count(day), tokens=_as_count(tokens))
            for name, (day, tokens) in content["daily_tokens"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warning("daily token counts of API keys start at zero: %s is invalid: %r", path, error)
        return {}


def _as_count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _write(path: Path, counts: Mapping[str, DailyTokens]) -> None:
    """Replaces the file in one step, so that a reader finds the old or the new one."""
    content = {"daily_tokens": {name: [one.day, one.tokens] for name, one in counts.items()}}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
