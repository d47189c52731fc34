"""The composition root: settings in, a running server out.

Knows: every room, and how they are plugged together. Must not know: anything that they do.
"""

import asyncio
import contextlib
import logging
import math
import os
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from app.api.app import build_app
from app.catalogue import Catalogue, Entry, named
from app.commands.obtain import obtain
from app.core.allocator import keep_heap_small
from app.core.errors import AppError, Kind
from app.core.loop_lag import LoopLag
from app.core.ports import Runner
from app.core.settings import ModelSettings, Settings
from app.core.traffic import Traffic
from app.core.watched import Watched
from app.core.workers import Workers
from app.door.address import check_address
from app.door.draining import Server
from app.door.entrance import protocol
from app.door.exposure import check_door
from app.door.hall import Hall
from app.door.keyring import Keyring
from app.door.notices import Notices
from app.engine.describe import complete
from app.front import Front
from app.limits import Limited
from app.loop_monitor import LoopMonitor
from app.runners.needs import need
from app.runners.pool import Pool
from app.runners.ranks.launch import Launch, launched, together, when_launcher_ends
from app.runners.scratch import private_scratch
from app.runners.tokenizer_trial import TokenizerTrials
from app.store import is_builtin
from app.tracing import tracing_of

log = logging.getLogger(__name__)

# Building a decode step holds the interpreter for milliseconds at a time, and so does reading a
# long request, or a template that never ends; at Python's default of 5 ms the event loop gets each
# token that much later (DECISIONS.md, 2026-11-21).
_SWITCH_INTERVAL = 0.0005

# Connections that are accepted in one turn of the event loop, which asyncio makes one with those
# that may wait to be: with uvicorn's 2048, opening 1200 held everybody else up for a second.
_BACKLOG = 128

# Seconds that a connection may wait for its next request; at the bound of connections the idle give
# way. Clients that keep theirs for longer than we do lose a request now and then: httpx has the
# same 5 s as uvicorn, nginx 60.
_KEEP_ALIVE = 75


def serve(settings: Settings) -> int:
    """Serve until told to stop; the exit status. Raises AppError for what is not there, or would
    not be safe."""
    launch = launched(os.environ)
    if launch is not None:
        settings = together(settings)
        if launch.rank > 0:
            return _follow(launch, settings)
    keyring, warnings = check_door(settings, os.environ)
    for warning in warnings:
        log.warning("%s", warning)
    check_address(settings.host, settings.port)
    entries = [_entry(model, settings) for model in settings.models or (None,)]
    others: _Others | None = None
    if launch is None:
        make = _maker(settings)
    else:
        entries = [_lasting(entry) for entry in entries]
        make, others = _assembled(launch, entries[0])
    if launch is None and settings.runner != "thread":
        keep_heap_small()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    return _Serving(settings, entries, keyring, make, others).run()


