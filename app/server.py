"""The composition root: settings in, a running server out.

Knows: every room, and how they are plugged together. Must not know: anything that they do.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator

import uvicorn
from starlette.applications import Starlette

from app.api.app import build_app
from app.commands.obtain import obtain
from app.core.errors import AppError, Kind
from app.core.settings import Settings
from app.door.certificates import check_certificate
from app.door.exposure import check_exposure
from app.door.keyring import Keyring
from app.engine.describe import complete
from app.generation import Generation
from app.runners.local import LocalRunner

log = logging.getLogger(__name__)

# Building a decode step holds the interpreter for milliseconds at a time; at Python's default of
# 5 ms the event loop gets each token that much later (DECISIONS.md, 2026-11-21).
_SWITCH_INTERVAL = 0.0005

# seconds that open streams get to end after SIGTERM or Ctrl-C
_GRACE = 5


def serve(settings: Settings) -> int:
    """Serve until told to stop; the exit status. Raises AppError for a model that is not there, for
    keys and certificates that cannot be used, and where strangers would be served."""
    keyring = Keyring.of(settings, os.environ)
    for sentence in check_exposure(settings, has_keys=keyring.in_force):
        log.warning("%s", sentence)
    if settings.tls_cert is not None and settings.tls_key is not None:
        for sentence in check_certificate(settings.tls_cert, settings.tls_key):
            log.warning("%s", sentence)
    files = complete(obtain(settings))
    if settings.context is not None and settings.context > files.context_length:
        log.warning(
            "--context %d is more than %s was made for: it has %d",
            settings.context,
            files.name,
            files.context_length,
        )
    runner = LocalRunner(settings)
    generation = Generation(files, runner, settings)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    failures: list[AppError] = []

    async def load() -> None:
        try:
            await runner.start(files)
        except AppError as error:
            failures.append(error)
        except Exception as error:  # nobody is served by a server without a model
            log.exception("the model could not be loaded")
            message = f"{files.path} could not be loaded: {error}"
            failures.append(AppError(Kind.MODEL_FILES, message))
        if failures:
            server.should_exit = True
            return
        [card] = generation.models()
        log.info("%s is ready (context %d tokens)", card.id, card.context_length)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        # not awaited: /v1/status tells the progress while the model loads
        loading = asyncio.create_task(load())
        yield
        await runner.stop()
        await loading

    app = build_app(generation, settings, lifespan=lifespan, keyring=keyring)
    server = uvicorn.Server(_uvicorn(app, settings))
    # uvicorn raises the signal again once it has shut down, and exits where it cannot bind,
    # which it has logged by then
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        server.run()
    if failures:
        raise failures[0]
    return 0 if server.started else 1


def _uvicorn(app: Starlette, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        ws="none",
        lifespan="on",
        log_config=None,
        server_header=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=_GRACE,
    )
