"""`mlxrunner serve` at a terminal: the banner, short lines, colour, progress. Plain in a pipe."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server_process import TIMEOUT, run_server
from tests.terminal_process import CTRL_C, TerminalProcess, make_environ, open_terminal
from tests.throttle import Throttle

ARGUMENTS = ("serve", "--port", "0")


def wait_for_banner(terminal: TerminalProcess) -> str:
    """The URL."""
    return terminal.wait_for(r"address +(http://127\.0\.0\.1:\d+)\r\n(.*\r\n)*?.* try .*\r\n")[1]


def send_chat(url: str, **fields: Any) -> httpx.Response:
    body = {"model": "builtin", "messages": [{"role": "user", "content": "Hello"}], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT)


def check_command(terminal: TerminalProcess) -> None:
    """Runs the command in the banner."""
    command = terminal.wait_for(r"(curl http\S+/v1/chat/completions .*)\r\n")[1]
    if shutil.which("curl"):
        process = subprocess.run(
            shlex.split(command), capture_output=True, text=True, check=True, timeout=TIMEOUT
        )
        assert json.loads(process.stdout)["choices"][0]["message"]["content"]


def test_a_terminal_gets_a_banner_and_short_lines_in_colour() -> None:
    with open_terminal(*ARGUMENTS) as terminal:
        url = wait_for_banner(terminal)
        check_command(terminal)
        banner = terminal.plain_output
        assert re.search(r"^  model +builtin, context 2048 tokens, \d+ slots?\r$", banner, re.M)
        memory = r"^  memory +[\d.]+ MiB used of [\d.]+ GiB, cached prefixes up to .* \(25 %\)\r$"
        assert re.search(memory, banner, re.M)
        assert re.search(r"^  device +(CPU|GPU)", banner, re.M)
        assert send_chat(url, max_tokens=8).status_code == 200
        terminal.wait_for(
            r"[\r\n]\d\d:\d\d:\d\d chat builtin 200 \d+→\d+ tok [\d.]+ tok/s( length)? \d+ ms\r\n"
        )
        assert send_chat(url, model="nothing").status_code == 404
        terminal.wait_for(r"chat 404 model_not_found: .* \d+ ms req_\w+\r\n")
        assert httpx.get(f"{url}/v1/models", timeout=TIMEOUT).status_code == 200
        terminal.wait_for(r"[\r\n]\d\d:\d\d:\d\d GET /v1/models 200 \d+ ms\r\n")
        terminal.type(CTRL_C)
        assert terminal.wait() in (0, 130, -signal.SIGINT)
        assert "\x1b[32m200\x1b[0m" in terminal.output
        assert "\x1b[33m404\x1b[0m" in terminal.output
        # a stack trace is indented; there may be one, if the server had to wait for a core
        lines = [line for line in terminal.output.splitlines() if not line.startswith("    ")]
        assert not any("uvicorn" in line or "app." in line for line in lines)


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1", "FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_escape_sequences_without_colour(variables: dict[str, str]) -> None:
    """NO_COLOR overrides FORCE_COLOR."""
    with open_terminal(*ARGUMENTS, environ=make_environ(**variables)) as terminal:
        url = wait_for_banner(terminal)
        send_chat(url, max_tokens=8)
        terminal.wait_for(r"chat builtin 200 .* ms\r\n")
        terminal.type(CTRL_C)
        terminal.wait()
        assert "\x1b" not in terminal.output
        if "TERM" in variables:  # nor can it rewrite a line
            assert "\r" not in terminal.output.replace("\r\n", "")


def test_json_lines_stay_as_they_are_on_a_terminal() -> None:
    with open_terminal(*ARGUMENTS, "--log-format", "json") as terminal:
        terminal.wait_for("is ready after")
        terminal.type(CTRL_C)
        terminal.wait()
        lines = terminal.output.replace("^C", "").split("\r\n")
        assert all(json.loads(line)["logger"] for line in lines if line)


def test_a_long_prefill_and_a_load_show_their_progress(tmp_path: Path) -> None:
    throttle = Throttle(tmp_path / "throttle").on()
    with open_terminal(
        *ARGUMENTS, "--prefill-chunk", "16", environ=make_environ(**throttle.variables)
    ) as terminal:
        terminal.wait_for(r"loading builtin \[[#.]{20}\] \d+ %")
        url = wait_for_banner(terminal)
        content = "word " * 500
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
        request = threading.Thread(target=lambda: send_chat(url, **body))
        request.start()
        found = terminal.wait_for(
            r"\rprefill builtin \[[#.]{20}\] (\d+)/(\d+) tokens, \d+ tok/s, .* left"
        )
        assert 0 < int(found[1]) < int(found[2])
        throttle.off()
        terminal.wait_for(r"\r +\r\d\d:\d\d:\d\d chat builtin 200 ")
        request.join()


def test_a_pipe_gets_plain_lines_with_the_logger_and_no_banner() -> None:
    with run_server(environ={"FORCE_COLOR": ""}) as server:
        assert send_chat(server.url, max_tokens=8).status_code == 200
        server.stop()
        text = server.log_text()
    assert "\x1b" not in text
    assert "\r" not in text
    assert "address" not in text
    lines = text.splitlines()
    assert all(
        re.match(r"[-\d]+ [\d:,]+ [A-Z]+ (app|uvicorn)\S*( \[\S+\])?: ", one) for one in lines
    )
    assert any(" INFO uvicorn.error: " in line for line in lines)
    assert any(re.search(r" INFO app\.access \[\S+\]: POST /v1/chat", line) for line in lines)


def test_force_color_colours_the_level_in_a_pipe_and_changes_no_layout() -> None:
    with run_server(environ={"FORCE_COLOR": "1", "NO_COLOR": ""}) as server:
        server.stop()
        text = server.log_text()
    assert "\x1b[32mINFO\x1b[0m app." in text
    assert "address" not in text


def test_an_error_of_a_command_is_wrapped_at_words() -> None:
    with open_terminal("show", "org/nothing", columns=60) as terminal:
        assert terminal.wait() == 1
    lines = terminal.output.rstrip().split("\r\n")
    assert len(lines) > 2
    assert " ".join(line.strip() for line in lines).startswith(
        "mlxrunner: model org/nothing was not found: no such folder, not in the Hugging Face cache"
    )
    assert all(len(line) < 60 or " " not in line.strip() for line in lines)
    assert any("`mlxrunner pull org/nothing`" in line for line in lines)
