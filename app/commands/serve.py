"""`mlxrunner serve`: spawns the process of the first model, and then imports and runs the server.

Knows: the order of a start. Must not know: requests, models. Startup is mostly imports, of the
engine in the model process and of the server in this one, so both happen at the same time.
"""

import contextlib
import os
from collections.abc import Callable

from app.config.options import TEMPORARY_CONFIG_VARIABLE
from app.config.precedence import ResolvedConfig
from app.core.runtime import import_without_collections
from app.core.settings import Settings
from app.runners.ranks.launch import detect_launch
from app.runners.spawn import Spawn, spawn, spawn_early
from app.serving.reload_signal import ReloadSignal
from models import extension_build


def serve(read_config: Callable[[], ResolvedConfig]) -> int:
    """Runs a server and returns its exit status. Raises AppError. read_config: reads the
    configuration; called again for a reload."""
    reload_signal = ReloadSignal()
    with reload_signal.handled():
        configuration = read_config()
        os.environ[extension_build.VARIABLE] = extension_build.IDENTITY
        with _spawn_early(configuration.settings) as spawn_model:
            with import_without_collections():
                from app.observability.logs import configure_logging, flush_logs

            configure_logging(configuration.settings)
            with import_without_collections():
                from app.server import serve as run_server

            temporary = TEMPORARY_CONFIG_VARIABLE in os.environ
            try:
                return run_server(
                    configuration.settings,
                    None if temporary else configuration.path,
                    lambda: read_config().settings,
                    reload_signal,
                    spawn_model,
                )
            finally:
                flush_logs()


def _spawn_early(settings: Settings) -> contextlib.AbstractContextManager[Spawn]:
    """A server with one model loads it at the start. Of several, the model that is loaded first
    depends on their memory requirements."""
    may_spawn = settings.runner == "process" and not settings.multi_model
    if not may_spawn or detect_launch(os.environ) is not None:
        return contextlib.nullcontext(spawn)
    return spawn_early(settings.models[0].name if settings.models else "builtin")
