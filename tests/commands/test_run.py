"""`mlxrunner run` in pipes and in terminals, with its own engine and with a running server."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from app import store
from app.commands import chat_engine
from app.commands.chat_engine import ChatEngine
from app.commands.run import join_prompt, split_words
from app.config.precedence import resolve_config
from app.core.errors import AppError
from app.core.model_details import ModelRecipe
from app.core.settings import ModelSettings
from tests.server_process import ROOT, TIMEOUT, UNTRACED, ServerProcess, run_server
from tests.terminal_process import CTRL_C, CTRL_D, ENTER, TerminalProcess, open_terminal
from tests.throttle import HELD_PROGRESS, Throttle
from tests.waiting import wait_until

ANSWER = (
    "mlxrunner is a small server for language models. It runs them with Apple's MLX and speaks the "
    "OpenAI API."
)
QUESTION = "What is mlxrunner?"

ESCAPE = "\x1b"


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs `mlxrunner run` in an empty home. folder: of the test."""

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

    def start(self, *arguments: str, environ: dict[str, str] | None = None):
        return subprocess.Popen(
            [sys.executable, "-m", "app", "run", *arguments],
            cwd=ROOT,
            env={**UNTRACED, **self.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """The exit status, stdout and stderr."""
        process = self.start(*arguments)
        out, err = process.communicate(stdin, timeout=2 * TIMEOUT)
        return process.returncode, out, err

    def open(self, *arguments: str, **environ: str):
        return open_terminal("run", *arguments, environ={**self.environ, **environ})

    def list_temporary_files(self) -> list[str]:
        return [path.name for path in (self.folder / "tmp").glob("mlxrunner-run-*")]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    return Runner(folder=tmp_path)


@pytest.fixture(scope="module")
def throttle(tmp_path_factory: pytest.TempPathFactory) -> Throttle:
    return Throttle(tmp_path_factory.mktemp("throttle") / "code")


@pytest.fixture(scope="module")
def server(throttle: Throttle) -> Iterator[ServerProcess]:
    """A server whose engine can be throttled. Each prompt token is one step."""
    with run_server("--prefill-chunk", "1", environ=throttle.variables) as server:
        yield server


@pytest.fixture
def slow(throttle: Throttle) -> Iterator[Throttle]:
    yield throttle.on()
    throttle.off()


def is_idle(server: ServerProcess) -> bool:
    return not server.status()["Running"] and not server.status()["Waiting"]


def at(server: ServerProcess) -> tuple[str, str]:
    return "--port", str(server.port)


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


class TestInAPipe:
    def test_the_answer_is_all_of_stdout(self, runner: Runner, server: ServerProcess):
        status, out, err = runner.run("builtin", QUESTION, *at(server))
        assert (status, out, err) == (0, f"{ANSWER}\n", "")

    def test_an_own_engine_ends_with_the_command(self, runner: Runner):
        status, out, err = runner.run("--port", "0", "builtin", *QUESTION.split())
        assert (status, out, err) == (0, f"{ANSWER}\n", "")
        assert runner.list_temporary_files() == []
        assert list_processes_of(runner.folder / "tmp") == []

    def test_a_folder_with_another_app_does_not_disturb_the_own_engine(
        self, runner: Runner, tmp_path: Path
    ):
        (tmp_path / "app").mkdir()
        (tmp_path / "app" / "__init__.py").write_text("raise SystemExit('the wrong app')")
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "app", "run", "builtin", QUESTION, "--port", "0"],
            cwd=tmp_path,
            env={**UNTRACED, **runner.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * TIMEOUT,
        )
        assert (ended.returncode, ended.stdout) == (0, f"{ANSWER}\n"), ended.stderr

    def test_stdin_precedes_the_prompt(self, runner: Runner, server: ServerProcess):
        status, out, _ = runner.run("builtin", *at(server), stdin=f"{QUESTION}\n")
        assert (status, out) == (0, f"{ANSWER}\n")

    def test_no_prompt_is_an_error(self, runner: Runner):
        status, out, err = runner.run("builtin", "--port", "0")
        assert (status, out) == (1, "")
        assert err.startswith(
            "mlxrunner: there is no prompt (builtin is read as the model): write it after the model"
        )
        assert err.count("\n") == 1

    def test_verbose_prints_the_timings_to_stderr(self, runner: Runner, server: ServerProcess):
        _, out, err = runner.run("builtin", QUESTION, "--verbose", *at(server))
        assert out == f"{ANSWER}\n"
        labels = [line.partition(":")[0] for line in err.splitlines()]
        assert labels == [
            *("total duration", "load duration", "time to first token", "prompt eval count"),
            *("cached count", "prompt eval duration", "prompt eval rate", "eval count"),
            *("eval duration", "eval rate"),
        ]

    def test_a_schema_file_limits_the_answer(
        self, runner: Runner, server: ServerProcess, tmp_path: Path
    ):
        schema = tmp_path / "schema.json"
        schema.write_text(json.dumps({"enum": ["yes", "no"]}))
        status, out, err = runner.run("builtin", "Is it?", "--format", str(schema), *at(server))
        assert status == 0, err
        assert json.loads(out) in ("yes", "no")

    def test_a_system_message_and_a_seed_reach_the_server(
        self, runner: Runner, server: ServerProcess
    ):
        outputs = {
            runner.run(
                *("builtin", "Hello", "--system", "Be brief.", "--temperature", "1.5"),
                *("--seed", "7", *at(server)),
            )
            for _ in range(2)
        }
        assert len(outputs) == 1

    def test_the_keep_alive_time_reaches_the_server(self, runner: Runner, server: ServerProcess):
        status, _, err = runner.run("builtin", QUESTION, "--keep-alive", "forever", *at(server))
        assert (status, err) == (0, "")

    def test_flags_of_the_engine_are_refused_aloud_by_a_running_server(
        self, runner: Runner, server: ServerProcess
    ):
        _, out, err = runner.run("builtin", QUESTION, "--context", "512", *at(server))
        assert out == f"{ANSWER}\n"
        assert (
            err == f"mlxrunner: the server at {server.url} keeps its own settings: no --context\n"
        )

    def test_a_model_that_the_server_does_not_serve_runs_in_an_own_engine(
        self, runner: Runner, server: ServerProcess, tiny_model: Path
    ):
        status, _, err = runner.run(
            str(tiny_model), "Hello", *at(server), "--seed", "1", "--context", "64"
        )
        assert status == 0, err
        [line] = err.splitlines()
        assert line == (
            f"mlxrunner: the server at {server.url} does not serve {tiny_model}: loading it here"
        )

    def test_a_model_that_neither_has_is_one_line(self, runner: Runner, server: ServerProcess):
        status, _, err = runner.run("org/other", "Hello", *at(server))
        assert status == 1
        [line] = err.splitlines()
        assert line.startswith("mlxrunner: model org/other was not found: ")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("qwn3:4b", "hi"), "model qwn3:4b was not found: .*; did you mean qwen3:4b, "),
            (("qwen3:4b", "hi"), "model qwen3:4b was not found: .*run `mlxrunner pull qwen3:4b` "),
            (("builtin", "hi", "--format", "xml"), "--format is json or a file with a JSON schema"),
            (("builtin", "hi", "--think"), "this model does not support reasoning"),
            (("builtin", "hi", "--temperature", "9"), "temperature"),
            (("builtin", "hi", "--tls-cert", "a", "--tls-key", "b"), "run uses plain HTTP"),
            (("builtin", "hi", "--host", "192.0.2.1", "--port", "9"), "there is no server at"),
        ],
    )
    def test_a_mistake_is_one_line_and_status_1(
        self, runner: Runner, arguments: tuple[str, ...], message: str
    ):
        port = () if "--port" in arguments else ("--port", "0")
        status, out, err = runner.run(*arguments, *port)
        assert (status, out) == (1, "")
        [line] = err.splitlines()
        assert re.match(f"mlxrunner: .*{message}", line), line

    def test_a_reader_that_closes_the_pipe_is_no_error(
        self, runner: Runner, server: ServerProcess, slow: Throttle
    ):
        process = runner.start("builtin", QUESTION, *at(server))
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.close()
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(TIMEOUT) == 0
        assert process.stderr.read() == ""
        process.stderr.close()
        wait_until(lambda: is_idle(server))

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
    @pytest.mark.skipif(sys.platform != "linux", reason="the processes are found in /proc")
    def test_an_own_engine_ends_after_a_signal(self, runner: Runner, slow: Throttle, number: int):
        process = runner.start(*("builtin", QUESTION, "--port", "0"), environ=slow.variables)
        assert process.stdin
        assert process.stdout
        process.stdin.close()
        assert process.stdout.read(1)
        process.send_signal(number)
        assert process.wait(TIMEOUT) == (-9 if number == signal.SIGKILL else 128 + number)
        wait_until(lambda: list_processes_of(runner.folder / "tmp") == [])
        assert process.stderr
        process.stdout.close()
        process.stderr.close()
        if number != signal.SIGKILL:
            assert runner.list_temporary_files() == []


