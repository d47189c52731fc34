"""The server that is already running on this machine, as the other commands find and use it.

Knows: the address in the settings, the API key in the environment, the list of served models. Must
not know: how a server is started, what a command asks it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from app import store
from app.commands.client_programs import Endpoint
from app.commands.server_address import KEY_VARIABLE, get_api_key, get_server_url
from app.commands.server_client import get_json, read_error, send_json
from app.core.errors import AppError, ErrorKind
from app.core.settings import ModelSettings, Settings
from app.store.library_names import find_equivalent

ServerPresence = Literal["absent", "foreign", "running"]

# a model in one of these states is in memory, or on its way there
_LOADED_STATES = frozenset({"queued", "loading", "ready", "stalled", "failed", "unloading"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A running server. url: without a path. api_key: None if the environment has none."""

    url: str
    api_key: str | None

    def get(self, path: str) -> Mapping[str, Any]:
        """Returns the object of a GET request. Raises AppError for any other answer."""
        return self._check(*get_json(f"{self.url}{path}", self.api_key))

    def send(
        self, method: str, path: str, body: Mapping[str, Any], timeout: float | None = None
    ) -> Mapping[str, Any]:
        """Returns the object of the answer. timeout: in seconds; None waits forever. Raises
        AppError for an answer that is not a success."""
        return self._check(*send_json(method, self.url, path, body, self.api_key, timeout))

    def _check(self, status: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if status == 401 or (status == 403 and self.api_key is None):
            message = (
                f"the server at {self.url} requires an API key: set {KEY_VARIABLE} to a valid one"
            )
            raise AppError(ErrorKind.UNAUTHORIZED, message)
        if status != 200:
            raise read_error(status, body)
        return body

    def list_models(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns the served models by name, in order. Raises AppError(UNAUTHORIZED) without a
        valid key."""
        return {str(card.get("id")): card for card in self.get("/v1/models").get("data", ())}


def check_plain_http(settings: Settings, command: str) -> None:
    """Raises AppError(INVALID) for settings of a server that the command cannot reach."""
    if settings.tls_cert is not None:
        message = f"{command} uses plain HTTP on this machine: remove --tls-cert and --tls-key"
        raise AppError(ErrorKind.INVALID, message, param="tls_cert")


def probe_server(url: str) -> ServerPresence:
    """Returns whether a server of ours, another program or nothing listens there."""
    try:
        status, body = get_json(f"{url}/v1/status")
    except OSError:
        return "absent"
    return "running" if status == 200 and "ContextLength" in body else "foreign"


def find_server(settings: Settings) -> RunningServer | None:
    """Returns the running server; None if there is none. Raises AppError(INVALID) if another
    program uses the port."""
    url = get_server_url(settings)
    presence = "absent" if settings.port == 0 else probe_server(url)
    if presence == "foreign":
        message = f"{url} is not an mlxrunner server: choose another --port"
        raise AppError(ErrorKind.INVALID, message, param="port")
    if presence == "absent":
        return None
    return RunningServer(url=url, api_key=get_api_key(os.environ))


def require_server(settings: Settings, command: str) -> RunningServer:
    """Returns the running server. Raises AppError(INVALID) if there is none."""
    check_plain_http(settings, command)
    server = find_server(settings)
    if server is None:
        raise AppError(
            ErrorKind.INVALID,
            f"no server is running at {get_server_url(settings)}: start one with "
            "`mlxrunner serve`, or select another with --host and --port",
        )
    return server


def find_endpoint(settings: Settings) -> Endpoint | None:
    """Returns the endpoint of the running server; None if no server is running. Raises
    AppError(INVALID) if another program uses the port, and the AppErrors of `query_endpoint`."""
    server = find_server(settings)
    return None if server is None else query_endpoint(server, settings)


def query_endpoint(server: RunningServer, settings: Settings) -> Endpoint:
    """Returns the endpoint of the selected model, by default the first one. Raises
    AppError(UNAUTHORIZED) without a valid key, and AppError(MODEL_NOT_FOUND) for a model that the
    server does not serve."""
    cards = server.list_models()
    selected = settings.models[0] if settings.models else None
    endpoint = select_endpoint(server, cards, selected)
    if endpoint is not None:
        return endpoint
    listed = ", ".join(cards) or "no model"
    missing = "" if selected is None else f" and not {selected.name}"
    raise AppError(
        ErrorKind.MODEL_NOT_FOUND,
        f"the server at {server.url} serves {listed}{missing}: choose another model, or another "
        "--port to start a second server",
    )


def select_endpoint(
    server: RunningServer, cards: Mapping[str, Mapping[str, Any]], selected: ModelSettings | None
) -> Endpoint | None:
    """Returns the endpoint of a model, by default the first one; None if it is not served."""
    name = next(iter(cards), None) if selected is None else find_served_name(cards, selected)
    if name is None:
        return None
    return Endpoint(
        url=server.url,
        model=name,
        context_length=int(cards[name].get("context_length") or 0),
        api_key=server.api_key,
    )


def find_configured(settings: Settings, name: str) -> ModelSettings:
    """Returns the model of the settings that has this name or alias, or is in this folder;
    otherwise a model without settings."""
    folder = _find_folder(name)
    for model in settings.models:
        same_folder = folder is not None and folder == _find_folder(model.name)
        if same_folder or name in (model.name, model.alias):
            return model
    return ModelSettings(name=name)


def find_served_name(cards: Mapping[str, Mapping[str, Any]], selected: ModelSettings) -> str | None:
    """Returns the name under which the server serves a model; None if it does not. A folder, given
    as any path, is served under its alias or under the name of the folder."""
    equivalent, folder = find_equivalent(selected.name), _find_folder(selected.name)
    names = [selected.alias, selected.name, f"{selected.name}:latest"]
    names += [selected.name.removesuffix(":latest")]
    names += [] if folder is None else [folder.name]
    names += [] if equivalent is None else [str(equivalent)]
    return next((name for name in names if name in cards), None)


def _find_folder(name: str) -> Path | None:
    try:
        return store.find_model_folder(name)
    except AppError:  # an invalid name, or a folder that cannot be read
        return None


def is_loaded(card: Mapping[str, Any]) -> bool:
    """Returns whether a served model is in memory, or on its way there."""
    return card.get("state") in _LOADED_STATES
