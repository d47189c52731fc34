"""The composition root: builds a server from the settings and runs it.

Knows: all packages and how they are connected. Must not know: how the packages are implemented.
"""

import asyncio
import contextlib
import importlib
import logging
import math
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from app import store
from app.commands.pull import resolve_or_download
from app.config.options import OPTIONS
from app.config.precedence import find_state_folder
from app.config.toml_edit import ConfigFile
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.models import MemoryRequirement
from app.core.ports import Runner
from app.core.runtime import (
    import_without_collections,
    limit_malloc_retention,
    shorten_switch_interval,
)
from app.core.settings import LiveSettings, ModelSettings, Settings, merge_reloaded
from app.core.units import pluralize
from app.core.usage import ConnectionStats, EventLoopLag, UsageCounters
from app.engine.model_info import complete_config
from app.http.api_keys import Keyring
from app.http.bind_policy import check_bind_address, check_security_settings
from app.observability.logs import get_terminal_log, set_log_levels
from app.observability.systemd import SystemdNotifier
from app.observability.terminal_status import BannerAddress, TerminalStatus
from app.observability.tracing import create_tracing
from app.runners.compile_dir import prepare_compile_dir
from app.runners.pool import ModelPool
from app.runners.preflight import estimate_memory
from app.runners.ranks.launch import Launch, detect_launch, restrict_to_one_model, watch_launcher
from app.runners.spawn import Spawn, spawn
from app.serving.keep_awake import keep_awake
from app.serving.registry import ModelRegistry, RegisteredModel, build_entry
from app.serving.reload_signal import ReloadSignal
from app.serving.usage_file import UsageFile, name_usage_file
from app.store import is_builtin

if TYPE_CHECKING:
    # imported by `_RunningServer._build`, while the first model starts to load
    import uvicorn
    from starlette.applications import Starlette

    from app.http.connection_limits import ConnectionLimiter
    from app.http.uvicorn_server import UvicornServer
    from app.runners.ranks.leader import RankGroup
    from app.serving.router import ModelRouter

log = logging.getLogger(__name__)


# The maximum number of connections accepted in one iteration of the event loop. asyncio also uses
# this number as the listen backlog. With uvicorn's 2048, opening 1200 connections blocked all other
# requests for a second.
_BACKLOG = 128

# The keep-alive timeout of idle connections in seconds. At the connection limit, idle connections
# are closed earlier. If a client keeps connections open longer than the server, requests
# occasionally fail. httpx and uvicorn use 5 s, and nginx uses 60 s.
_KEEP_ALIVE_TIMEOUT = 75


# Modules that libraries import when they are first used, on the event loop. An import from a slow
# disk, or before its bytecode was written, would block all requests for seconds. Other versions of
# the libraries may not have these modules.
_LAZY_MODULES = ("anyio._backends._asyncio",)


def serve(
    settings: Settings,
    config_path: str | None = None,
    read_settings: Callable[[], Settings] | None = None,
    reload_signal: ReloadSignal | None = None,
    spawn: Spawn = spawn,
) -> int:
    """Runs the server until a stop signal arrives, and returns the exit status. Raises AppError for
    missing models and for insecure or unusable settings.

    config_path: the configuration file, which receives changed defaults of models. read_settings:
    reads the settings again, for a reload; None if there are no reloads. reload_signal: requests a
    reload. spawn: starts a model process.
    """
    launch = detect_launch(os.environ)
    if launch is not None:
        if reload_signal is not None:  # the launcher of a remote rank stops it with this signal
            reload_signal.restore()
            reload_signal = None
        settings = restrict_to_one_model(settings)
        if launch.rank > 0:
            return _run_follower(launch, settings)
    keyring, warnings = check_security_settings(settings, os.environ)
    for warning in warnings:
        log.warning("%s", warning)
    check_bind_address(settings.host, settings.port)
    entries = [_resolve_entry(model, settings) for model in settings.models or (None,)]
    others: RankGroup | None = None
    if launch is None:
        make = _get_runner_factory(settings, spawn)
    else:
        entries = [_pin(entry) for entry in entries]
        make, others = _start_rank_zero(launch, entries[0])
    if launch is None and settings.runner != "thread":
        limit_malloc_retention()
    shorten_switch_interval()
    config = None if config_path is None else ConfigFile(config_path)
    server = _RunningServer(settings, entries, keyring, make, others, config)
    if read_settings is not None and reload_signal is not None:
        server.reload_on(reload_signal, read_settings)
    return server.run()


