"""`mlxrunner run` in pipes and in terminals, with its own engine and with a running server.

Most tests run the command in this process, with a server in a thread. Tests of signals, keys and
own engines run it in a separate process.
"""

import json
import re
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from app.commands.answer import AnswerPrinter
from app.commands.run import join_prompt, split_words
from tests import tiny
from tests.commands.run_command import (
    ANSWER,
    FIRST_WORDS,
    QUESTION,
    OwnEngines,
    RunCommand,
    Runner,
    list_processes_of,
)
from tests.commands.thread_server import StepGate, ThreadServer, run_thread_server
from tests.server_process import TIMEOUT
from tests.terminal_process import CTRL_C, CTRL_D, ENTER
from tests.throttle import HELD_PROGRESS, Throttle
from tests.waiting import wait_until


class TestInAPipe:
    def test_the_answer_is_all_of_stdout(self, run_here: RunCommand, server: ThreadServer):
        status, out, err = run_here("builtin", QUESTION, *server.arguments)
        assert (status, out, err) == (0, f"{ANSWER}\n", "")

    def test_an_own_engine_ends_with_the_command(self, runner: Runner, tmp_path: Path):
        """A folder with another app does not disturb it."""
        (tmp_path / "app").mkdir()
        (tmp_path / "app" / "__init__.py").write_text("raise SystemExit('the wrong app')")
        process = runner.start("--port", "0", "builtin", *QUESTION.split(), cwd=tmp_path)
        out, err = process.communicate("", timeout=2 * TIMEOUT)
        assert (process.returncode, out, err) == (0, f"{ANSWER}\n", "")
        assert runner.list_temporary_files() == []
        assert list_processes_of(runner.folder / "tmp") == []

    def test_stdin_precedes_the_prompt(self, run_here: RunCommand, server: ThreadServer):
        status, out, _ = run_here("builtin", *server.arguments, stdin=f"{QUESTION}\n")
        assert (status, out) == (0, f"{ANSWER}\n")

    def test_no_prompt_is_an_error(self, run_here: RunCommand):
        status, out, err = run_here("builtin", "--port", "0")
        assert (status, out) == (1, "")
        assert err.startswith(
            "mlxrunner: there is no prompt (builtin is read as the model): write it after the model"
        )
        assert err.count("\n") == 1

    def test_verbose_prints_the_timings_to_stderr(self, run_here: RunCommand, server: ThreadServer):
        _, out, err = run_here("builtin", QUESTION, "--verbose", *server.arguments)
        assert out == f"{ANSWER}\n"
        labels = [line.partition(":")[0] for line in err.splitlines()]
        assert labels == [
            *("total duration", "load duration", "time to first token", "prompt eval count"),
            *("cached count", "prompt eval duration", "prompt eval rate", "eval count"),
            *("eval duration", "eval rate"),
        ]

    def test_a_schema_file_limits_the_answer(
        self, run_here: RunCommand, server: ThreadServer, tmp_path: Path
    ):
        schema = tmp_path / "schema.json"
        schema.write_text(json.dumps({"enum": ["yes", "no"]}))
        status, out, err = run_here("builtin", "Is it?", "--format", str(schema), *server.arguments)
        assert status == 0, err
        assert json.loads(out) in ("yes", "no")

    def test_a_system_message_and_a_seed_reach_the_server(
        self, run_here: RunCommand, server: ThreadServer
    ):
        outputs = {
            run_here(
                *("builtin", "Hello", "--system", "Be brief.", "--temperature", "1.5"),
                *("--seed", "7", *server.arguments),
            )
            for _ in range(2)
        }
        assert len(outputs) == 1

    def test_the_keep_alive_time_reaches_the_server(
        self, run_here: RunCommand, server: ThreadServer
    ):
        status, _, err = run_here("builtin", QUESTION, "--keep-alive", "forever", *server.arguments)
        assert (status, err) == (0, "")

    def test_flags_of_the_engine_are_refused_aloud_by_a_running_server(
        self, run_here: RunCommand, server: ThreadServer
    ):
        _, out, err = run_here("builtin", QUESTION, "--context", "512", *server.arguments)
        assert out == f"{ANSWER}\n"
        assert (
            err == f"mlxrunner: the server at {server.url} keeps its own settings: no --context\n"
        )

    def test_a_model_that_the_server_does_not_serve_runs_in_an_own_engine(
        self,
        run_here: RunCommand,
        server: ThreadServer,
        own_engines: OwnEngines,
        tiny_model: Path,
    ):
        status, _, err = run_here(
            str(tiny_model), "Hello", *server.arguments, "--seed", "1", "--context", "64"
        )
        assert status == 0, err
        assert own_engines.ended == own_engines.models == [str(tiny_model)]
        [line] = err.splitlines()
        assert line == (
            f"mlxrunner: the server at {server.url} does not serve {tiny_model}: loading it here"
        )

    @pytest.mark.parametrize("path", ["./{}", "~/{}", "{}/."])
    def test_a_served_folder_is_not_loaded_again(
        self,
        run_here: RunCommand,
        own_engines: OwnEngines,
        tmp_path: Path,
        path: str,
        monkeypatch: pytest.MonkeyPatch,
    ):
        """The folder has the name of the model that the server serves."""
        tiny.write(tmp_path / "builtin")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        with run_thread_server() as server:
            _, out, err = run_here(path.format("builtin"), QUESTION, *server.arguments)
        assert (out, err, own_engines.models) == (f"{ANSWER}\n", "", [])

    def test_a_model_that_neither_has_is_one_line(self, run_here: RunCommand, server: ThreadServer):
        status, _, err = run_here("org/other", "Hello", *server.arguments)
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
            # counts as another machine, but refuses the connection at once
            (("builtin", "hi", "--host", "127.0.0.2", "--port", "9"), "there is no server at"),
        ],
    )
    def test_a_mistake_is_one_line_and_status_1(
        self,
        run_here: RunCommand,
        own_engines: OwnEngines,
        arguments: tuple[str, ...],
        message: str,
    ):
        port = () if "--port" in arguments else ("--port", "0")
        status, out, err = run_here(*arguments, *port)
        assert (status, out) == (1, "")
        [line] = err.splitlines()
        assert re.match(f"mlxrunner: .*{message}", line), line

    def test_a_reader_that_closes_the_pipe_is_no_error(
        self, runner: Runner, server: ThreadServer, held: StepGate
    ):
        process = runner.start("builtin", QUESTION, *server.arguments)
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.close()
        assert process.stdout.read(1)
        process.stdout.close()
        held.release()
        assert process.wait(TIMEOUT) == 0
        assert process.stderr.read() == ""
        process.stderr.close()
        wait_until(lambda: server.is_idle)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    @pytest.mark.skipif(sys.platform != "linux", reason="the processes are found in /proc")
    def test_an_own_engine_ends_after_a_signal(
        self, runner: Runner, throttle: Throttle, long_model: Path, number: int
    ):
        """In an answer that does not end by itself."""
        environ = throttle.on().variables
        process = runner.start(str(long_model), "Hello", "--port", "0", environ=environ)
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

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_has_the_status_of_a_shell_and_ends_the_own_engine(
        self,
        run_here: RunCommand,
        own_engines: OwnEngines,
        monkeypatch: pytest.MonkeyPatch,
        number: int,
    ):
        def interrupt(*_: object) -> NoReturn:
            signal.raise_signal(number)
            raise AssertionError("the signal was ignored")

        monkeypatch.setattr(AnswerPrinter, "print_events", interrupt)
        with pytest.raises(SystemExit) as caught:
            run_here("builtin", QUESTION, "--port", "0")
        assert caught.value.code == 128 + number
        assert own_engines.ended == ["builtin"]