class _Serving:
    """A server from its beginning to its end. make: what runs a model. others: ranks that compute
    with this one."""

    def __init__(
        self,
        settings: Settings,
        entries: Sequence[Entry],
        keyring: Keyring,
        make: Callable[[Settings], Runner],
        others: "_Others | None",
    ) -> None:
        self._settings = settings
        self._others = others
        self._failure: AppError | None = None
        self._notices = Notices.of(os.environ, os.getpid())
        self._tracing = tracing_of(settings)
        catalogue = Catalogue(entries, settings)
        self._pool = Pool(
            make,
            catalogue.files,
            need if settings.several else None,
            total=settings.memory,
            max_loaded=settings.max_loaded,
        )
        preload = _preloaded(entries, settings)
        workers, lag = Workers(), LoopLag()
        self._monitor = LoopMonitor(lag, watchdog=settings.watchdog)
        self._front = Front(
            catalogue,
            self._pool,
            preload,
            workers,
            load_wait=settings.load_wait,
            check_tokenizer=TokenizerTrials(is_builtin).check,
        )
        limited = Limited(self._front, settings)
        watch = None if self._tracing is None else self._tracing.watch
        generate = limited if watch is None else Watched(limited, watch)
        traffic = Traffic()
        app = build_app(
            generate,
            settings,
            lifespan=self._lifespan,
            keyring=keyring,
            traffic=traffic,
            workers=workers,
            lag=lag,
        )
        hall = Hall(settings, traffic)
        self._server = Server(_uvicorn(app, settings, hall), limited, settings, hall)

    def run(self) -> int:
        """The exit status; raises AppError for what ended it too early."""
        if self._others is not None:
            self._others.when_lost(lambda why: self._give_up(AppError(Kind.ENGINE, why)))
            when_launcher_ends(os.environ, self._leave)
        # uvicorn raises the signal again once it has shut down, and exits where it cannot bind,
        # which it has logged by then
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            self._server.run()
        if self._failure is not None:
            raise self._failure
        return 0 if self._server.started else 1

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        await self._pool.start()
        # not awaited: /v1/status tells the progress while models load
        loading = asyncio.create_task(self._load())
        async with (
            self._monitor.watching(),
            self._notices.about(self._server, self._settings.drain),
        ):
            yield
        await self._pool.stop()
        await asyncio.gather(loading, return_exceptions=True)
        if self._others is not None:
            self._others.dismiss()
        if self._tracing is not None:
            await self._tracing.stop()

    async def _load(self) -> None:
        """A server whose one model cannot be loaded is of no use to anybody."""
        try:
            await self._front.start()
        except Exception as error:
            if not isinstance(error, AppError):
                log.exception("internal error while loading models")
                error = AppError(Kind.ENGINE, f"models could not be loaded: {error}")
            if error.kind is Kind.STOPPING:
                return
            if self._settings.several:
                log.error("%s", error.message)
                return
            self._give_up(error)

    def _give_up(self, why: AppError) -> None:
        self._failure = self._failure or why
        self._leave()

    def _leave(self) -> None:
        self._server.should_exit = True


def _entry(model: ModelSettings | None, settings: Settings) -> Entry:
    """Found, and downloaded first where somebody wants that."""
    own = settings if model is None else settings.of(model)
    files = complete(obtain(own))
    if own.context is not None and own.context > files.context_length:
        log.warning(
            "--context %d exceeds the context length of %s, which is %d",
            own.context,
            files.name,
            files.context_length,
        )
    return named(model, files, settings)


def _preloaded(entries: Sequence[Entry], settings: Settings) -> list[str]:
    """Those that were marked so or are to stay for ever, else the first."""
    marked = {n for n, model in enumerate(settings.models) if model.preload or model.pinned}
    return [entry.served.name for n, entry in enumerate(entries) if n in (marked or {0})]


def _lasting(entry: Entry) -> Entry:
    """One that ranks load together is loaded once."""
    return replace(entry, served=replace(entry.served, keep_alive=math.inf, pinned=True))


class _Others(Protocol):
    """The other ranks."""

    def when_lost(self, listener: Callable[[str], None]) -> None: ...

    def dismiss(self) -> None: ...


def _assembled(launch: Launch, entry: Entry) -> tuple[Callable[[Settings], Runner], _Others]:
    """Rank 0 has its engine here: what ranks compute together is begun by one process each."""
    from app.runners.local import LocalRunner
    from app.runners.ranks.crew import assemble

    os.environ.update(private_scratch())
    crew = assemble(launch, entry.files, entry.served.settings)
    return partial(LocalRunner, crew=crew), crew


def _follow(launch: Launch, settings: Settings) -> int:
    """What a rank does that serves nobody."""
    from app.runners.ranks.follow import follow

    os.environ.update(private_scratch())
    [model] = settings.models or (None,)
    entry = _entry(model, settings)
    return follow(launch, entry.files, entry.served.settings)


def _maker(settings: Settings) -> Callable[[Settings], Runner]:
    """Only one of the two is imported: the engine takes a while, and is the other process's."""
    if settings.runner == "thread":
        from app.runners.local import LocalRunner

        os.environ.update(private_scratch())
        return LocalRunner
    from app.runners.process import ProcessRunner

    return ProcessRunner


def _uvicorn(app: Starlette, settings: Settings, hall: Hall) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        # with TLS, where there is a certificate
        http=protocol(settings, hall=hall),
        host=settings.host,
        port=settings.port,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE,
    )