class TestCtrlC:
    """Ctrl-C at each stage, typed in a terminal."""

    def test_before_loading(self, runner: Runner):
        """The command waits for the answer of a program that uses the server's port."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = str(silent.getsockname()[1])
            with runner.open("builtin", QUESTION, "--port", port) as terminal:
                connection, _ = silent.accept()
                with connection:
                    terminal.type(CTRL_C)
                    assert terminal.wait() == 130
        assert terminal.output.splitlines() == ["^Cmlxrunner: interrupted"]

    def test_during_loading(self, runner: Runner, throttle: Throttle):
        throttle.hold_loads()
        try:
            with runner.open("builtin", "--port", "0", **throttle.variables) as terminal:
                terminal.read_until(
                    f"loading builtin [##########..............]  {HELD_PROGRESS} %"
                )
                terminal.type(CTRL_C)
                assert terminal.wait() == 130
        finally:
            throttle.release_loads()
        assert terminal.output.endswith("mlxrunner: interrupted\r\n")
        assert "Traceback" not in terminal.output
        assert runner.list_temporary_files() == []
        assert list_processes_of(runner.folder / "tmp") == []

    def test_during_prefill(self, runner: Runner, server: ServerProcess, slow: Throttle):
        prompt = "word " * 400
        with runner.open("builtin", prompt, *at(server)) as terminal:
            terminal.read_until("reading the prompt [")
            terminal.type(CTRL_C)
            assert terminal.wait() == 130
        assert terminal.output.endswith("mlxrunner: interrupted\r\n")
        wait_until(lambda: is_idle(server))

    def test_during_the_only_answer(self, runner: Runner, server: ServerProcess, slow: Throttle):
        with runner.open("builtin", QUESTION, *at(server)) as terminal:
            terminal.read_until("mlxrunner is")
            terminal.type(CTRL_C)
            assert terminal.wait() == 130
        assert terminal.output.endswith("mlxrunner: interrupted\r\n")
        assert "OpenAI" not in terminal.output
        wait_until(lambda: is_idle(server))

    def test_in_a_chat_it_stops_the_prefill_and_the_answer_but_not_the_chat(
        self, runner: Runner, server: ServerProcess, slow: Throttle
    ):
        with runner.open("builtin", *at(server)) as terminal:
            terminal.read_until(">>> ")
            terminal.type("word " * 400 + ENTER)
            terminal.read_until("reading the prompt [")
            terminal.type(CTRL_C)
            terminal.read_until("(stopped)\r\n>>> ")
            wait_until(lambda: is_idle(server))
            terminal.type(QUESTION + ENTER)
            terminal.read_until("mlxrunner is")
            terminal.type(CTRL_C)
            assert "OpenAI" not in terminal.read_until("(stopped)\r\n>>> ")
            wait_until(lambda: is_idle(server))
            slow.off()
            terminal.type("/clear" + ENTER)
            terminal.read_until(">>> ")
            terminal.type(QUESTION + ENTER)
            terminal.read_until("OpenAI API.\r\n>>> ")
            terminal.type("/bye" + ENTER)
            assert terminal.wait() == 0

    def test_at_the_prompt(self, runner: Runner, server: ServerProcess):
        with runner.open("builtin", *at(server)) as terminal:
            terminal.read_until(">>> ")
            terminal.type("half a line")
            terminal.wait_for_prompt("half a line")
            terminal.type(CTRL_C)
            terminal.read_until("Use Ctrl-D or /bye to exit.\r\n>>> ")
            terminal.type('"""begun' + ENTER)
            terminal.wait_for_prompt("... ")
            terminal.type(CTRL_C)
            terminal.read_until("Use Ctrl-D or /bye to exit.\r\n>>> ")
            terminal.type(CTRL_D)
            assert terminal.wait() == 0

    def test_at_the_question_whether_to_download(self, runner: Runner, hub_endpoint: str):
        with runner.open("org/tiny", "--port", "0", HF_ENDPOINT=hub_endpoint) as terminal:
            terminal.read_until("download org/tiny (59.2 kB)? [y/N] ")
            terminal.type(CTRL_C)
            assert terminal.wait() == 130
        assert terminal.output.endswith("mlxrunner: interrupted\r\n")


