"""Decodes images in a separate process, one at a time, in turn for all callers.

Knows: the process, its limits and its messages, recent results. Must not know: codecs, requests,
models.

A codec that crashes, hangs or needs too much memory affects one image, not the server. All code
runs on the event loop.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.core.errors import AppError, ErrorKind
from app.core.images import Image, ImagePixels, Pixels
from app.images.decoder_protocol import (
    OUT_OF_MEMORY_STATUS,
    PREFIX,
    DecodeLimits,
    encode_message,
    pack_tiles,
)
from app.images.input import invalid_image
from app.images.plan import ImagePlan

log = logging.getLogger(__name__)

_MODULE = "app.images.decoder_main"

# the directory of the package `app`
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]

# The environment variables that a Python process may need. Others, such as keys, are not passed.
_PASSED_VARIABLES = (
    "DYLD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "PYTHONHOME",
    "PYTHONPATH",
)

# Signals that other processes send; see app/runners/child_process.py.
_EXTERNAL_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)

# The number of images whose result (decoded, or the reason for the failure) is kept.
_MAX_OUTCOMES = 4096

# The maximum size of the pixels that are kept for the next request with the same image.
_CACHE_BYTES = 64 << 20

# The number of seconds after which the process is ended if no caller waits for the image that it
# decodes. Typical images take less, and the start of a process takes a third.
_ABANDONED_AFTER = 1.0

# the Retry-After value in seconds, if the process was killed from outside or took too long
_RETRY_AFTER = 10


@dataclass(eq=False, slots=True)
class _Work:
    """An image that one or more callers wait for."""

    key: bytes
    image: Image
    plan: ImagePlan
    result: asyncio.Future[ImagePixels]
    waiters: int = 0


@dataclass(slots=True)
class _ChildExit(Exception):
    """The process ended while it decoded an image."""

    status: int


@dataclass(slots=True)
class _Child:
    """A process, and the number of images that it was given."""

    process: Process
    num_images: int = 0


@dataclass(slots=True)
class _FairQueue:
    """Work in the order of arrival for each caller, and in turn for the callers."""

    by_caller: dict[str, deque[_Work]] = field(default_factory=dict[str, deque[_Work]])

    def add(self, caller: str, work: _Work) -> None:
        self.by_caller.setdefault(caller, deque()).append(work)

    def pop(self) -> _Work | None:
        for caller in list(self.by_caller):
            queue = self.by_caller.pop(caller)
            work = queue.popleft() if queue else None
            if queue:  # the caller's next turn is after all others
                self.by_caller[caller] = queue
            if work is not None:
                return work
        return None


class ImageDecoder:
    """Decodes images. The process starts with the first image, and stays for the next ones."""

    def __init__(
        self, limits: DecodeLimits | None = None, *, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        self._limits = limits or DecodeLimits()
        self._queue = _FairQueue()
        self._works: dict[bytes, _Work] = {}
        self._current: _Work | None = None
        self._runner: asyncio.Task[None] | None = None
        self._child: _Child | None = None
        # The digest of a damaged file, or the key of an image in one geometry → None if it was
        # decoded before, or the reason why it cannot be decoded. Another geometry may need less
        # memory.
        self._outcomes: OrderedDict[bytes, str | None] = OrderedDict()
        self._cache: OrderedDict[bytes, ImagePixels] = OrderedDict()
        self._cache_bytes, self._max_cache_bytes = 0, cache_bytes
        self._closed = False

    async def verify(self, image: Image, plan: ImagePlan, *, caller: str = "") -> None:
        """Decodes an image unless it was decoded before. Raises the errors of `decode`."""
        key = plan.key(image)
        if key not in self._outcomes or self._outcomes[key] is not None:
            await self.decode(image, plan, caller=caller)

    async def decode(self, image: Image, plan: ImagePlan, *, caller: str = "") -> ImagePixels:
        """Returns the pixels of the plan's tiles. caller: the name of the API key, for fairness.

        Raises AppError(INVALID) for an image that cannot be decoded, AppError(OVERLOADED) if the
        machine is too busy, and AppError(ENGINE) if the process cannot be started."""
        if self._closed:
            raise _stopping_error()
        key = plan.key(image)
        self._raise_known_error(image, key)
        if (pixels := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return pixels
        work = self._works.get(key)
        if work is None:
            future: asyncio.Future[ImagePixels] = asyncio.get_running_loop().create_future()
            work = self._works[key] = _Work(key, image, plan, future)
            self._queue.add(caller, work)
            if self._runner is None:
                self._runner = asyncio.create_task(self._run())
        work.waiters += 1
        try:
            return await asyncio.shield(work.result)
        except _BadImage as error:  # the path is this request's
            raise invalid_image(image.param, str(error)) from error
        finally:
            work.waiters -= 1
            if not (work.waiters or work.result.done()):
                loop = asyncio.get_running_loop()
                loop.call_later(_ABANDONED_AFTER, self._end_abandoned, work)

    async def close(self) -> None:
        """Fails all waiting calls and ends the process."""
        self._closed = True
        runner = self._runner
        if runner is not None:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
        for work in self._works.values():
            self._fail(work, _stopping_error())
        self._works.clear()
        await self._stop_child()

    def _end_abandoned(self, work: _Work) -> None:
        """Ends the process if it decodes this image, and no caller waits for it."""
        if self._current is work and not work.waiters and self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.process.kill()

    def _raise_known_error(self, image: Image, key: bytes) -> None:
        for known in (image.digest, key):
            reason = self._outcomes.get(known)
            if reason is not None:
                self._outcomes.move_to_end(known)
                raise invalid_image(image.param, reason)

    async def _run(self) -> None:
        """Decodes all waiting images. This task is the only user of the process."""
        try:
            while (work := self._queue.pop()) is not None:
                if work.waiters == 0:  # all callers were cancelled before their turn
                    del self._works[work.key]
                    continue
                self._current = work
                try:
                    self._finish(work, await self._decode(work))
                except Exception as error:
                    self._fail(work, error)
                self._current = None
                del self._works[work.key]
        finally:
            self._runner = self._current = None

    def _finish(self, work: _Work, pixels: ImagePixels) -> None:
        self._record(work.key, None)
        self._cache[work.key] = pixels
        self._cache_bytes += _count_bytes(pixels)
        while self._cache_bytes > self._max_cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._cache_bytes -= _count_bytes(oldest)
        work.result.set_result(pixels)

    def _fail(self, work: _Work, error: Exception) -> None:
        if isinstance(error, _BadImage):
            self._record(work.image.digest if error.damaged else work.key, str(error))
        if not work.result.done():
            work.result.set_exception(error)
            work.result.exception()  # all callers may have been cancelled

    def _record(self, key: bytes, reason: str | None) -> None:
        self._outcomes[key] = reason
        self._outcomes.move_to_end(key)
        if len(self._outcomes) > _MAX_OUTCOMES:
            self._outcomes.popitem(last=False)

    async def _decode(self, work: _Work) -> ImagePixels:
        """Decodes one image, again if the process was killed from outside. Raises AppError, and
        _BadImage."""
        for attempt in range(2):
            try:
                async with asyncio.timeout(self._limits.wall):
                    return await self._exchange(await self._get_child(), work)
            except TimeoutError as error:
                await self._stop_child()
                raise AppError(
                    ErrorKind.OVERLOADED,
                    f"decoding an image took longer than {self._limits.wall:g} s: try again later",
                    retry_after=_RETRY_AFTER,
                ) from error
            except _ChildExit as error:
                await self._stop_child()
                reason = self._explain_exit(error.status)
                if reason is not None:
                    log.warning("decoding an image failed: the process %s", reason)
                    message = f"the image cannot be decoded: decoding it {reason}"
                    raise _BadImage(message, damaged=False) from error
                if not work.waiters:
                    break
                log.warning("the process that decodes images was killed, attempt %d", attempt + 1)
            except _BadImage:
                raise
            except BaseException:  # cancelled between a request and its response
                await self._stop_child()
                raise
        raise AppError(
            ErrorKind.OVERLOADED,
            "the process that decodes images was killed: try again later",
            retry_after=_RETRY_AFTER,
        )

    def _explain_exit(self, status: int) -> str | None:
        """Returns a clause if the image ended the process; None if another process did."""
        if status == OUT_OF_MEMORY_STATUS:
            return f"needs more than {self._limits.memory >> 20} MiB of memory"
        if status == -signal.SIGXCPU:
            return f"takes more than {self._limits.cpu} s of CPU time"
        if -status in _EXTERNAL_SIGNALS:
            return None
        return f"crashes the decoder ({_name_status(status)})"

    async def _exchange(self, child: _Child, work: _Work) -> ImagePixels:
        child.num_images += 1
        request = encode_message({"tiles": pack_tiles(work.plan.tiles)}, work.image.data)
        header, data = await _ask(child.process, request)
        if child.num_images >= self._limits.images:
            await self._stop_child()
        if "error" in header:
            raise _BadImage(header["error"], damaged=True)
        tiles: list[Pixels] = []
        at = 0
        for height, width in header["sizes"]:
            end = at + height * width * 3
            tiles.append(Pixels(height=height, width=width, data=data[at:end]))
            at = end
        return ImagePixels(key=work.key, tiles=tuple(tiles))

    async def _get_child(self) -> _Child:
        if self._child is None:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    _MODULE,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=DEVNULL,
                    env=_make_environment(),
                    process_group=0,  # Ctrl-C at the terminal reaches only the parent
                )
            except OSError as error:
                raise _start_error(str(error)) from error
            self._child = _Child(process)
            limits = asdict(self._limits)
            try:
                await _ask(process, encode_message(limits))
            except _ChildExit as error:
                await self._stop_child()
                raise _start_error(_name_status(error.status)) from error
        return self._child

    async def _stop_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        await child.process.wait()


class _BadImage(Exception):
    """An image that cannot be decoded. The message is a clause with a remedy. damaged: whether it
    cannot be decoded in any geometry."""

    def __init__(self, message: str, *, damaged: bool) -> None:
        super().__init__(message)
        self.damaged = damaged


async def _ask(process: Process, request: bytes) -> tuple[dict[str, Any], bytes]:
    """Sends a message and returns the response. Raises _ChildExit if the process ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        await process.stdin.drain()
        prefix = await process.stdout.readexactly(PREFIX.size)
        json_length, data_length = PREFIX.unpack(prefix)
        header: dict[str, Any] = json.loads(await process.stdout.readexactly(json_length))
        return header, await process.stdout.readexactly(data_length)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise _ChildExit(await process.wait()) from error


def _make_environment() -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    known = passed.get("PYTHONPATH")
    root = str(_PACKAGE_ROOT)
    return {**passed, "PYTHONPATH": f"{root}{os.pathsep}{known}" if known else root}


def _start_error(reason: str) -> AppError:
    message = f"the process that decodes images cannot be started: {reason}"
    return AppError(ErrorKind.ENGINE, message)


def _stopping_error() -> AppError:
    return AppError(ErrorKind.STOPPING, "the server is shutting down")


def _name_status(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
    return f"exit status {status}"


def _count_bytes(pixels: ImagePixels) -> int:
    return sum(len(tile.data) for tile in pixels.tiles)
