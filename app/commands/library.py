"""`mlxrunner rm` and `mlxrunner cp`: delete and copy installed models.

Knows: the running server, which may have loaded a model. Must not know: the layout of the stores.
"""

import os

from app import store
from app.commands.servers import (
    RunningServer,
    find_configured,
    find_served_name,
    get_api_key,
    get_server_url,
    is_loaded,
    probe_server,
)
from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.store.installed import RemovableModel, copy_model, delete_model, find_removable


def remove(names: list[str], settings: Settings, force: bool) -> int:
    """Deletes models and returns the exit status. It deletes none of them if one cannot be deleted.
    force: delete a model even if the running server has loaded it. Raises AppError for a model that
    is not installed, cannot be deleted or is loaded."""
    models = {str(found.name): found for found in map(find_removable, names)}
    if not force:
        _check_unused(names, models, settings)
    for name, model in models.items():
        delete_model(model)
        print(f"{name} is deleted")
    return 0


def copy(source: str, destination: str) -> int:
    """Copies a model and returns the exit status. Raises AppError for a model that is not
    installed, and for a name that is taken."""
    name = copy_model(store.find(source), destination)
    print(f"{source} is copied to {name}")
    return 0


def _check_unused(names: list[str], models: dict[str, RemovableModel], settings: Settings) -> None:
    """Raises AppError(INVALID) if the running server has loaded one of the models, or does not
    report whether it has."""
    # the address of a server with TLS, or on any free port, is unknown
    if settings.tls_cert is not None or settings.port == 0:
        return
    url = get_server_url(settings)
    if probe_server(url) != "running":
        return
    server = RunningServer(url=url, api_key=get_api_key(os.environ))
    try:
        cards = server.list_models()
    except AppError as error:
        if error.kind is not ErrorKind.UNAUTHORIZED:
            raise
        raise AppError(error.kind, f"{error.message}, or delete the model with --force") from error
    for name in (*names, *models):
        served = find_served_name(cards, find_configured(settings, name))
        if served is not None and is_loaded(cards[served]):
            raise AppError(
                ErrorKind.INVALID,
                f"the server at {server.url} has loaded {served}: run `mlxrunner stop {served}` "
                "first, or delete it with --force",
            )
