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
from app.commands.pull import resolve_or_download
from app.core.errors import AppError, ErrorKind
from app.core.malloc import limit_malloc_retention
from app.core.observers import ObservedGenerate
from app.core.ports import Runner
from app.core.server_stats import ConnectionStats, EventLoopLag
from app.core.settings import ModelSettings, Settings
from app.core.thread_pools import ThreadPools
from app.engine.model_info import complete_config
from app.http.api_keys import Keyring
from app.http.bind_policy import check_bind_address, check_security_settings
from app.http.connection_limits import ConnectionLimiter
from app.http.systemd import SystemdNotifier
from app.http.uvicorn_server import UvicornServer, make_protocol_factory
from app.runners.compile_dir import prepare_compile_dir
from app.runners.pool import ModelPool
from app.runners.preflight import estimate_memory
from app.runners.ranks.launch import Launch, detect_launch, restrict_to_one_model, watch_launcher
from app.runners.tokenizer_check import TokenizerChecker
from app.serving.event_loop_watchdog import EventLoopWatchdog
from app.serving.limits import LimitedGenerate
from app.serving.registry import ModelRegistry, RegisteredModel, build_entry
from app.serving.router import ModelRouter
from app.serving.tracing import create_tracing
from app.store import is_builtin

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
_KEEP_ALIVE_TIMEOUT = 75


def serve(settings: Settings) -> int:
    """Serve until told to stop; the exit status. Raises AppError for what is not there, or would
    not be safe."""
    launch = detect_launch(os.environ)
    if launch is not None:
        settings = restrict_to_one_model(settings)
        if launch.rank > 0:
            return _run_follower(launch, settings)
    keyring, warnings = check_security_settings(settings, os.environ)
    for warning in warnings:
        log.warning("%s", warning)
    check_bind_address(settings.host, settings.port)
    entries = [_resolve_entry(model, settings) for model in settings.models or (None,)]
    others: _OtherRanks | None = None
    if launch is None:
        make = _get_runner_factory(settings)
    else:
        entries = [_pin(entry) for entry in entries]
        make, others = _start_rank_zero(launch, entries[0])
    if launch is None and settings.runner != "thread":
        limit_malloc_retention()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    return _RunningServer(settings, entries, keyring, make, others).run()