@pytest.fixture
def hub_endpoint(hub, tiny_model: Path) -> str:
    hub.add("org/tiny", tiny_model)
    return hub.endpoint


def ask(terminal: TerminalProcess, text: str) -> str:
    """Types a line at the prompt. Returns the output until the next prompt."""
    terminal.type(text + ENTER)
    return terminal.read_until(">>> ")


class TestChat:
    def test_a_missing_model_is_downloaded_after_yes(self, runner: Runner, hub_endpoint: str):
        with runner.open("org/tiny", "--port", "0", HF_ENDPOINT=hub_endpoint) as terminal:
            terminal.read_until("[y/N] ")
            terminal.type("y" + ENTER)
            terminal.read_until("org/tiny: type a message, /? for help, Ctrl-D to exit.\r\n>>> ")
            terminal.type(CTRL_D)
            assert terminal.wait() == 0

    def test_commands(self, runner: Runner, server: ServerProcess):
        with runner.open("builtin", *at(server)) as terminal:
            terminal.read_until(">>> ")
            assert "/set system TEXT" in ask(terminal, "/?")
            assert "Set temperature to 0.5." in ask(terminal, "/set parameter temperature 0.5")
            assert "Set top_k to 3." in ask(terminal, "/set top_k 3")
            assert "temperature must be a number from 0 to 2, not 9" in ask(
                terminal, "/set temperature 9"
            )
            assert "did you mean temperature?" in ask(terminal, "/set parameter temperatur 1")
            assert "unknown command /sho; did you mean /show?" in ask(terminal, "/sho")
            assert "context       2048 tokens" in ask(terminal, "/show")
            assert re.search(r"temperature +0\.5", ask(terminal, "/show parameters"))
            assert "Set the system message." in ask(terminal, "/set system Be brief.")
            assert "Be brief." in ask(terminal, "/show system")
            assert "Loaded builtin." in ask(terminal, "/load builtin")
            assert "mlxrunner: which format?" in ask(terminal, "/set format")
            assert "Set the format to json." in ask(terminal, "/set format json")
            assert "Removed the format." in ask(terminal, "/set noformat")
            assert "Set verbose." in ask(terminal, "/set verbose")
            assert "eval rate:" in ask(terminal, "Hello")
            terminal.type("/bye" + ENTER)
            assert terminal.wait() == 0

    def test_one_word_that_is_no_model_gets_a_hint(self, runner: Runner):
        """`mlxrunner run hello` only printed where no model hello was found."""
        with runner.open("hello", "--port", "0") as terminal:
            assert terminal.wait() == 1
        assert "mlxrunner: model hello was not found: " in terminal.output
        assert terminal.output.endswith(
            "; a prompt of one word follows the model: `mlxrunner run builtin hello`\r\n"
        )

    def test_a_saved_chat_is_a_model(
        self, runner: Runner, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("OLLAMA_MODELS", runner.environ["OLLAMA_MODELS"])
        with runner.open("builtin", *at(server)) as terminal:
            terminal.read_until(">>> ")
            assert "mlxrunner: under which name? /save NAME" in ask(terminal, "/save")
            assert "'a b' is not a name" in ask(terminal, "/save a b")
            for line in ("system Be brief.", "repetition_penalty 1.5", "max_tokens 9", 'stop "x"'):
                ask(terminal, f"/set {line}")
            ask(terminal, QUESTION)
            assert "Saved this chat as poet: /load poet or `" in ask(terminal, "/save poet")
            assert "poet exists: choose another name" in ask(terminal, "/save poet")
            poet = store.find("poet")
            assert poet.system_prompt == "Be brief."
            config = {"repetition_penalty": 1.5, "max_new_tokens": 9, "stop_strings": ["x"]}
            assert config.items() <= poet.generation_config.items()
            [first, second] = poet.first_messages
            assert first == ("user", QUESTION)
            assert second[0] == "assistant"
            # the server of the test does not serve it, so the chat loads it itself
            assert "Loaded poet." in ask(terminal, "/load poet")
            assert "Be brief." in ask(terminal, "/show system")
            ask(terminal, "Hello")
            assert "Saved this chat as poet:v2" in ask(terminal, "/save poet:v2")
            assert [role for role, _ in store.find("poet:v2").first_messages] == [
                *("user", "assistant", "user", "assistant")
            ]
            terminal.type("/bye" + ENTER)
            assert terminal.wait() == 0

    def test_a_chat_with_another_machine_is_saved_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """A server of this machine stands for the other one."""
        folder = str(tmp_path / "ollama")
        recipe = ModelRecipe(
            name="poet",
            base=None,
            system="Rhyme.",
            messages=(("user", "a"),),
            parameters={"seed": 1},
        )
        with run_server("--installed", environ={"OLLAMA_MODELS": folder}) as server:
            monkeypatch.setattr(chat_engine, "is_local", lambda settings: False)
            with ChatEngine(
                resolve_config({}, None, {"MLXRUNNER_PORT": str(server.port)})
            ) as engine:
                endpoint = engine.connect(ModelSettings(name="builtin"))
                assert engine.save(endpoint, recipe) == "poet"
                with pytest.raises(AppError, match="poet exists"):
                    engine.save(endpoint, recipe)
                endpoint = engine.connect(ModelSettings(name="poet"))
                engine.save(endpoint, replace(recipe, name="poet:v2", system=None))
        monkeypatch.setenv("OLLAMA_MODELS", folder)
        saved = store.find("poet:v2")
        assert saved.system_prompt == "Rhyme."
        assert saved.first_messages == (("user", "a"), ("user", "a"))

    def test_several_lines_between_fences_are_one_message(
        self, runner: Runner, server: ServerProcess
    ):
        with runner.open("builtin", *at(server)) as terminal:
            terminal.read_until(">>> ")
            terminal.type('"""What is' + ENTER)
            terminal.read_until("... ")
            terminal.type('mlxrunner?"""' + ENTER)
            assert "mlxrunner" in terminal.read_until("\r\n>>> ")
            # a message and no command
            assert "unknown command" not in ask(terminal, '"""/usr/bin"""')
            terminal.type('/set system """Be' + ENTER)
            terminal.read_until("... ")
            assert "Set the system message." in ask(terminal, 'brief."""')
            assert "Be\r\nbrief." in ask(terminal, "/show system")
            terminal.type(CTRL_D)
            assert terminal.wait() == 0

    @pytest.mark.parametrize("arguments", [(), ("--no-history",)])
    def test_the_history_is_kept_unless_it_is_turned_off(
        self, runner: Runner, server: ServerProcess, arguments: tuple[str, ...]
    ):
        with runner.open("builtin", *at(server), *arguments) as terminal:
            terminal.read_until(">>> ")
            ask(terminal, "/set verbose")
            terminal.type(CTRL_D)
            assert terminal.wait() == 0
        assert runner.history_file.exists() == (not arguments)
        if not arguments:
            assert runner.history_file.read_text().splitlines()[-1] == "/set verbose"
            assert runner.history_file.stat().st_mode & 0o077 == 0

    def test_without_color_there_are_no_escape_sequences(
        self, runner: Runner, server: ServerProcess
    ):
        with runner.open("builtin", *at(server), "--verbose", NO_COLOR="1") as terminal:
            terminal.read_until(">>> ")
            assert ANSWER in ask(terminal, QUESTION)
            terminal.type(CTRL_D)
            assert terminal.wait() == 0
        assert ESCAPE not in terminal.output


def test_a_word_with_spaces_is_a_prompt_and_a_path_is_not(tmp_path: Path):
    assert split_words(()) == (None, None)
    assert split_words(("builtin",)) == ("builtin", None)
    assert split_words(("builtin", "a", "b")) == ("builtin", "a b")
    assert split_words(("Why is it?",)) == (None, "Why is it?")
    assert split_words(("~/my models/x", "a")) == ("~/my models/x", "a")
    folder = tmp_path / "my model"
    folder.mkdir()
    assert split_words((str(folder), "a")) == (str(folder), "a")


def test_stdin_and_prompt_are_joined():
    assert join_prompt("file\n", "summarise") == "file\n\nsummarise"
    assert join_prompt("file\n", None) == "file"
    assert join_prompt("", "ask") == "ask"
    assert join_prompt(None, None) is None
