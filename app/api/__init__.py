"""HTTP. Knows starlette and where the dialects lie; must not know ids, tensors or templates.

A dialect is a module in app/api/dialects that has a function `routes(generate, settings, bodies)`;
putting it there is all it takes. Modules without one are parts of a dialect.
"""

import pkgutil
from importlib import import_module

from starlette.routing import BaseRoute

from app.api import dialects, meta
from app.api.body import RequestBodies
from app.api.front_end import FrontEnd
from app.api.metrics.registry import Metrics
from app.core.loop_lag import LoopLag
from app.core.ports import Generate
from app.core.settings import Settings
from app.core.traffic import Traffic
from app.core.visit import VisitWatch
from app.core.watched import Watched
from app.core.workers import Workers


def routes(
    generate: Generate, settings: Settings, traffic: Traffic, workers: Workers, lag: LoopLag
) -> list[BaseRoute]:
    bodies = RequestBodies(settings, workers, lambda: _longest_prompt(generate))
    front_end = FrontEnd(bodies, workers, lag)
    metrics = Metrics(generate, traffic, front_end)
    watched = Watched(generate, metrics.watch, VisitWatch)
    found: list[BaseRoute] = [*meta.routes(generate, settings, front_end), *metrics.routes()]
    for module in pkgutil.iter_modules(dialects.__path__):
        dialect = import_module(f"{dialects.__name__}.{module.name}")
        if hasattr(dialect, "routes"):
            found += dialect.routes(watched, settings, bodies)
    return found


def _longest_prompt(generate: Generate) -> int:
    """Tokens that a prompt to any of the models may have."""
    return max((card.context_length for card in generate.models()), default=0)
