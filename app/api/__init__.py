"""HTTP. Knows starlette and where the dialects lie; must not know ids, tensors or templates.

A dialect is a module in app/api/dialects that has a function `routes(generate, settings, bodies)`;
putting it there is all it takes. Modules without one are parts of a dialect.
"""

import pkgutil
from importlib import import_module

from starlette.routing import BaseRoute

from app.api import health, openai
from app.api.front_end import FrontendStats
from app.api.metrics.registry import Metrics
from app.core.observers import ObservedGenerate
from app.core.ports import Generate
from app.core.request_context import RequestContextObserver
from app.core.server_stats import ConnectionStats, EventLoopLag
from app.core.settings import Settings
from app.core.thread_pools import ThreadPools
from app.http.body import RequestBodies


def build_routes(
    generate: Generate,
    settings: Settings,
    traffic: ConnectionStats,
    workers: ThreadPools,
    lag: EventLoopLag,
) -> list[BaseRoute]:
    bodies = RequestBodies(settings, workers, lambda: _max_context_length(generate))
    front_end = FrontendStats(bodies, workers, lag)
    metrics = Metrics(generate, traffic, front_end)
    watched = ObservedGenerate(generate, metrics.observe, RequestContextObserver)
    found: list[BaseRoute] = [
        *health.health_routes(generate, settings, front_end),
        *metrics.routes(),
    ]
    for module in pkgutil.iter_modules(openai.__path__):
        dialect = import_module(f"{openai.__name__}.{module.name}")
        if hasattr(dialect, "routes"):
            found += dialect.routes(watched, settings, bodies)
    return found


def _max_context_length(generate: Generate) -> int:
    """Tokens that a prompt to any of the models may have."""
    return max((card.context_length for card in generate.list_models()), default=0)
