"""A server in a thread of this process, whose engines are also threads.

For commands that talk to a server and a real model, if the processes of the server are not the
subject: starting those takes two seconds of CPU time.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from app import store
from app.api.app import build_app
from app.commands.servers import get_json
from app.config.toml_edit import ConfigFile
from app.core.jobs import StepOutput
from app.core.request_lifecycle import RequestLimits
from app.core.settings import ModelSettings, Settings
from app.core.thread_pools import ThreadPools
from app.engine.loop import Loop
from app.engine.model_info import complete_config
from app.engine.scheduler import StepPacing
from app.http.api_keys import Keyring
from app.runners.pool import ModelPool
from app.runners.thread_runner import ThreadRunner
from app.serving.model_library import InstalledModels
from app.serving.registry import ModelRegistry, RegisteredModel, build_entry
from app.serving.router import ModelRouter
from tests.api.asgi import serve_app
from tests.serving.in_process import accept_tokenizer
from tests.throttle import STEP_SECONDS
from tests.waiting import INTERVAL


@dataclass(frozen=True)
class ThreadServer:
    """A running server. url: without a path."""

    url: str

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    @property
    def arguments(self) -> tuple[str, str]:
        """The arguments of a command that uses this server."""
        return "--port", self.port

    @property
    def is_idle(self) -> bool:
        _, status = get_json(f"{self.url}/v1/status")
        return not status["Running"] and not status["Waiting"]


@contextlib.contextmanager
def run_thread_server(
    *names: str, environ: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[ThreadServer]:
    """Runs a server with these models, by default the built-in one. The first one is loaded when
    the context is entered. environ: the variables with API keys. settings: fields of Settings."""
    models = tuple(ModelSettings(name=name) for name in names)
    with run_with_settings(Settings(models=models, **settings), environ) as server:
        yield server


@contextlib.contextmanager
def run_with_settings(
    settings: Settings, environ: Mapping[str, str] | None = None, config: Path | None = None
) -> Iterator[ThreadServer]:
    """Like `run_thread_server`. config: the configuration file."""
    app = _build(settings, Keyring.from_settings(settings, dict(environ or {})), config)
    with serve_app(app, lifespan="on") as url:
        yield ThreadServer(url)


def _build(settings: Settings, keyring: Keyring, config: Path | None) -> Starlette:
    entries = [_find_entry(model, settings) for model in settings.models or (None,)]
    registry = ModelRegistry(entries, settings)
    # without an estimate of the memory, which takes a process
    pool = ModelPool(ThreadRunner, registry.load_verified_files)
    workers = ThreadPools()
    limits = RequestLimits(settings)
    router = ModelRouter(
        registry,
        pool,
        [entries[0].served.name],
        workers,
        load_wait=settings.load_wait,
        check_tokenizer=accept_tokenizer,
        library=InstalledModels(registry),
        limits=limits,
        save_defaults=None if config is None else ConfigFile(str(config)).save_defaults,
    )

    @contextlib.asynccontextmanager
    async def run_pool(_: Starlette) -> AsyncGenerator[None]:
        await pool.start()
        try:
            await router.preload_models()
            yield
        finally:
            await pool.stop()

    return build_app(
        router, router, settings, limits=limits, lifespan=run_pool, keyring=keyring, workers=workers
    )


def _find_entry(model: ModelSettings | None, settings: Settings) -> RegisteredModel:
    files = complete_config(store.find(None if model is None else model.name))
    return build_entry(model, files, settings)


class StepGate:
    """Slows the engines of this process down, or stops them at a known point in their work. A
    stopped engine still accepts and cancels requests. Otherwise a fast machine could end a request
    before the test acts."""

    def __init__(self) -> None:
        self._is_slow = False
        self._limit: int | None = None
        self._start: int | None = None  # set by the engine thread

    def slow_down(self) -> None:
        """Each step takes longer from now on, so that a prompt of some hundred tokens takes longer
        than any test waits."""
        self._is_slow = True

    def hold_after(self, tokens: int) -> None:
        """Stops the engine when it has generated this number of tokens from now on. It must be idle
        now."""
        self._start, self._limit = None, tokens

    def release(self) -> None:
        self._is_slow, self._limit = False, None

    def is_slow(self) -> bool:
        return self._is_slow

    def holds(self, generated: int) -> bool:
        """generated: the number of tokens since the start of the engine."""
        limit = self._limit
        if limit is None:
            return False
        self._start = generated if self._start is None else self._start
        return generated - self._start >= limit


@contextlib.contextmanager
def gate_steps() -> Iterator[StepGate]:
    """Yields the gate of all engines in this process. It is open at first."""
    gate = StepGate()
    step, count_next = Loop.step, StepPacing.count_next

    def step_through_gate(loop: Loop) -> StepOutput:
        if gate.holds(loop.stats().generated_tokens):
            time.sleep(INTERVAL)
            return StepOutput(updates=loop._outputs.drain(), stats=loop.stats())
        if gate.is_slow():
            time.sleep(STEP_SECONDS)
        return step(loop)

    def count_chunks(pacing: StepPacing) -> int:
        return 1 if gate.is_slow() else count_next(pacing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "step", step_through_gate)
        patch.setattr(StepPacing, "count_next", count_chunks)
        yield gate
