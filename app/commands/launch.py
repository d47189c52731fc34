"""`mlxrunner launch`: runs a coding agent that uses this server.

Knows: when to start a server, the process of the program. Must not know: the settings of
each program.
"""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from app.commands.client_programs import (
    PROGRAMS,
    ClientProgram,
    Endpoint,
    ProgramSettings,
    merge_environment,
)
from app.commands.servers import (
    RunningServer,
    check_plain_http,
    find_endpoint,
    get_api_key,
    get_server_url,
    query_endpoint,
    start_server,
)
from app.config.options import KEY_VARIABLE
from app.config.precedence import ResolvedConfig
from app.core.errors import AppError, ErrorKind
from app.core.runtime import handle_signals
from app.core.settings import Settings
from app.core.terminal import print_message
from app.store.model_names import ModelNotFoundError

# the context length in tokens below which a coding agent cannot work: its first prompt has ten
# thousand tokens or more
_MIN_CONTEXT = 32_768

# the folder that --print shows, since it creates none
_EXAMPLE_FOLDER = Path("TEMPORARY-FOLDER")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The command line. program: its name. arguments: the program's arguments. print_only: whether
    to print the settings instead of running the program."""

    program: str
    arguments: tuple[str, ...] = ()
    print_only: bool = False


def launch(options: LaunchOptions, configuration: ResolvedConfig) -> int:
    """Runs a program and returns its exit status. For a program that was killed by a signal, it is
    128 plus the signal, as in a shell.

    Raises AppError(INVALID) for a program that is not installed and for settings that exclude a
    launch, and AppError for a server that cannot be used or started.
    """
    program = PROGRAMS[options.program]
    settings = configuration.settings
    _check_settings(settings)
    if options.print_only:
        endpoint = find_endpoint(settings) or _predict_endpoint(settings)
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
        endpoint = find_endpoint(settings)
        if endpoint is None:
            # a load may take minutes
            _check_context(_predict_installed(settings), options.program)
            endpoint = _start_server(stack, configuration, folder)
        _check_context(endpoint, options.program)
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
    check_plain_http(settings, "launch")
    if settings.port == 0:
        message = "launch needs a fixed port: --port 0 selects any free port"
        raise AppError(ErrorKind.INVALID, message, param="port")


def _start_server(stack: ExitStack, configuration: ResolvedConfig, folder: Path) -> Endpoint:
    """Starts a server that runs until the stack is closed."""
    settings, log = configuration.settings, folder / "server.log"
    url = get_server_url(settings)
    print_message(f"starting a server at {url} (log: {log})")
    server = stack.enter_context(start_server(configuration, folder, os.environ))
    server.wait_until_ready(url)
    return query_endpoint(RunningServer(url=url, api_key=get_api_key(os.environ)), settings)


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


def _predict_installed(settings: Settings) -> Endpoint | None:
    """Like `_predict_endpoint`; None for a model that the server would download."""
    try:
        return _predict_endpoint(settings)
    except ModelNotFoundError:
        return None


def _check_context(endpoint: Endpoint | None, program: str) -> None:
    """Raises AppError(INVALID) if a coding agent cannot work with the context of the model."""
    if endpoint is None or endpoint.context_length >= _MIN_CONTEXT:
        return
    raise AppError(
        ErrorKind.INVALID,
        f"{endpoint.model} has a context of {endpoint.context_length} tokens, and coding agents "
        f"need {_MIN_CONTEXT} or more: choose another model, or raise --context or --memory if "
        f"one of them limits it; `mlxrunner launch {program} --print` shows the settings to run it "
        "anyway",
        param="context",
    )


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the program in the foreground and returns its exit status."""
    with subprocess.Popen(command, env={**environment}) as process:

        def forward(number: int, frame: FrameType | None) -> None:
            # Ctrl-C also reaches the program, which is in the same process group
            if number != signal.SIGINT:
                process.send_signal(number)

        with handle_signals(_SIGNALS, forward):
            status = process.wait()
    return status if status >= 0 else 128 - status
