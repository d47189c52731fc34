"""The Dockerfile, checked without building it: copied files exist, the user is unprivileged, the
commands in its head are valid, and its health check, which runs for real, recognizes a ready
server."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from app.core.errors import AppError
from app.core.settings import ModelSettings, Settings
from tests.deploy.command import check_start, parse_serve_command

ROOT = Path(__file__).resolve().parents[1]

Instruction = tuple[str, str]


def instructions() -> list[Instruction]:
    """(word, arguments) in order, with continued lines joined and comments removed."""
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


def variables() -> dict[str, str]:
    """The environment of the image."""
    lines = arguments("ENV", stages()[-1])
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def entry(words: Sequence[str]) -> list[str]:
    """The command of `docker run … mlxrunner` with these arguments."""
    [command] = arguments("ENTRYPOINT", stages()[-1])
    return [*json.loads(command), *words]


@contextmanager
def health_server(status: int) -> Generator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

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


def is_healthy(port: int) -> bool:
    """With a proxy in the environment, as Docker adds one to every container if configured."""
    [check] = arguments("HEALTHCHECK", stages()[-1])
    program, option, code = json.loads(check[check.index("[") :])
    assert (program, option) == ("python", "-c")
    unreachable = "http://127.0.0.1:9"
    environment = {
        "MLXRUNNER_PORT": str(port),
        "HTTP_PROXY": unreachable,
        "http_proxy": unreachable,
    }
    process = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env={**os.environ, **environment},
        stderr=subprocess.DEVNULL,
    )
    return process.returncode == 0


@pytest.mark.parametrize("status", [200, 503])
def test_only_a_ready_server_is_healthy(status: int):
    with health_server(status) as port:
        assert is_healthy(port) is (status == 200)


def test_a_stopped_server_is_not_healthy():
    with health_server(200) as port:
        pass
    assert not is_healthy(port)


def test_copied_files_exist_and_are_not_ignored():
    included = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    build, _ = stages()
    copied = [source for copy in arguments("COPY", build) for source in copy.split()[:-1]]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in included


def test_all_other_files_are_ignored():
    rules = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    copied = {source for copy in arguments("COPY", stages()[0]) for source in copy.split()[:-1]}
    assert "*" in rules
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied


def test_it_runs_as_an_unprivileged_user():
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


def test_only_the_build_stage_has_a_compiler():
    build, last = stages()
    [compiler] = [run for run in arguments("RUN", build) if "apt-get install" in run]
    assert re.search(r"\bg\+\+", compiler)
    assert 'if [ "$CUDA" != 1 ]' in compiler
    assert not [run for run in arguments("RUN", last) if "apt-get" in run]


def test_the_image_has_no_build_tools():
    """They are in a folder of the build stage, and no lock for serving has them."""
    build, last = stages()
    [install] = [run for run in arguments("RUN", build) if "requirements/build.txt" in run]
    assert "--target /build/tools" in install
    [project] = [run for run in arguments("RUN", build) if "--no-build-isolation" in run]
    assert "PYTHONPATH=/build/tools" in project
    assert [copy for copy in arguments("COPY", last) if "/build" in copy] == []
    tools = list_packages("build") - {"packaging"}
    assert {"cmake", "nanobind", "ninja", "scikit-build-core", "setuptools"} <= tools
    for lock in ("serve", "cuda"):
        assert list_packages(lock) & tools == set()


def list_packages(lock: str) -> set[str]:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text("utf-8")
    return set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))


def test_compiled_files_are_ignored():
    rules = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert rules.index("models/kernels/*.so") > rules.index("!models")


def test_models_are_a_volume_and_the_port_is_the_servers_own():
    last = stages()[-1]
    assert arguments("VOLUME", last) == ["/models"]
    assert arguments("EXPOSE", last) == [str(Settings().port)]
    assert variables()["MLXRUNNER_PORT"] == str(Settings().port)


def test_its_user_may_write_where_downloads_go():
    last = stages()[-1]
    [install] = [run for run in arguments("RUN", last) if "install --directory" in run]
    assert "--home-dir /models" in install
    for folder in ("/models", "/keys"):
        assert re.search(rf"install --directory --owner=10001 --mode=\d+ {folder}\b", install)
    assert variables()["HOME"] == "/models"


def test_it_starts_the_command_that_the_package_installs():
    settings = parse_serve_command(entry(["/models/some-model"]), variables())
    assert settings.host == "0.0.0.0"
    assert settings.models == (ModelSettings(name="/models/some-model"),)


def test_without_keys_it_does_not_start():
    with pytest.raises(AppError, match="anyone who can reach it"):
        check_start(parse_serve_command(entry([]), variables()), variables())


def list_commands() -> list[list[str]]:
    """The `docker run …` commands in the head of the Dockerfile."""
    lines = (ROOT / "Dockerfile").read_text("utf-8").split("ARG")[0].splitlines()
    lines_ = [line.removeprefix("# ") for line in lines if line.startswith("# docker run")]
    return [shlex.split(line.replace("…", "a-key-of-16-letters")) for line in lines_]


@pytest.mark.parametrize("command", list_commands(), ids=" ".join)
def test_each_documented_command_is_valid(command: list[str]):
    environment = {**variables()}
    words = iter(command[2:])
    published_port = program = None
    for word in words:
        match word:
            case "-e":
                name, _, value = next(words).partition("=")
                environment[name] = value
            case "-p":
                published_port = next(words)
            case "-v":
                assert next(words).endswith(":/models")
            case "--entrypoint":
                program = next(words)
            case "--init" | "--rm":
                pass
            case _:
                assert word == "mlxrunner"
                break
    rest = list(words)
    if program is not None:
        assert (program, rest) == ("mlxrunner", ["key", "me"])
        return
    settings = check_start(parse_serve_command(entry(rest), environment), environment)
    # without a key only for this machine
    assert settings.allow_anyone is (published_port == "127.0.0.1:8080:8080")
    assert published_port is not None
    assert published_port.endswith(f":{settings.port}")
