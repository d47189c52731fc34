"""`mlxrunner launch`: a program that records what it gets, and servers.

Most tests run the command in this process, and tests of signals run it in a separate process. The
servers that it starts are processes, whose engines are threads to save time.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from app import cli
from app.core.ports import ModelCard
from app.core.settings import Settings
from app.http.api_keys import Keyring
from tests import tiny
from tests.api.asgi import serve_app
from tests.commands.thread_server import ThreadServer
from tests.fakes import FakeGenerate, build_fake_app
from tests.server_process import ROOT, TIMEOUT, UNTRACED
from tests.waiting import wait_until

KEY = "mr-0123456789abcdef0123456789abcdef"

# Records its arguments, its environment and the server's answer, then does what its first argument
# says: exits with that status, or waits for a signal. Ctrl-C ends it with status 5, or is only
# recorded if the program is to keep running.
FAKE_PROGRAM = """
import json, os, signal, sys, time, urllib.request
def write(path, text):
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)
def interrupt(*_):
    if sys.argv[1] == "wait":
        sys.exit(5)
    write({interrupts!r}, "Ctrl-C")
signal.signal(signal.SIGINT, interrupt)
with urllib.request.urlopen(os.environ["ANTHROPIC_BASE_URL"] + "/health") as reply:
    health = json.load(reply)
record = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "health": health}}
write({record!r}, json.dumps(record))
while sys.argv[1] in ("wait", "stay"):
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Runs `mlxrunner launch claude` with a fake program. folder: of the test. patch, capture: of
    this process."""

    folder: Path
    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]

    @property
    def record_file(self) -> Path:
        return self.folder / "record.json"

    @property
    def interrupts_file(self) -> Path:
        return self.folder / "interrupts"

    @property
    def environ(self) -> dict[str, str]:
        return {
            **UNTRACED,
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
        }

    def start(
        self, *arguments: str, environ: dict[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """In a separate process group, which gets Ctrl-C."""
        return subprocess.Popen(
            [sys.executable, "-m", "app", "launch", *arguments],
            cwd=ROOT,
            env={**self.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str]:
        """Runs it in this process. Returns the exit status and the output."""
        for name, value in {**self.environ, **(environ or {})}.items():
            self.patch.setenv(name, value)
        self.patch.setattr(tempfile, "tempdir", None)  # which has known another TMPDIR
        self.capture.readouterr()
        status = cli.main(["launch", *arguments])
        out, err = self.capture.readouterr()
        return status, out + err

    def read_record(self) -> dict[str, Any]:
        return json.loads(self.record_file.read_text())

    def list_temporary_files(self) -> list[str]:
        return [path.name for path in (self.folder / "tmp").glob("mlxrunner-launch-*")]

    def list_home(self) -> list[str]:
        return [path.name for path in (self.folder / "home").iterdir()]


@pytest.fixture
def launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Launcher:
    for name in ("bin", "home", "tmp"):
        (tmp_path / name).mkdir()
    found = Launcher(folder=tmp_path, patch=monkeypatch, capture=capfd)
    program = tmp_path / "bin" / "claude"
    code = tmp_path / "program.py"
    code.write_text(
        FAKE_PROGRAM.format(record=str(found.record_file), interrupts=str(found.interrupts_file))
    )
    # the path of Python may contain a space, which a line #! does not allow
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{code}" "$@"\n')
    program.chmod(0o755)
    return found


@contextmanager
def serve_cards(*cards: ModelCard) -> Iterator[ThreadServer]:
    """A server with a key, without an engine."""
    keyring = Keyring.from_settings(Settings(), {"MLXRUNNER_API_KEY": KEY})
    app = build_fake_app(FakeGenerate(cards=cards), Settings(), keyring=keyring)
    with serve_app(app) as url:
        yield ThreadServer(url)


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadServer]:
    with serve_cards(
        ModelCard(id="builtin", created=0, context_length=65_536),
        ModelCard(id="short", created=0, context_length=32_767),
    ) as server:
        yield server


@pytest.fixture
def agent_model(tmp_path: Path) -> Path:
    """A model whose context is long enough for a coding agent."""
    return tiny.write(tmp_path / "models" / "agent", max_position_embeddings=65_536)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_serving(port: int | str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def with_port(port: int | str, *arguments: str) -> tuple[str, ...]:
    return ("claude", "--port", str(port), *arguments)


def with_thread(port: int, *arguments: str) -> tuple[str, ...]:
    """Returns the arguments of a command that starts a server."""
    return with_port(port, "--runner", "thread", *arguments)


class TestARunningServer:
    def test_the_program_gets_its_settings_and_its_arguments(
        self, launcher: Launcher, server: ThreadServer
    ):
        arguments = with_port(server.port, "--", "7", "--help", "--", "-p")
        environ = {"MLXRUNNER_API_KEY": KEY, "ANTHROPIC_API_KEY": "sk-ant"}
        status, output = launcher.run(*arguments, environ=environ)
        assert status == 7, output
        record = launcher.read_record()
        assert record["arguments"] == ["7", "--help", "--", "-p"]
        variables = record["environment"]
        assert variables["ANTHROPIC_AUTH_TOKEN"] == KEY
        assert variables["ANTHROPIC_MODEL"] == "builtin"
        assert "ANTHROPIC_API_KEY" not in variables
        assert (launcher.list_temporary_files(), launcher.list_home()) == ([], [])
        assert is_serving(server.port)

    def test_a_context_that_is_too_short_is_an_error(
        self, launcher: Launcher, server: ThreadServer
    ):
        """The agent was started, and its first request failed."""
        arguments = with_port(server.port, "short", "--", "0")
        status, output = launcher.run(*arguments, environ={"MLXRUNNER_API_KEY": KEY})
        assert status == 1
        assert output.startswith(
            "mlxrunner: short has a context of 32767 tokens, and coding agents need 32768 or more: "
        )
        assert "`mlxrunner launch claude --print` shows the settings" in output
        assert not launcher.record_file.exists()

    @pytest.mark.parametrize("path", ["models/agent", "./models/agent/", "~/agent", "{}", "."])
    def test_a_folder_has_one_name(
        self, launcher: Launcher, path: str, agent_model: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """A served folder was found only by its name, not by its path."""
        monkeypatch.chdir(agent_model if path == "." else launcher.folder)
        (launcher.folder / "home" / "agent").symlink_to(agent_model)
        card = ModelCard(id="agent", created=0, context_length=65_536)
        with serve_cards(card) as server:
            arguments = with_port(server.port, path.format(agent_model), "--", "0")
            status, output = launcher.run(*arguments, environ={"MLXRUNNER_API_KEY": KEY})
        assert status == 0, output
        assert launcher.read_record()["environment"]["ANTHROPIC_MODEL"] == "agent"

    def test_a_missing_key_is_one_line(self, launcher: Launcher, server: ThreadServer):
        status, output = launcher.run(*with_port(server.port, "--", "0"))
        assert (status, output) == (
            1,
            f"mlxrunner: the server at {server.url} requires an API key: set MLXRUNNER_API_KEY to "
            "a valid one\n",
        )

    def test_the_keys_of_several_users_are_used_too(self, launcher: Launcher, server: ThreadServer):
        environ = {"MLXRUNNER_API_KEYS": f"me={KEY},other={KEY}x"}
        status, output = launcher.run(*with_port(server.port, "--", "0"), environ=environ)
        assert status == 0, output

    def test_a_model_that_it_does_not_serve_is_one_line(
        self, launcher: Launcher, server: ThreadServer
    ):
        arguments = with_port(server.port, "org/other", "--", "0")
        status, output = launcher.run(*arguments, environ={"MLXRUNNER_API_KEY": KEY})
        assert status == 1
        assert re.fullmatch(
            r"mlxrunner: the server at .* serves builtin, short and not .*\n", output
        )

    def test_print_shows_its_model(self, launcher: Launcher, server: ThreadServer):
        arguments = with_port(server.port, "--print")
        status, output = launcher.run(*arguments, environ={"MLXRUNNER_API_KEY": KEY})
        assert status == 0
        assert f"export ANTHROPIC_BASE_URL={server.url}\n" in output
        assert KEY not in output
        assert not launcher.record_file.exists()

    def test_ctrl_c_ends_the_program_with_its_own_status(
        self, launcher: Launcher, server: ThreadServer
    ):
        environ = {"MLXRUNNER_API_KEY": KEY}
        process = launcher.start(*with_port(server.port, "--", "wait"), environ=environ)
        wait_until(launcher.record_file.exists, limit=TIMEOUT)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 5, output


class TestAStartedServer:
    def test_the_server_ends_with_the_program(
        self,
        launcher: Launcher,
        free_port: int,
        agent_model: Path,
        monkeypatch: pytest.MonkeyPatch,
    ):
        """It has the settings of flags and variables. A flag overrides a variable, which the server
        must not read again."""
        monkeypatch.chdir(agent_model.parent)
        arguments = with_thread(free_port, "./agent", "--context", "40000", "--", "3")
        environ = {"MLXRUNNER_CONTEXT": "512", "MLXRUNNER_API_KEY": KEY}
        status, output = launcher.run(*arguments, environ=environ)
        assert status == 3, output
        assert f"starting a server at http://127.0.0.1:{free_port}" in output
        record = launcher.read_record()
        assert record["health"] == {"status": "ok"}
        assert record["environment"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40000"
        assert record["environment"]["ANTHROPIC_MODEL"] == "agent"
        assert record["environment"]["ANTHROPIC_AUTH_TOKEN"] == KEY
        assert not is_serving(free_port)
        assert (launcher.list_temporary_files(), launcher.list_home()) == ([], [])

    def test_ctrl_c_belongs_to_the_program_and_a_termination_signal_ends_both(
        self, launcher: Launcher, free_port: int, agent_model: Path
    ):
        process = launcher.start(*with_thread(free_port, str(agent_model), "--", "stay"))
        wait_until(launcher.record_file.exists, limit=TIMEOUT)
        os.killpg(process.pid, signal.SIGINT)
        wait_until(launcher.interrupts_file.exists)
        assert is_serving(free_port)
        process.terminate()
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 128 + signal.SIGTERM, output
        assert not is_serving(free_port)
        assert launcher.list_temporary_files() == []

    def test_the_server_ends_even_if_launch_is_killed(
        self, launcher: Launcher, free_port: int, agent_model: Path
    ):
        process = launcher.start(*with_thread(free_port, str(agent_model), "--", "wait"))
        wait_until(launcher.record_file.exists, limit=TIMEOUT)
        assert is_serving(free_port)
        process.kill()
        wait_until(lambda: not is_serving(free_port))
        os.killpg(process.pid, signal.SIGKILL)  # the program
        process.communicate(timeout=TIMEOUT)

    def test_a_model_that_cannot_be_served_is_one_line(self, launcher: Launcher, free_port: int):
        arguments = with_port(free_port, str(launcher.folder / "bin"), "--", "0")
        status, output = launcher.run(*arguments)
        assert status == 1
        assert output.splitlines()[-1] == (
            f"mlxrunner: {launcher.folder / 'bin'} has no config.json: it is not a model folder"
        )
        assert launcher.list_temporary_files() == []

    @pytest.mark.parametrize("limit", ["--context", "--memory"])
    def test_no_model_is_loaded_for_a_context_that_is_too_short(
        self, launcher: Launcher, free_port: int, agent_model: Path, limit: str
    ):
        """The context is too short because of the option, or because of the memory."""
        value = {"--context": "2048", "--memory": "10MB"}[limit]
        arguments = with_port(free_port, str(agent_model), limit, value, "--", "0")
        status, output = launcher.run(*arguments)
        assert status == 1
        assert re.match(r"mlxrunner: agent has a context of \d{4,5} tokens, and coding", output)
        assert not launcher.record_file.exists()


def test_another_program_on_the_port_is_one_line(capsys: pytest.CaptureFixture[str]):
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        port = other.server_address[1]
        assert cli.main(["launch", "claude", "--print", "--port", str(port)]) == 1
        other.shutdown()
    message = capsys.readouterr().err.splitlines()[-1]
    assert message == (
        f"mlxrunner: http://127.0.0.1:{port} is not an mlxrunner server: choose another --port"
    )


def test_a_program_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["launch", "continue"]) == 1
    assert capsys.readouterr().err == (
        "mlxrunner: cn is not installed: run `npm install -g @continuedev/cli`\n"
    )


def test_print_without_a_server_predicts_the_model(
    free_port: int, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["launch", "aider", "--print", "--host", "::", "--port", str(free_port)]) == 0
    output = capsys.readouterr().out
    assert f"export OPENAI_API_BASE='http://[::1]:{free_port}/v1'\n" in output
    assert "export AIDER_MODEL=openai/builtin\n" in output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tls-cert", "a", "--tls-key", "b"], "launch uses plain HTTP on this machine"),
        (["--port", "0"], "launch needs a fixed port"),
    ],
)
def test_settings_that_exclude_a_launch_are_rejected(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["launch", "claude", *arguments]) == 1
    assert reason in capsys.readouterr().err


def test_an_unknown_program_is_rejected_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(["launch", "emacs"])
    assert caught.value.code == 2
    assert (
        "must be claude or codex or opencode or aider or cline or continue"
        in capsys.readouterr().err
    )
