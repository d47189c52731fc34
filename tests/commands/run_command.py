"""`mlxrunner run` in a process and in this one, and the own engines that it starts."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.commands import chat_engine
from app.commands.client_programs import Endpoint
from app.commands.servers import RunningServer, query_endpoint
from app.config.precedence import ResolvedConfig
from app.core.settings import ModelSettings
from tests.commands.thread_server import run_with_settings
from tests.server_process import ROOT, UNTRACED
from tests.terminal_process import open_terminal

ANSWER = (
    "mlxrunner is a small server for language models. It runs them with Apple's MLX and speaks the "
    "OpenAI API."
)
QUESTION = "What is mlxrunner?"

# tokens of the answer, which do not end it
FIRST_WORDS = 6

RunCommand = Callable[..., tuple[int, str, str]]


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs `mlxrunner run` in a process, in an empty home. folder: of the test."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        return {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "HF_HOME": str(self.folder / "hf"),
            "OLLAMA_MODELS": str(self.folder / "ollama"),
            "HF_ENDPOINT": "http://127.0.0.1:9",
        }

    @property
    def history_file(self) -> Path:
        return self.folder / "home" / ".local" / "state" / "mlxrunner" / "chat_history"

    def start(
        self, *arguments: str, environ: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> "subprocess.Popen[str]":
        """environ: further variables."""
        return subprocess.Popen(
            # -P: the folder may contain another `app`
            [sys.executable, "-P", "-m", "app", "run", *arguments],
            cwd=cwd,
            env={**UNTRACED, **self.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def open(self, *arguments: str, **environ: str):
        return open_terminal("run", *arguments, environ={**self.environ, **environ})

    def list_temporary_files(self) -> list[str]:
        return [path.name for path in (self.folder / "tmp").glob("mlxrunner-run-*")]


def list_processes_of(folder: Path) -> list[str]:
    """The processes that have the folder in their environment, on Linux."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(f"TMPDIR={folder}") in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@dataclass(frozen=True)
class OwnEngines:
    """Own engines in threads of this process. models: of those that were started. ended: of those
    that have ended."""

    models: list[str | None] = field(default_factory=list[str | None])
    ended: list[str | None] = field(default_factory=list[str | None])

    @contextlib.contextmanager
    def open(
        self,
        configuration: ResolvedConfig,
        model: ModelSettings | None,
        report: Callable[[int], None],
    ) -> Iterator[Endpoint]:
        """Replaces `open_own_server`."""
        name = None if model is None else model.name
        settings = chat_engine._make_own_settings(configuration.settings, model)
        with run_with_settings(settings) as server:
            self.models.append(name)
            running = RunningServer(url=server.url, api_key=None)
            try:
                yield query_endpoint(running, replace(settings, models=()))
            finally:
                self.ended.append(name)