class _RunningServer:
    """A server from its beginning to its end. make_runner: what runs a model. ranks: ranks that
    compute with this one."""

    def __init__(
        self,
        settings: Settings,
        entries: Sequence[RegisteredModel],
        keyring: Keyring,
        make_runner: Callable[[Settings], Runner],
        ranks: "_OtherRanks | None",
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._failure: AppError | None = None
        self._systemd = SystemdNotifier.from_environment(os.environ, os.getpid())
        self._tracing = create_tracing(settings)
        catalogue = ModelRegistry(entries, settings)
        self._pool = ModelPool(
            make_runner,
            catalogue.load_verified_files,
            estimate_memory if settings.multi_model else None,
            total_bytes=settings.memory,
            max_loaded=settings.max_loaded,
        )
        preload = _list_preload_names(entries, settings)
        workers, lag = ThreadPools(), EventLoopLag()
        self._watchdog = EventLoopWatchdog(lag, watchdog=settings.watchdog)
        self._router = ModelRouter(
            catalogue,
            self._pool,
            preload,
            workers,
            load_wait=settings.load_wait,
            check_tokenizer=TokenizerChecker(is_builtin).check,
        )
        limited = LimitedGenerate(self._router, settings)
        watch = None if self._tracing is None else self._tracing.observe
        generate = limited if watch is None else ObservedGenerate(limited, watch)
        traffic = ConnectionStats()
        app = build_app(
            generate,
            settings,
            lifespan=self._lifespan,
            keyring=keyring,
            traffic=traffic,
            workers=workers,
            lag=lag,
        )
        hall = ConnectionLimiter(settings, traffic)
        self._server = UvicornServer(
            _build_uvicorn_config(app, settings, hall), limited, settings, hall
        )

    def run(self) -> int:
        """The exit status; raises AppError for what ended it too early."""
        if self._ranks is not None:
            self._ranks.add_failure_listener(
                lambda why: self._fail(AppError(ErrorKind.ENGINE, why))
            )
            watch_launcher(os.environ, self._request_exit)
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
        loading = asyncio.create_task(self._preload_models())
        async with (
            self._watchdog.run(),
            self._systemd.watch(self._server, self._settings.drain),
        ):
            yield
        await self._pool.stop()
        await asyncio.gather(loading, return_exceptions=True)
        if self._ranks is not None:
            self._ranks.stop_followers()
        if self._tracing is not None:
            await self._tracing.stop()

    async def _preload_models(self) -> None:
        """A server whose one model cannot be loaded is of no use to anybody."""
        try:
            await self._router.preload_models()
        except Exception as error:
            if not isinstance(error, AppError):
                log.exception("internal error while loading models")
                error = AppError(ErrorKind.ENGINE, f"models could not be loaded: {error}")
            if error.kind is ErrorKind.STOPPING:
                return
            if self._settings.multi_model:
                log.error("%s", error.message)
                return
            self._fail(error)

    def _fail(self, why: AppError) -> None:
        self._failure = self._failure or why
        self._request_exit()

    def _request_exit(self) -> None:
        self._server.should_exit = True


def _resolve_entry(model: ModelSettings | None, settings: Settings) -> RegisteredModel:
    """Found, and downloaded first where somebody wants that."""
    own = settings if model is None else settings.for_model(model)
    files = complete_config(resolve_or_download(own))
    if own.context is not None and own.context > files.context_length:
        log.warning(
            "--context %d exceeds the context length of %s, which is %d",
            own.context,
            files.name,
            files.context_length,
        )
    return build_entry(model, files, settings)


def _list_preload_names(entries: Sequence[RegisteredModel], settings: Settings) -> list[str]:
    """Those that were marked so or are to stay for ever, else the first."""
    marked = {n for n, model in enumerate(settings.models) if model.preload or model.pinned}
    return [entry.served.name for n, entry in enumerate(entries) if n in (marked or {0})]


def _pin(entry: RegisteredModel) -> RegisteredModel:
    """One that ranks load together is loaded once."""
    return replace(entry, served=replace(entry.served, keep_alive=math.inf, pinned=True))


class _OtherRanks(Protocol):
    """The other ranks."""

    def add_failure_listener(self, listener: Callable[[str], None]) -> None: ...

    def stop_followers(self) -> None: ...


def _start_rank_zero(
    launch: Launch, entry: RegisteredModel
) -> tuple[Callable[[Settings], Runner], _OtherRanks]:
    """Rank 0 has its engine here: what ranks compute together is begun by one process each."""
    from app.runners.ranks.leader import gather_ranks
    from app.runners.thread_runner import ThreadRunner

    os.environ.update(prepare_compile_dir())
    crew = gather_ranks(launch, entry.files, entry.served.settings)
    return partial(ThreadRunner, rank_group=crew), crew


def _run_follower(launch: Launch, settings: Settings) -> int:
    """What a rank does that serves nobody."""
    from app.runners.ranks.follower import run_follower

    os.environ.update(prepare_compile_dir())
    [model] = settings.models or (None,)
    entry = _resolve_entry(model, settings)
    return run_follower(launch, entry.files, entry.served.settings)


def _get_runner_factory(settings: Settings) -> Callable[[Settings], Runner]:
    """Only one of the two is imported: the engine takes a while, and is the other process's."""
    if settings.runner == "thread":
        from app.runners.thread_runner import ThreadRunner

        os.environ.update(prepare_compile_dir())
        return ThreadRunner
    from app.runners.process_runner import ProcessRunner

    return ProcessRunner


def _build_uvicorn_config(
    app: Starlette, settings: Settings, hall: ConnectionLimiter
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        # with TLS, where there is a certificate
        http=make_protocol_factory(settings, limiter=hall),
        host=settings.host,
        port=settings.port,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_TIMEOUT,
    )
