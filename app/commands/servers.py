"""The servers that commands use: one that is running already, or one in a child process, which runs
as long as the command needs it.

Knows: the address in the settings, the API key in the environment, HTTP and JSON, streams of
server-sent events, the list of served models; the command that runs a server, its configuration
file, its readiness, its log file. Must not know: what a command asks a server, or why it needs one.

The client is built on the standard library, so that a command starts quickly. Proxies are ignored.

This module is also the program of the child. The child exits if its parent exits for any reason. It
has its own session, so that Ctrl-C in the terminal does not stop it.
"""

import http.client
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast
from urllib.parse import urlsplit

from app import store
from app.commands.client_programs import Endpoint
from app.config.options import (
    CONFIG_VARIABLE,
    KEY_VARIABLE,
    MODELS_VARIABLE,
    OPTIONS,
    TEMPORARY_CONFIG_VARIABLE,
)
from app.config.precedence import ResolvedConfig
from app.config.toml_file import render_toml
from app.core.errors import AppError, ErrorKind
from app.core.settings import ModelSettings, Settings
from app.store.library_names import find_equivalent

# The timeout in seconds of a request that the server answers immediately.
REQUEST_TIMEOUT = 10.0

_KINDS = {
    400: ErrorKind.INVALID,
    401: ErrorKind.UNAUTHORIZED,
    403: ErrorKind.FORBIDDEN,
    404: ErrorKind.MODEL_NOT_FOUND,
    429: ErrorKind.BUSY,
}

# addresses that only programs on this machine reach, and those that mean every address
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_EVERY_ADDRESS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # compared, not bound

ServerPresence = Literal["absent", "foreign", "running"]

# a model in one of these states is in memory, or will be loaded
_LOADED_STATES = frozenset({"queued", "loading", "ready", "stalled", "failed", "unloading"})

# the number of seconds between two readiness checks, and for a shutdown
_POLL_INTERVAL = 0.05
_STOP_TIMEOUT = 10.0

_MAX_REASON_CHARS = 1000

_MODULE = "app.commands.servers"

# the line of the log that follows the opening of the port
_LISTENING = re.compile(r"running on (http://\S+)")


def get_json(
    url: str, api_key: str | None = None, timeout: float = REQUEST_TIMEOUT
) -> tuple[int, Mapping[str, Any]]:
    """Returns the status and the JSON object of a GET request, {} for any other body. Raises
    OSError if there is no server."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=_build_headers(api_key))
    try:
        with opener.open(request, timeout=timeout) as reply:
            status, body = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read()
    except http.client.HTTPException:  # another protocol
        return 0, {}
    return status, _parse_object(body)


def send_json(
    method: str,
    url: str,
    path: str,
    body: Mapping[str, Any],
    api_key: str | None,
    timeout: float | None,
) -> tuple[int, Mapping[str, Any]]:
    """Returns the status and the JSON object of the answer. timeout: in seconds; None waits
    forever. Raises AppError(ENGINE) if there is no answer."""
    with _open(method, url, path, body, api_key, timeout) as response:
        return response.status, _parse_object(response.read())


@contextmanager
def stream_events(
    url: str, path: str, body: Mapping[str, Any], api_key: str | None
) -> Generator[Iterator[str]]:
    """Posts a request, and yields the lines of the server-sent events in its response. Leaving the
    context closes the connection, which cancels the request. Raises AppError for a status other
    than 200, and if the connection breaks."""
    with _open("POST", url, path, body, api_key, None) as response:
        if response.status != 200:
            raise read_error(response.status, _parse_object(response.read()))
        yield _iter_lines(response, url)


def read_error(status: int, body: Mapping[str, Any]) -> AppError:
    """Returns the error in the body of a response, in OpenAI's format or in Ollama's."""
    error: Any = body.get("error")
    if isinstance(error, dict):
        error = cast("dict[str, Any]", error).get("message")
    message = str(error) if error else f"the server answered with status {status}"
    return AppError(_KINDS.get(status, ErrorKind.ENGINE), " ".join(message.split()))


@contextmanager
def _open(
    method: str,
    url: str,
    path: str,
    body: Mapping[str, Any],
    api_key: str | None,
    timeout: float | None,
) -> Generator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    with closing(connection):
        headers = {"Content-Type": "application/json", **_build_headers(api_key)}
        try:
            connection.request(method, path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise _lost_error(url, error) from error
        with closing(response):
            yield response


def _iter_lines(response: http.client.HTTPResponse, url: str) -> Iterator[str]:
    try:
        for line in response:
            yield line.decode(errors="replace").rstrip("\r\n")
    except (OSError, http.client.HTTPException) as error:
        raise _lost_error(url, error) from error


def _lost_error(url: str, error: Exception) -> AppError:
    why = str(error) or type(error).__name__
    return AppError(ErrorKind.ENGINE, f"the connection to the server at {url} was lost: {why}")


def _build_headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _parse_object(body: bytes) -> Mapping[str, Any]:
    try:
        parsed: Any = json.loads(body)
    except ValueError:
        return {}
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}


def get_server_url(settings: Settings) -> str:
    """Returns the address at which programs on this machine reach the server."""
    host = _EVERY_ADDRESS.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def is_local(settings: Settings) -> bool:
    """Returns whether the address in the settings is one of this machine."""
    return settings.host in _LOOPBACK or settings.host in _EVERY_ADDRESS


def get_api_key(environment: Mapping[str, str]) -> str | None:
    """Returns the key of the environment: MLXRUNNER_API_KEY, else the first of
    MLXRUNNER_API_KEYS."""
    first, _, _ = environment.get("MLXRUNNER_API_KEYS", "").partition(",")
    return environment.get(KEY_VARIABLE, "").strip() or first.partition("=")[2].strip() or None


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
        vision="image" in (cards[name].get("input_modalities") or ()),
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
    as any path, is served under its alias or under the name of the folder. Only
    administrators see a server's folders; without them, the names decide."""
    equivalent, folder = find_equivalent(selected.name), _find_folder(selected.name)
    names = [selected.alias, selected.name, f"{selected.name}:latest"]
    names += [selected.name.removesuffix(":latest")]
    names += [] if folder is None else [folder.name]
    names += [] if equivalent is None else [str(equivalent)]
    if folder is not None:
        names = [*(name for name, card in cards.items() if _get_folder(card) == folder), *names]
    return next(
        (
            name
            for name in names
            if name is not None
            and name in cards
            and folder in (None, _get_folder(cards[name]) or folder)
        ),
        None,
    )


