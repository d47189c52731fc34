"""`mlxrunner stop`: unloads a model of the running server.

Knows: the name under which a model is served. Must not know: what unloading a model does.
"""

from app.commands.servers import (
    find_configured,
    find_served_name,
    is_loaded,
    require_server,
)
from app.core.errors import AppError, ErrorKind, suggest
from app.core.settings import Settings


def stop(name: str, settings: Settings) -> int:
    """Unloads a model and returns the exit status. Its running requests fail. Raises AppError if no
    server is running, it does not serve the model, or the key in the environment is not an
    admin key."""
    server = require_server(settings, "stop")
    cards = server.list_models()
    served = find_served_name(cards, find_configured(settings, name))
    if served is None:
        listed = ", ".join(cards) or "no model"
        raise AppError(
            ErrorKind.MODEL_NOT_FOUND,
            f"the server at {server.url} does not serve {name}, but {listed}{suggest(name, cards)}",
        )
    if not is_loaded(cards[served]):
        print(f"{served} is not loaded")
        return 0
    server.send("POST", "/v1/models/unload", {"model": served})
    print(f"{served} is unloaded")
    return 0
