"""The image's recipe, read without an engine to build it: what it copies is there, who runs it is
nobody special, and its health check, run for real, tells a ready server from all others."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from app.api.meta import STATUS
from app.core.settings import Settings

ROOT = Path(__file__).resolve().parents[1]

Instruction = tuple[str, str]


def instructions() -> list[Instruction]:
    """(word, arguments) in order, with continued lines joined and comments left out."""
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    return [
        (word, arguments)
        for word, _, arguments in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def stages() -> list[list[Instruction]]:
    """The instructions of each stage, its FROM first."""
    found: list[list[Instruction]] = []
    for instruction in instructions():
        if instruction[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


def arguments(word: str, stage: list[Instruction]) -> list[str]:
    return [arguments for name, arguments in stage if name == word]


def health_check() -> list[str]:
    [check] = arguments("HEALTHCHECK", stages()[-1])
    return json.loads(check[check.index("[") :])


@contextmanager
def status_server(body: dict[str, object]) -> Generator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v1/status" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_health_check(port: int) -> int:
    program, option, code = health_check()
    assert (program, option) == ("python", "-c")
    assert f":{Settings().port}/" in code
    code = code.replace(f":{Settings().port}/", f":{port}/")
    return subprocess.run(
        [sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL
    ).returncode


@pytest.mark.parametrize("state", STATUS)
def test_only_a_ready_server_is_healthy(state):
    with status_server({"Status": STATUS[state], "Progress": 50}) as port:
        assert (run_health_check(port) == 0) is (state == "ready")


def test_a_server_that_is_gone_is_not_healthy():
    with status_server({}) as port:
        pass
    assert run_health_check(port) != 0


def test_what_is_copied_exists_and_is_let_through_to_the_builder():
    let_through = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    build, _ = stages()
    copied = [source for copy in arguments("COPY", build) for source in copy.split()[:-1]]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in let_through


def test_nothing_else_is_let_through():
    rules = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    copied = {source for copy in arguments("COPY", stages()[0]) for source in copy.split()[:-1]}
    assert "*" in rules
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied


def test_it_runs_as_nobody_special():
    last = stages()[-1]
    assert arguments("USER", last) == ["10001"]
    words = [word for word, _ in last]
    assert "RUN" not in words[words.index("USER") :]


def test_the_cpu_is_the_default_and_each_choice_has_a_hashed_lock():
    build = stages()[0]
    assert arguments("ARG", build) == ["CUDA=0"]
    [install] = [run for run in arguments("RUN", build) if "--requirement" in run]
    assert "--require-hashes" in install
    for lock in re.findall(r"lock=(\w+)", install):
        assert "--hash=sha256:" in (ROOT / "requirements" / f"{lock}.txt").read_text("utf-8")


def test_models_are_a_volume_and_the_port_is_the_servers_own():
    last = stages()[-1]
    assert arguments("VOLUME", last) == ["/models"]
    assert arguments("EXPOSE", last) == [str(Settings().port)]


def test_it_starts_the_command_that_the_package_installs():
    from app.cli import _parser

    [entry] = arguments("ENTRYPOINT", stages()[-1])
    command, *options = json.loads(entry)
    assert command == "mlxrunner"
    parsed = _parser().parse_args([*options, "/models/some-model"])
    assert (parsed.host, parsed.model) == ("0.0.0.0", "/models/some-model")
