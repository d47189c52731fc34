"""A server in a child process, which runs as long as its parent needs it.

Knows: the command that runs a server, its configuration file, its readiness, its log file. Must not
know: the reason why the parent needs a server.

This module is also the program of the child. The child exits if its parent exits for any reason. It
has its own session, so that Ctrl-C in the terminal does not stop it.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from app.commands.server_client import get_json
from app.config.options import CONFIG_VARIABLE, MODELS_VARIABLE, OPTIONS
from app.config.precedence import ResolvedConfig
from app.config.toml_file import render_toml
from app.core.errors import AppError, ErrorKind

# the number of seconds between two readiness checks, and for a shutdown
_POLL_INTERVAL = 0.05
_STOP_TIMEOUT = 10.0

_MAX_REASON_CHARS = 1000

_MODULE = "app.commands.launched_server"

# the line of the log that follows the opening of the port
_LISTENING = re.compile(r"running on (http://\S+)")


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
    return LaunchedServer(["--config", str(file)], kept, folder / "server.log")


class LaunchedServer:
    """A server process. arguments: of `mlxrunner serve`. log_file: receives its output.

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        """Returns when the server has loaded its model. A load that makes no progress ends by the
        server's own timeout. report: gets the progress of the load in percent. Raises
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