class _RunningServer:
    """A server from start to shutdown. make_runner: creates the runner of a model. ranks: the other
    ranks, if the model is distributed. config: the configuration file, if any."""

    _router: "ModelRouter"
    _server: "UvicornServer"

    def __init__(
        self,
        settings: Settings,
        entries: Sequence[RegisteredModel],
        keyring: Keyring,
        make_runner: Callable[[Settings], Runner],
        ranks: "RankGroup | None",
        config: ConfigFile | None,
    ) -> None:
        self._settings = settings
        self._live = LiveSettings(settings)
        self._ranks = ranks
        self._keyring = keyring
        self._config = config
        self._reload_signal: ReloadSignal | None = None
        self._read_settings: Callable[[], Settings] = lambda: settings
        self._failure: AppError | None = None
        self._started = False
        self._systemd = SystemdNotifier.from_environment(os.environ, os.getpid())
        self._tracing = create_tracing(settings)
        self._terminal = _create_terminal_status(settings)
        self._needs_key = keyring.enabled
        self._preload_names = _list_preload_names(entries, settings)
        self._registry = ModelRegistry(entries, settings)
        self._pool = ModelPool(
            make_runner,
            self._registry.load_verified_files,
            estimate_memory if settings.multi_model else None,
            total_bytes=settings.memory,
            max_loaded=_get_max_loaded(settings),
        )

    def _build(self) -> None:
        """Builds the router and the HTTP server. Most of the time is spent on imports."""
        for module in _LAZY_MODULES:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        from app.api.app import build_app
        from app.core.request_lifecycle import RequestLimits
        from app.core.thread_pools import ThreadPools
        from app.http.connection_limits import ConnectionLimiter
        from app.http.uvicorn_server import UvicornServer
        from app.images.decoder import ImageDecoder
        from app.observability.event_loop_watchdog import EventLoopWatchdog
        from app.runners.tokenizer_check import TokenizerChecker
        from app.serving.model_library import InstalledModels
        from app.serving.router import ModelRouter

        settings = self._settings
        workers, lag, traffic = ThreadPools(), EventLoopLag(), ConnectionStats()
        has_limits = self._keyring.enabled
        usage = UsageCounters(self._keyring.get_limits) if has_limits else UsageCounters()
        self._usage_file = _create_usage_file(settings, usage)
        limits = RequestLimits(settings, usage)
        self._watchdog = EventLoopWatchdog(lag, watchdog=settings.watchdog)
        self._image_decoder = ImageDecoder()
        self._library = InstalledModels(self._registry, self._estimate_download)
        self._router = ModelRouter(
            self._registry,
            self._pool,
            self._preload_names,
            workers,
            load_wait=settings.load_wait,
            check_tokenizer=TokenizerChecker(is_builtin).check,
            library=self._library,
            limits=limits,
            save_defaults=None if self._config is None else self._config.save_defaults,
            can_reload=self._ranks is None,
            image_decoder=self._image_decoder,
            image_hosts=settings.image_hosts,
        )
        observers = (self._tracing, self._terminal)
        app = build_app(
            self._router,
            self._router,
            settings,
            lifespan=self._lifespan,
            keyring=self._keyring,
            traffic=traffic,
            workers=workers,
            lag=lag,
            live=self._live,
            usage=usage,
            limits=limits,
            observers=[observer.observe for observer in observers if observer is not None],
        )
        limiter = ConnectionLimiter(settings, traffic)
        for apply in (limits.apply, limiter.apply, set_log_levels):
            self._live.subscribe(apply)
        config = _build_uvicorn_config(app, settings, limiter)
        self._server = UvicornServer(config, limits, settings, limiter)

    def run(self) -> int:
        """Runs the server and returns the exit status. Raises AppError if an error ended the server
        early."""
        # After the shutdown, uvicorn raises the signal again. If it cannot bind the address, it
        # logs the error and raises SystemExit.
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            asyncio.run(self._run())
        if self._failure is not None:
            raise self._failure
        return 0 if self._started else 1

    async def _run(self) -> None:
        """The first model starts to load while this process still imports the HTTP server."""
        await self._pool.start()
        try:
            for name, entry in self._registry.named().items():  # with their stored defaults
                if name in self._preload_names:
                    self._pool.preload(entry.served)
            if self._settings.runner == "thread":  # tensors of a load may be part of cycles
                await asyncio.to_thread(self._build)
            else:
                with import_without_collections():
                    await asyncio.to_thread(self._build)
            if self._ranks is not None:
                self._ranks.add_failure_listener(
                    lambda why: self._fail(AppError(ErrorKind.ENGINE, why))
                )
                watch_launcher(os.environ, self._request_exit)
            try:
                await self._server.serve()
            finally:
                self._started = self._server.started
        finally:
            await self._pool.stop()
            if self._ranks is not None:
                self._ranks.stop_followers()

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: "Starlette") -> AsyncGenerator[None]:
        self._awake = keep_awake(self._settings)
        # not awaited, so that /v1/status can report the progress while models load
        loading = asyncio.create_task(self._preload_models())
        reloading = asyncio.create_task(self._reload_on_signal())
        async with (
            self._watchdog.run(),
            self._library.sweep_uploads(),
            self._systemd.watch(self._server, self._settings.drain),
            self._show_on_terminal(),
            contextlib.nullcontext() if self._usage_file is None else self._usage_file.keep(),
        ):
            yield
        reloading.cancel()
        await self._pool.stop()
        await asyncio.gather(loading, reloading, return_exceptions=True)
        await self._image_decoder.close()
        if self._ranks is not None:
            self._ranks.stop_followers()
        if self._tracing is not None:
            await self._tracing.stop()

    async def _estimate_download(self, files: ModelFiles) -> MemoryRequirement:
        """Estimates the memory of a model that is not installed. The memory for all models includes
        that of the loaded ones."""
        settings = self._settings
        loaded = sum(one.stats.allocated_bytes for one in self._router.list_model_states())
        own = settings.for_model(ModelSettings(name=files.name))
        need = await estimate_memory(files, own, loaded)
        return need if settings.memory is None else replace(need, device_budget=settings.memory)

    def reload_on(self, reload_signal: ReloadSignal, read_settings: Callable[[], Settings]) -> None:
        """Reloads the settings after each signal, while the server runs."""
        self._reload_signal, self._read_settings = reload_signal, read_settings

    async def _reload_on_signal(self) -> None:
        if self._reload_signal is not None:
            await self._reload_signal.run(self._reload)

    async def _reload(self) -> None:
        """Applies the keys, the limits, the log level and the list of models. If the settings or a
        model cannot be used, nothing but the keys is changed."""
        await self._keyring.reload()
        before = self._live.current
        try:
            settings, kept = merge_reloaded(before, await asyncio.to_thread(self._read_settings))
            entries = await asyncio.to_thread(self._resolve_entries, settings)
            preload = _list_preload_names(entries, settings)
            self._router.replace_models(
                entries,
                preload,
                settings,
                # a model that may use all memory shares it from now on, or the other way round
                reload_all=settings.multi_model != before.multi_model,
            )
        except Exception as error:
            if not isinstance(error, AppError):
                log.exception("internal error during a reload")
                return
            log.error("SIGHUP: %s; keeping the previous settings and models", error.message)
            return
        self._pool.set_limits(
            estimate_memory if settings.multi_model else None, _get_max_loaded(settings)
        )
        self._live.replace(settings)
        flags = {option.field: option.flag for option in OPTIONS}
        for name in kept:
            log.warning("SIGHUP: %s has changed, which needs a restart", flags.get(name, name))
        log.info("SIGHUP: reloaded the settings (%s)", pluralize(len(entries), "model"))

    def _resolve_entries(self, settings: Settings) -> Sequence[RegisteredModel]:
        """Finds the models of a reload, and downloads missing ones with `--pull`. Runs on a
        thread. Asks nothing, even on a terminal."""
        models = settings.models or (None,)
        if settings.pull:
            return [_resolve_entry(model, settings) for model in models]
        return [
            # a load verifies the files
            build_entry(model, complete_config(store.find(model and model.name)), settings)
            for model in models
        ]

    def _show_on_terminal(self) -> contextlib.AbstractAsyncContextManager[None]:
        if self._terminal is None:
            return contextlib.nullcontext()
        return self._terminal.run(
            self._router.list_model_states,
            lambda: bool(self._server.url) and self._router.status().state == "ready",
            self._get_address,
        )

    def _get_address(self) -> BannerAddress:
        return BannerAddress(url=self._server.url, needs_key=self._needs_key)

    async def _preload_models(self) -> None:
        """Preloads models. The server exits if its only model cannot be loaded."""
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


