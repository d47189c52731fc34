"""`mlxrunner launch`: runs a coding agent that uses this server.

Knows: how to find or start a server, the process of the program. Must not know: the settings of
each program.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from app.commands.client_programs import (
    PROGRAMS,
    ClientProgram,
    Endpoint,
    ProgramSettings,
    merge_environment,
)
from app.commands.launched_server import LaunchedServer, get_json
from app.commands.server_address import KEY_VARIABLE, get_api_key, get_server_url
from app.config.options import CONFIG_VARIABLE, MODELS_VARIABLE, OPTIONS
from app.config.precedence import ResolvedConfig
from app.config.toml_file import render_toml
from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings

# the context length in tokens below which a coding agent cannot work: its first prompt has ten
# thousand tokens or more
_MIN_CONTEXT = 32_768

# the folder that --print shows, since it creates none
_EXAMPLE_FOLDER = Path("TEMPORARY-FOLDER")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The command line. program: its name. arguments: of the program. print_only: whether to print
    the settings instead of running the program."""

    program: str
    arguments: tuple[str, ...] = ()
    print_only: bool = False


def launch(options: LaunchOptions, configuration: ResolvedConfig) -> int:
    """Runs a program and returns its exit status. A program that a signal ended has the status of
    a shell, 128 plus the signal.

    Raises AppError(INVALID) for a program that is not installed and for settings that exclude a
    launch, and AppError for a server that cannot be used or started.
    """
    program = PROGRAMS[options.program]
    settings = configuration.settings
    _check_settings(settings)
    if options.print_only:
        endpoint = _find_endpoint(settings) or _predict_endpoint(settings)
        for line in render_settings(program, endpoint, options.arguments):
            print(line)
        return 0
    executable = shutil.which(program.executable)
    if executable is None:
        raise AppError(
            ErrorKind.INVALID,
            f"{program.executable} is not installed: run `{program.installation}`",
        )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlxrunner-launch-")))
        endpoint = _find_endpoint(settings)
        if endpoint is None:
            endpoint = _start_server(stack, configuration, folder)
        if endpoint.context_length < _MIN_CONTEXT:
            _warn_short_context(endpoint)
        program_settings = program.configure(endpoint, folder)
        for name, text in program_settings.files.items():
            (folder / name).write_text(text, "utf-8")
        command = [executable, *program_settings.arguments, *options.arguments]
        return _run(command, merge_environment(os.environ, program_settings, endpoint))


def render_settings(
    program: ClientProgram, endpoint: Endpoint, arguments: Sequence[str]
) -> Iterator[str]:
    """Yields the lines of a shell script that runs the program with the same settings. The script
    names the variable of the API key instead of the key."""
    shown = endpoint if endpoint.api_key is None else replace(endpoint, api_key=f"${KEY_VARIABLE}")
    settings = program.configure(shown, _EXAMPLE_FOLDER)
    yield f"# {program.name}: {endpoint.model} at {endpoint.url}, {endpoint.context_length} tokens"
    for name, text in settings.files.items():
        yield f"# {_EXAMPLE_FOLDER / name}:"
        yield from (f"#   {line}" for line in text.splitlines())
    yield from _render_variables(settings)
    words = [program.executable, *settings.arguments, *arguments]
    yield " ".join(_quote(word) for word in words)


def _render_variables(settings: ProgramSettings) -> Iterator[str]:
    for name, value in settings.variables.items():
        if value is None:
            yield f"unset {name}"
        elif (name, value) != (KEY_VARIABLE, f"${KEY_VARIABLE}"):
            yield f"export {name}={_quote(value)}"


def _quote(word: str) -> str:
    """Quotes a word for a shell, except for a reference to the variable of the key."""
    return f'"{word}"' if word == f"${KEY_VARIABLE}" else shlex.quote(word)


def _check_settings(settings: Settings) -> None:
    if settings.tls_cert is not None:
        message = "launch uses plain HTTP on this machine: remove --tls-cert and --tls-key"
        raise AppError(ErrorKind.INVALID, message, param="tls_cert")
    if settings.port == 0:
        message = "launch needs a fixed port: --port 0 selects any free port"
        raise AppError(ErrorKind.INVALID, message, param="port")


