"""The HTTP application over a real router, pool and text path, in this process; only the runner of
its one model is given."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette

from app import store
from app.api.app import build_app
from app.core.model_files import ModelFiles
from app.core.ports import Runner
from app.core.request_lifecycle import RequestLimits
from app.core.settings import ModelSettings, Settings
from app.core.thread_pools import ThreadPools
from app.engine.model_info import complete_config
from app.images.decoder import ImageDecoder
from app.runners.pool import ModelPool
from app.serving.model_library import InstalledModels
from app.serving.registry import ModelRegistry, build_entry
from app.serving.router import ModelRouter


async def accept_tokenizer(files: ModelFiles) -> None:
    """In place of the check, which runs a process for each model."""


@asynccontextmanager
async def serve_model(
    folder: Path, make_runner: Callable[[Settings], Runner]
) -> AsyncGenerator[Starlette]:
    """The application of a server whose only model, in this folder, is loaded."""
    settings = Settings(models=(ModelSettings(name=str(folder)),))
    entry = build_entry(settings.models[0], complete_config(store.find(str(folder))), settings)
    registry = ModelRegistry([entry], settings)
    pool = ModelPool(make_runner, registry.load_verified_files)
    workers = ThreadPools()
    limits = RequestLimits(settings)
    decoder = ImageDecoder()
    router = ModelRouter(
        registry,
        pool,
        [entry.served.name],
        workers,
        load_wait=settings.load_wait,
        check_tokenizer=accept_tokenizer,
        library=InstalledModels(registry),
        limits=limits,
        image_decoder=decoder,
    )
    await pool.start()
    try:
        await router.preload_models()
        yield build_app(router, router, settings, limits=limits, workers=workers)
    finally:
        await pool.stop()
        await decoder.close()
