"""The engine of `mlxrunner run`: a running server, or one that the command starts.

Knows: which of the two serves a model, the download of a missing model. Must not know: chats,
prompts.

A server that the command starts ends with the command, even after an error or a signal
(servers.py). It listens on a free port of the loopback interface and requires a key that only this
process knows.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

from app import store
from app.commands.answer import show_loading
from app.commands.client_programs import Endpoint
from app.commands.servers import (
    RunningServer,
    check_plain_http,
    find_configured,
    find_served_name,
    get_api_key,
    get_server_url,
    is_local,
    probe_server,
    query_endpoint,
    select_endpoint,
    start_server,
)
from app.config.options import KEY_VARIABLE, OPTIONS
from app.config.precedence import ResolvedConfig
from app.core.errors import AppError, ErrorKind
from app.core.models import ModelRecipe
from app.core.settings import ModelSettings, Settings
from app.core.terminal import ProgressLine, print_message
from app.http.api_keys import generate_key
from app.store.installed import derive_model
from app.store.model_names import ModelNotFoundError

# settings that select the server, or that the command itself applies
_CLIENT_FIELDS = frozenset({"host", "port", "pull", "keep_alive"})


class ChatEngine:
    """Connects to models, one at a time. Use it as a context manager: its own server stops when the
    context exits."""

    def __init__(self, configuration: ResolvedConfig) -> None:
        self._configuration = configuration
        self._settings = configuration.settings
        self._own = ExitStack()
        self._progress = ProgressLine(sys.stderr)
        self._has_warned = False
        self._other_server: str | None = None  # runs, but does not serve the model
        self._model: ModelSettings | None = None
        self._load_seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._own.close()

    def find_model(self, name: str) -> ModelSettings:
        """Returns a model with its own settings, if it has any."""
        return find_configured(self._settings, name)

    def connect(self, model: ModelSettings | None) -> Endpoint:
        """Returns the endpoint of a model that is loaded or can be loaded. model: None for the
        default. Stops a server that this process started with another model. Raises AppError, and
        KeyboardInterrupt while the model is downloaded or loaded."""
        endpoint = self._connect(model)
        self._model = model
        return endpoint

    def save(self, endpoint: Endpoint, recipe: ModelRecipe) -> str:
        """Creates a model from the connected one and returns its name. recipe: without the base;
        its messages follow those of the base. Raises AppError(INVALID) for a name that is invalid
        or taken, and AppError if the model cannot be created."""
        if not is_local(self._settings):
            return _save_on_server(endpoint, recipe)
        base = store.find(endpoint.model if self._model is None else self._model.name)
        messages = (*base.first_messages, *(recipe.messages or ()))
        return str(derive_model(base, replace(recipe, base=base.name, messages=messages)))

    def _connect(self, model: ModelSettings | None) -> Endpoint:
        endpoint = self._find_running(model)
        if endpoint is not None:
            self._own.close()
            self._warn_unused_flags(endpoint)
            return endpoint
        self._install(model)
        if self._other_server is not None and model is not None:
            print_message(
                f"the server at {self._other_server} does not serve {model.name}: loading it here"
            )
        self._own.close()
        return self._start(model)

    def take_load_seconds(self) -> float:
        """Returns the time of the last load by a server that this process started, once."""
        seconds, self._load_seconds = self._load_seconds, 0.0
        return seconds

    def _find_running(self, model: ModelSettings | None) -> Endpoint | None:
        """Returns the endpoint on the running server; None if this command must run the model
        itself."""
        settings, url = self._settings, get_server_url(self._settings)
        self._other_server = None
        check_plain_http(settings, "run")
        if settings.port == 0:
            return None
        presence = probe_server(url)
        if presence != "running":
            if not is_local(settings):
                why = "no server" if presence == "absent" else "a program that is not mlxrunner"
                raise AppError(ErrorKind.INVALID, f"there is {why} at {url}: check --host, --port")
            return None
        server = RunningServer(url=url, api_key=get_api_key(os.environ))
        if not is_local(settings):
            return query_endpoint(server, _with_model(settings, model))
        endpoint = select_endpoint(server, server.list_models(), model)
        if endpoint is None:
            self._other_server = url
        return endpoint

    def _warn_unused_flags(self, endpoint: Endpoint) -> None:
        sources = self._configuration.sources
        unused = [
            option.flag
            for option in OPTIONS
            if sources[option.field].startswith("-") and option.field not in _CLIENT_FIELDS
        ]
        if unused and not self._has_warned:
            self._has_warned = True
            flags = ", ".join(unused)
            print_message(f"the server at {endpoint.url} keeps its own settings: no {flags}")

    def _install(self, model: ModelSettings | None) -> None:
        """Downloads a missing model, if --pull is set or the user agrees. Raises AppError if the
        model cannot be found."""
        try:
            store.find(None if model is None else model.name)
        except ModelNotFoundError:
            # imported here, because it imports MLX
            from app.commands.pull import resolve_or_download

            resolve_or_download(_with_model(self._settings, model))

    def _start(self, model: ModelSettings | None) -> Endpoint:
        """Starts a server that runs until the next call or the end of the context."""
        label = "the built-in model" if model is None else model.alias or model.name
        started = time.monotonic()
        try:
            self._progress.show(f"starting the engine for {label}")
            return self._own.enter_context(
                open_own_server(
                    self._configuration,
                    model,
                    lambda percent: show_loading(self._progress, label, percent),
                )
            )
        finally:
            self._progress.erase()
            self._load_seconds = time.monotonic() - started


@contextmanager
def open_own_server(
    configuration: ResolvedConfig, model: ModelSettings | None, report: Callable[[int], None]
) -> Generator[Endpoint]:
    """Runs a server with one model until the context exits. model: None for the built-in model.
    report: receives the progress of the load in percent. Raises AppError(ENGINE) if it does not
    start."""
    key = generate_key()
    own = replace(configuration, settings=_make_own_settings(configuration.settings, model))
    with (
        tempfile.TemporaryDirectory(prefix="mlxrunner-run-") as folder,
        start_server(own, Path(folder), _make_environment(key)) as server,
    ):
        url = server.wait_until_listening()
        server.wait_until_ready(url, report)
        yield query_endpoint(
            RunningServer(url=url, api_key=key), replace(configuration.settings, models=())
        )


def _save_on_server(endpoint: Endpoint, recipe: ModelRecipe) -> str:
    """Creates the model on a server of another machine, which must run with --installed."""
    server = RunningServer(url=endpoint.url, api_key=endpoint.api_key)
    if find_served_name(server.list_models(), ModelSettings(name=recipe.name)) is not None:
        message = f"{recipe.name} exists: choose another name, or delete it first"
        raise AppError(ErrorKind.INVALID, message)
    base = server.send("POST", "/api/show", {"model": endpoint.model})
    messages = [{"role": role, "content": content} for role, content in recipe.messages or ()]
    body = {
        "model": recipe.name,
        "from": endpoint.model,
        "parameters": recipe.parameters,
        "messages": [*(base.get("messages") or ()), *messages],
        "stream": False,
    }
    system = {} if recipe.system is None else {"system": recipe.system}
    server.send("POST", "/api/create", {**body, **system})
    return recipe.name


def _with_model(settings: Settings, model: ModelSettings | None) -> Settings:
    return replace(settings, models=() if model is None else (model,))


def _make_own_settings(settings: Settings, model: ModelSettings | None) -> Settings:
    """Returns the settings of a server with one model, only for this process."""
    return replace(
        settings,
        models=() if model is None else (model,),
        installed=False,
        host="127.0.0.1",
        port=0,
        api_keys=None,
        allow_anyone=False,
        keep_alive=None,
        # its log is read by LaunchedServer
        log_level="info",
        log_format="human",
    )


def _make_environment(key: str) -> Mapping[str, str]:
    others = {name: value for name, value in os.environ.items() if name != "MLXRUNNER_API_KEYS"}
    return {**others, KEY_VARIABLE: key}