def _find_endpoint(settings: Settings) -> Endpoint | None:
    """Returns the endpoint of the running server; None if no server is running. Raises
    AppError(INVALID) if another program uses the port, and the AppErrors of `_query_endpoint`."""
    url = get_server_url(settings)
    try:
        status, body = get_json(f"{url}/v1/status")
    except OSError:
        return None
    if status != 200 or "ContextLength" not in body:
        message = f"{url} is not an mlxrunner server: choose another --port"
        raise AppError(ErrorKind.INVALID, message, param="port")
    return _query_endpoint(url, settings)


def _query_endpoint(url: str, settings: Settings) -> Endpoint:
    """Returns the endpoint of the selected model, by default the first one. Raises
    AppError(UNAUTHORIZED) without a valid key, and AppError(MODEL_NOT_FOUND) for a model that the
    server does not serve."""
    key = get_api_key(os.environ)
    status, body = get_json(f"{url}/v1/models", key)
    if status in (401, 403):
        message = f"the server at {url} requires an API key: set {KEY_VARIABLE} to a valid one"
        raise AppError(ErrorKind.UNAUTHORIZED, message)
    cards: Mapping[str, Mapping[str, Any]] = {
        str(card.get("id")): card for card in body.get("data", ())
    }
    selected = settings.models[0] if settings.models else None
    names = (
        cards if selected is None else [selected.alias, selected.name, f"{selected.name}:latest"]
    )
    for name in names:
        if name in cards:
            return Endpoint(
                url=url,
                model=str(name),
                context_length=int(cards[name].get("context_length") or 0),
                api_key=key,
            )
    listed = ", ".join(cards) or "no model"
    missing = "" if selected is None else f" and not {selected.name}"
    raise AppError(
        ErrorKind.MODEL_NOT_FOUND,
        f"the server at {url} serves {listed}{missing}: choose another model, or another --port "
        "to start a second server",
    )


def _start_server(stack: ExitStack, configuration: ResolvedConfig, folder: Path) -> Endpoint:
    """Starts a server that runs until the stack is closed."""
    settings = configuration.settings
    file, log = folder / "server.toml", folder / "server.log"
    file.write_text(render_toml(settings, configuration.sources), "utf-8")
    # the file holds the settings of all sources; a variable would override it
    replaced = {option.env_var for option in OPTIONS} | {CONFIG_VARIABLE, MODELS_VARIABLE}
    environment = {name: value for name, value in os.environ.items() if name not in replaced}
    url = get_server_url(settings)
    print(f"mlxrunner: starting a server at {url} (log: {log})", file=sys.stderr, flush=True)
    server = LaunchedServer(["--config", str(file)], environment, log)
    stack.enter_context(server)
    server.wait_until_ready(url)
    return _query_endpoint(url, settings)


def _predict_endpoint(settings: Settings) -> Endpoint:
    """Returns the endpoint that a started server would have. Raises AppError if the model is not
    installed or cannot be served."""
    from app import store
    from app.engine.fit import estimate_fit
    from app.engine.model_info import complete_config

    model = settings.models[0] if settings.models else None
    files = complete_config(store.find(model.name if model else None))
    fit = estimate_fit(files, settings.for_model(model) if model else settings)
    return Endpoint(
        url=get_server_url(settings),
        model=(model.alias if model else None) or files.name,
        context_length=fit.context_that_fits or fit.context,
        api_key=get_api_key(os.environ),
    )


def _warn_short_context(endpoint: Endpoint) -> None:
    print(
        f"mlxrunner: {endpoint.model} has a context of {endpoint.context_length} tokens; coding "
        f"agents need {_MIN_CONTEXT} or more",
        file=sys.stderr,
        flush=True,
    )


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the program in the foreground and returns its exit status."""
    with subprocess.Popen(command, env={**environment}) as process, _forward_signals(process):
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _forward_signals(process: "subprocess.Popen[bytes]") -> Generator[None]:
    """Leaves Ctrl-C to the program, which is in the same process group and decides whether to end.
    Forwards the other signals, which only this process receives."""

    def handle(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            process.send_signal(number)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