def _get_max_loaded(settings: Settings) -> int | None:
    """Returns the maximum number of loaded models. A single model may use all memory. After a
    reload, it is therefore unloaded before another one is loaded."""
    return settings.max_loaded if settings.multi_model else 1


def _resolve_entry(model: ModelSettings | None, settings: Settings) -> RegisteredModel:
    """Finds a model. If the model is missing and a download is requested, downloads it first."""
    own = settings if model is None else settings.for_model(model)
    files = complete_config(resolve_or_download(own))
    if warning := files.describe_excess(own.context):
        log.warning("%s", warning)
    return build_entry(model, files, settings)


def _list_preload_names(entries: Sequence[RegisteredModel], settings: Settings) -> list[str]:
    """Returns the names of the models marked as preloaded or pinned. If there are none, returns
    only the name of the first model."""
    marked = {n for n, model in enumerate(settings.models) if model.preload or model.pinned}
    return [entry.served.name for n, entry in enumerate(entries) if n in (marked or {0})]


def _pin(entry: RegisteredModel) -> RegisteredModel:
    """Pins a distributed model, because it can be loaded only once."""
    return replace(entry, served=replace(entry.served, keep_alive=math.inf, pinned=True))


def _create_terminal_status(settings: Settings) -> TerminalStatus | None:
    found = get_terminal_log(settings)
    if found is None:
        return None
    handler, terminal = found
    return TerminalStatus(handler.show_status, handler.write_block, terminal)