def _get_folder(card: Mapping[str, Any]) -> Path | None:
    root = card.get("root")
    return Path(root) if isinstance(root, str) else None


def _find_folder(name: str) -> Path | None:
    try:
        return store.find_model_folder(name)
    except AppError:  # an invalid name, or a folder that cannot be read
        return None


def is_loaded(card: Mapping[str, Any]) -> bool:
    """Returns whether a served model is in memory, or will be loaded."""
    return card.get("state") in _LOADED_STATES


def start_server(
    configuration: ResolvedConfig, folder: Path, environment: Mapping[str, str]
) -> "LaunchedServer":
    """Starts a server with these settings. folder: receives its configuration file and its log.
    environment: without the variables that would override the settings."""
    file = folder / "server.toml"
    file.write_text(render_toml(configuration.settings, configuration.sources), "utf-8")
    # the file holds the settings of all sources; a variable would override it
    replaced = {option.env_var for option in OPTIONS} | {CONFIG_VARIABLE, MODELS_VARIABLE}
    kept = {name: value for name, value in environment.items() if name not in replaced}
    kept[TEMPORARY_CONFIG_VARIABLE] = "1"
    return LaunchedServer(["--config", str(file)], kept, folder / "server.log")


class LaunchedServer:
    """A server process. arguments: those of `mlxrunner serve`. log_file: receives its output.

    Use it as a context manager: the server stops when the context exits.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], log_file: Path
    ) -> None:
        self._log_file = log_file
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                # -P: the user's folder may contain another `app`
                [sys.executable, "-P", "-m", _MODULE, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, "PYTHONPATH": _extend_path(environment)},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_listening(self) -> str:
        """Returns the server's address when it listens, for a server that selects its port. Raises
        AppError(ENGINE) if the server exits."""
        while True:
            found = _LISTENING.search(self._log_file.read_text("utf-8", errors="replace"))
            if found is not None:
                return found[1]
            self._check_running()
            time.sleep(_POLL_INTERVAL)

    def wait_until_ready(self, url: str, report: Callable[[int], None] | None = None) -> None:
        """Returns when the server has loaded its model. The server itself aborts a
        load that makes no progress. report: receives the progress of the load in percent. Raises
        AppError(ENGINE) if the server exits."""
        while True:
            self._check_running()
            try:
                status, _ = get_json(f"{url}/health")
                if status == 200:
                    return
                if report is not None:
                    report(int(get_json(f"{url}/v1/status")[1].get("Progress") or 0))
            except OSError:
                pass
            time.sleep(_POLL_INTERVAL)

    def stop(self) -> None:
        """Stops the server. The program has ended, so no request needs its response."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _check_running(self) -> None:
        if self._process.poll() is not None:
            raise AppError(ErrorKind.ENGINE, f"the server did not start: {self._find_reason()}")

    def _find_reason(self) -> str:
        """Returns the error line of the server, otherwise the last line of its log."""
        text = self._log_file.read_text("utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()] or ["it printed nothing"]
        prefix = "mlxrunner: "
        messages = [line for line in lines if line.startswith(prefix)] or lines
        return messages[-1].removeprefix(prefix)[:_MAX_REASON_CHARS]


def _extend_path(environment: Mapping[str, str]) -> str:
    """Returns a PYTHONPATH with the folder of this package, which may not be installed."""
    known = environment.get("PYTHONPATH")
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([known, root]) if known else root


def _run_child() -> None:
    import runpy

    from app.runners.parent_watch import exit_with_parent

    exit_with_parent(os.getppid())
    sys.argv = ["mlxrunner", "serve", *sys.argv[1:]]
    runpy.run_module("app", run_name="__main__")


if __name__ == "__main__":
    _run_child()
