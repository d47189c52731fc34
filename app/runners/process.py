"""A runner whose engine lives in a process of its own.

Knows: the process, the line to it, the desk, the vigil. Must not know: tensors, text, how the
process does what it is asked. Nothing is evaluated here; token ids, numbers and words cross.

One task owns the process from its beginning to its end: `_live`. However that end comes, everybody
who waits for something is told by the desk, and everything that was opened is closed.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import assert_never

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.jobs import Job, Step
from app.core.messages import Failed, Heartbeat, Ready
from app.core.ports import RunnerLoss, RunnerStatus
from app.core.settings import Settings
from app.runners import wire
from app.runners.desk import STOPPED, Desk, Waiting
from app.runners.restarts import CRASHED
from app.runners.spawned import Ending, Spawned
from app.runners.vigil import Vigil
from app.runners.wire import Joiner, MoreScores, News, Opening, Status

log = logging.getLogger(__name__)

Ask = Callable[[], Awaitable[Status]]
OpenNews = Callable[[], AbstractAsyncContextManager[AsyncIterator[News]]]

# seconds between two looks at a model that is being loaded
_POLL = 0.1

# seconds that a process may take to begin: a second or two, on a machine that is not very busy
_BEGINNING = 30.0

# seconds between two probes of the way that jobs take, at most, and while that way is broken
_PROBE, _PROBE_AGAIN = 5.0, 1.0

# Probes in a row that time out before the process counts as hung, each after `watchdog` seconds:
# this process may have been stopped while the first one waited, and what hangs in the engine is
# reported by its heartbeats before that.
_MISSED = 2

# seconds that a process which has hung up may take to end
_DYING = 2.0


class ProcessRunner:
    """settings: those that the engine reads, watchdog and load_timeout."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._desk = Desk()
        self._spawned: Spawned | None = None
        self._life: asyncio.Task[None] | None = None
        self._stall: str | None = None
        self._unreachable: str | None = None
        self._stopping = False

    async def start(self, files: ModelFiles) -> None:
        assert self._life is None, "a runner is started once"
        self._life = asyncio.create_task(self._live(files))
        try:
            await self._desk.ready()
        except BaseException:
            self._stopping = True
            if self._spawned is not None:
                self._spawned.kill()
            await asyncio.wait({self._life})
            raise

    def submit(self, job: Job) -> AbstractAsyncContextManager[Waiting]:
        return self._desk.submit(job)

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        return await self._desk.embed(job)

    def status(self) -> RunnerStatus:
        status, spawned = self._desk.status(), self._spawned
        if spawned is None or not spawned.alive:
            return status
        stall = self._stall or self._unreachable
        if stall is not None and status.state == "ready":
            return replace(status, state="stalled", error=stall, pid=spawned.pid)
        return replace(status, pid=spawned.pid)

    async def lost(self) -> RunnerLoss:
        return await self._desk.lost()

    async def stop(self) -> None:
        self._stopping = True
        self._desk.close(AppError(Kind.STOPPING, "the engine was stopped"), told=STOPPED)
        if self._spawned is not None:
            await self._spawned.end()
        if self._life is not None:
            await asyncio.wait({self._life})

    async def _live(self, files: ModelFiles) -> None:
        """The process, from its beginning to its end."""
        secret = secrets.token_urlsafe(32)
        try:
            self._spawned = await Spawned.begin(files.name, self._opening(files, secret))
            if self._stopping:
                self._spawned.kill()
            await self._accompany(files.name, secret, self._spawned)
        except Exception as error:
            if not isinstance(error, OSError):  # which the machine has to answer for
                log.exception("%s: managing its process failed", files.name)
            message = f"the process of {files.name} could not be started: {error}"
            self._desk.lose(AppError(Kind.ENGINE, message))
            if self._spawned is not None:
                self._spawned.kill()
                await self._spawned.gone()

    def _opening(self, files: ModelFiles, secret: str) -> Callable[[int], bytes]:
        def opening(socket: int) -> bytes:
            return wire.OPENING.encode(
                Opening(
                    parent=os.getpid(),
                    socket=socket,
                    secret=secret,
                    settings=self._settings,
                    files=files,
                )
            )

        return opening

    async def _accompany(self, name: str, secret: str, spawned: Spawned) -> None:
        # imported while the process does the same with what it needs
        from app.runners.line import Line

        line = self._desk.engine = Line(spawned.port, secret, self._desk)
        interval = wire.beat_interval(self._settings)
        vigil = Vigil(watchdog=self._settings.watchdog, interval=interval)
        gone = asyncio.create_task(spawned.gone())
        talking = asyncio.create_task(self._talk(name, line.status, line.news, vigil))
        watching = asyncio.create_task(self._watch(vigil, interval))
        broken = asyncio.create_task(line.hung_up())
        probing = asyncio.create_task(self._probe(name, line.probe))
        work = {talking, watching, broken, probing}
        try:
            await asyncio.wait({gone, *work}, return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping:
                # it has hung up, and may be about to say why
                await asyncio.wait({gone}, timeout=_DYING)
                if not gone.done():
                    self._give_up_silent(name, spawned.said)
            self._bury(name, await gone)
            # it closes its connections, which it would not to the last where it is cancelled
            await asyncio.wait({talking}, timeout=_DYING)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await line.close()

    def _bury(self, name: str, ending: Ending) -> None:
        """The process has ended; if nobody knows better, that is what it was."""
        how, said = ending.how, f": {ending.said}" if ending.said else ""
        if self._desk.status().state == "loading":
            message = f"{name} could not be loaded: its process {how}{said}"
            self._desk.lose(AppError(Kind.MODEL_FILES, message, code=CRASHED))
            return
        error = AppError(Kind.ENGINE, f"the process of {name} {how}{said}")
        told = f"the engine stopped: its process {how}"
        self._desk.lose(error, told=told, cause=ending.cause)

    async def _talk(self, name: str, status: Ask, open_news: OpenNews, vigil: Vigil) -> None:
        """Returns when there is nothing more to be heard."""
        try:
            ready = await self._loaded(name, status)
            if ready is None:
                return
            vigil.heard()  # from here on, silence is a hang
            async with open_news() as news:
                self._desk.receive(ready)
                await self._listen(news, vigil)
        except ConnectionError as error:
            log.debug("%s: %s", name, error)
        except Exception:
            log.exception("%s: cannot decode a message from its process", name)
            self._give_up(
                AppError(
                    Kind.ENGINE, f"the process of {name} sent a message that cannot be decoded"
                )
            )

    async def _loaded(self, name: str, status: Ask) -> Ready | None:
        """Looks until the model is there; None when the desk knows that it will not be. A process
        that does not even answer any more is stuck, or stopped, and nothing to be patient with."""
        last, limit = None, self._settings.load_timeout
        now = asyncio.get_running_loop().time
        moved = now()

        async def look() -> wire.Status:
            silence = self._settings.watchdog
            async with asyncio.timeout(silence if last else max(silence, _BEGINNING)):
                return await status()

        try:
            async with asyncio.timeout(limit) as patience:
                while not isinstance(state := (await look()).State, Ready):
                    self._desk.receive(state)
                    if isinstance(state, Failed):
                        self._give_up(AppError(state.kind, state.message))
                        return None
                    if state != last:
                        last, moved = state, now()
                        patience.reschedule(moved + limit)
                    await asyncio.sleep(_POLL)
                return state
        except TimeoutError:
            progress = self._desk.status().progress
            still = now() - moved
            message = f"{name} could not be loaded: no progress for {still:.0f} s at {progress} %"
            self._give_up(AppError(Kind.MODEL_FILES, message))
            return None

    async def _listen(self, news: AsyncIterator[News], vigil: Vigil) -> None:
        joiner = Joiner()
        async for one in news:
            vigil.heard()
            match one:
                case Step():
                    self._desk.receive(joiner.joined(one))
                case MoreScores():
                    joiner.hold(one)
                case Heartbeat():
                    vigil.beat(one)
                case Failed():
                    self._desk.receive(one)
                    self._give_up(AppError(one.kind, one.message))
                    return
                case _:
                    assert_never(one)

    async def _watch(self, vigil: Vigil, interval: float) -> None:
        """Returns when the process hangs."""
        while True:
            await asyncio.sleep(interval)
            if (stall := vigil.look()) is not None:
                break
        self._stall = stall
        self._give_up(AppError(Kind.ENGINE, stall))

    async def _probe(self, name: str, probe: Callable[[], Awaitable[None]]) -> None:
        """Sees that jobs can reach the engine: heartbeats come another way. Returns when it takes
        no commands for too long. A way that is broken on this side, say for lack of descriptors, is
        no fault of the process, which may be answering others."""
        await self._desk.ready()
        limit, missed = self._settings.watchdog, 0
        while missed < _MISSED:
            try:
                async with asyncio.timeout(limit):
                    await probe()
                missed, self._unreachable = 0, None
                await asyncio.sleep(min(_PROBE, limit / 4))
            except ConnectionError as error:
                self._unreachable = f"the process of {name} cannot be reached: {error}"
                await asyncio.sleep(_PROBE_AGAIN)
            except TimeoutError:
                missed += 1
        self._stall = f"the process of {name} has accepted no requests for {missed * limit:.0f} s"
        self._give_up(AppError(Kind.ENGINE, self._stall))

    def _give_up_silent(self, name: str, said: str) -> None:
        message = f"the process of {name} closed its connection and did not exit"
        error = AppError(Kind.ENGINE, f"{message}: {said}" if said else message)
        self._give_up(error, told="the engine stopped: its process closed its connection")

    def _give_up(self, error: AppError, *, told: str | None = None) -> None:
        """The process is there and good for nothing. told: as `Desk.lose` has it."""
        assert self._spawned is not None
        self._desk.lose(error, told=told)
        self._spawned.kill()
