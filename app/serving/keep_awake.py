"""Keeps a Mac from going to idle sleep while requests run.

Knows: the number of running requests, the program caffeinate. Must not know: the events of
requests, the engine.

macOS sleeps after some idle minutes although a request is being answered. `caffeinate -i` prevents
this until it ends, and `-w` ends it with the server, even after a crash. The display may still
sleep, and so does a laptop whose lid is closed. Not run on a Mac: the tests use a stand-in.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, Sequence

from app.core.embeddings import Embeddings, EmbedRequest
from app.core.events import Event
from app.core.requests import GenerateRequest
from app.core.settings import Settings

log = logging.getLogger(__name__)

_CAFFEINATE = "/usr/bin/caffeinate"

# The number of seconds without requests after which the Mac may sleep again. Chats and agents send
# the next request soon, and each start of the program costs a few milliseconds.
_LINGER = 30.0


def create_keep_awake(settings: Settings, *, system: str = sys.platform) -> "KeepAwake | None":
    """Returns None if the option is off, and on other systems."""
    if system != "darwin" or not settings.keep_awake:
        return None
    return KeepAwake([_CAFFEINATE, "-i", "-w", str(os.getpid())])


class KeepAwake:
    """Runs a program while there are requests. command: the program and its arguments. linger: the
    number of seconds that it runs after the last request."""

    def __init__(self, command: Sequence[str], *, linger: float = _LINGER) -> None:
        self._command = command
        self._linger = linger
        self._running = 0
        self._closed = False
        self._changed = asyncio.Event()

    def observe(self, request: GenerateRequest | EmbedRequest) -> "_RunningRequest":
        self._add(1)
        return _RunningRequest(self)

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Runs the program during requests until the context ends. The program has exited then."""
        task = asyncio.create_task(self._supervise())
        try:
            yield
        finally:
            # A cancelled task would not wait for the exit of the program.
            self._closed = True
            self._changed.set()
            await task

    def end_request(self) -> None:
        self._add(-1)

    @property
    def _must_run(self) -> bool:
        return self._running > 0 and not self._closed

    def _add(self, count: int) -> None:
        self._running += count
        self._changed.set()

    async def _supervise(self) -> None:
        while not self._closed:
            await self._wait_for_change()
            if self._must_run and not await self._keep_awake_once():
                return

    async def _keep_awake_once(self) -> bool:
        """Runs the program until there are no requests for a while. Returns whether it could be
        started."""
        null = asyncio.subprocess.DEVNULL
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command, stdin=null, stdout=null, stderr=null
            )
        except OSError as error:
            log.warning("the machine may sleep during a response: %s", error)
            return False
        try:
            while self._must_run or await self._is_request_coming():
                await self._wait_for_change()
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.terminate()
            await child.wait()
        return True

    async def _is_request_coming(self) -> bool:
        """Waits for the next request. Returns False if there is none for a while, or at the end."""
        try:
            async with asyncio.timeout(self._linger):
                while not self._running and not self._closed:
                    await self._wait_for_change()
        except TimeoutError:
            return False
        # `_wait_for_change` must return at once
        self._changed.set()
        return self._must_run

    async def _wait_for_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()


class _RunningRequest:
    """Counts one request until it ends."""

    def __init__(self, counter: KeepAwake) -> None:
        self._counter = counter

    def on_event(self, event: Event) -> None:
        pass

    def on_embeddings(self, found: Embeddings) -> None:
        pass

    def on_error(self, error: Exception) -> None:
        pass

    def on_end(self, *, complete: bool) -> None:
        self._counter.end_request()