# the line editor asks the terminal to mark pasted text
PASTE_ON = "\x1b[?2004h"


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

    def test_during_prefill(self, runner: Runner, server: ThreadServer, slow: StepGate):
        prompt = "word " * 400
        with runner.open("builtin", prompt, *server.arguments) as terminal:
            terminal.read_until("reading the prompt [")
            terminal.type(CTRL_C)
            assert terminal.wait() == 130
        assert terminal.output.endswith("mlxrunner: interrupted\r\n")
        wait_until(lambda: server.is_idle)

    def test_during_the_only_answer(self, runner: Runner, server: ThreadServer, held: StepGate):
        with runner.open("builtin", QUESTION, *server.arguments) as terminal:
            terminal.read_until("mlxrunner is")
            terminal.type(CTRL_C)
            assert terminal.wait() == 130
        assert terminal.output.endswith("mlxrunner: interrupted\r\n")
        assert "OpenAI" not in terminal.output
        wait_until(lambda: server.is_idle)

    def test_in_a_chat_it_stops_the_prefill_and_the_answer_but_not_the_chat(
        self, runner: Runner, server: ThreadServer, slow: StepGate
    ):
        with runner.open("builtin", *server.arguments) as terminal:
            terminal.read_until(">>> ")
            terminal.type("word " * 400 + ENTER)
            terminal.read_until("reading the prompt [")
            terminal.type(CTRL_C)
            terminal.read_until(f"(stopped)\r\n{PASTE_ON}>>> ")
            wait_until(lambda: server.is_idle)
            slow.release()
            slow.hold_after(FIRST_WORDS)
            terminal.type(QUESTION + ENTER)
            terminal.read_until("mlxrunner is")
            terminal.type(CTRL_C)
            assert "OpenAI" not in terminal.read_until(f"(stopped)\r\n{PASTE_ON}>>> ")
            wait_until(lambda: server.is_idle)
            slow.release()
            terminal.type("/clear" + ENTER)
            terminal.read_until(">>> ")
            terminal.type(QUESTION + ENTER)
            terminal.read_until(f"OpenAI API.\r\n{PASTE_ON}>>> ")
            terminal.type("/bye" + ENTER)
            assert terminal.wait() == 0

    def test_at_the_prompt(self, runner: Runner, server: ThreadServer):
        with runner.open("builtin", *server.arguments) as terminal:
            terminal.read_until(">>> ")
            terminal.type("half a line")
            terminal.wait_for_prompt("half a line")
            terminal.type(CTRL_C)
            terminal.read_until(f"Use Ctrl-D or /bye to exit.\r\n{PASTE_ON}>>> ")
            terminal.type('"""begun' + ENTER)
            terminal.wait_for_prompt("... ")
            terminal.type(CTRL_C)
            terminal.read_until(f"Use Ctrl-D or /bye to exit.\r\n{PASTE_ON}>>> ")
            terminal.type(CTRL_D)
            assert terminal.wait() == 0

    def test_at_the_question_whether_to_download(self, runner: Runner, hub_endpoint: str):
        with runner.open("org/tiny", "--port", "0", HF_ENDPOINT=hub_endpoint) as terminal:
            terminal.read_until("download org/tiny (59.2 kB)? [y/N] ")
            terminal.type(CTRL_C)
            assert terminal.wait() == 130
        assert terminal.output.endswith("mlxrunner: interrupted\r\n")


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