def _start_rank_zero(
    launch: Launch, entry: RegisteredModel
) -> "tuple[Callable[[Settings], Runner], RankGroup]":
    """Connects to the other ranks. Rank 0 runs its engine on a thread of the server process,
    because each rank is already a process."""
    from app.runners.ranks.leader import gather_ranks
    from app.runners.thread_runner import ThreadRunner

    os.environ.update(prepare_compile_dir())
    rank_group = gather_ranks(launch, entry.files, entry.served.settings)
    return partial(ThreadRunner, rank_group=rank_group), rank_group


def _run_follower(launch: Launch, settings: Settings) -> int:
    """Runs a follower rank, which has no HTTP server."""
    from app.runners.ranks.follower import run_follower

    os.environ.update(prepare_compile_dir())
    [model] = settings.models or (None,)
    entry = _resolve_entry(model, settings)
    return run_follower(launch, entry.files, entry.served.settings)


def _get_runner_factory(settings: Settings, spawn: Spawn) -> Callable[[Settings], Runner]:
    """Returns the factory that creates runners. Only the selected module is imported, because
    importing the engine is slow, and only model processes and thread runners need it."""
    if settings.runner == "thread":
        from app.runners.thread_runner import ThreadRunner

        os.environ.update(prepare_compile_dir())
        return ThreadRunner
    from app.runners.process_runner import ProcessRunner

    return partial(ProcessRunner, spawn=spawn)


def _create_usage_file(settings: Settings, usage: UsageCounters) -> UsageFile | None:
    """Returns the file for the daily tokens of the keys in the key file, which alone can have
    limits. A server that chooses its port has none."""
    folder = find_state_folder(os.environ)
    if settings.api_keys is None or settings.port == 0 or folder is None:
        return None
    return UsageFile(name_usage_file(folder, settings.api_keys, settings.port), usage)


def _build_uvicorn_config(
    app: "Starlette", settings: Settings, limiter: "ConnectionLimiter"
) -> "uvicorn.Config":
    import uvicorn

    from app.http.uvicorn_server import make_protocol_factory

    return uvicorn.Config(
        app,
        http=make_protocol_factory(settings, limiter=limiter),
        host=settings.host,
        port=settings.port,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_TIMEOUT,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
