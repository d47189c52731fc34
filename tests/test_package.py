"""What `pip install` gets: a wheel built from a copy of the sources holds the built-in model and
the command, and nothing of the tests; and what the serving lock installs is enough to serve."""

import base64
import csv
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.api.health import OLLAMA_STATUS_CODES

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder that both are built into. The kernels are left out, since compiling them takes
    most of a minute: `make wheel` builds a wheel with them and tries it."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("app", "models", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "models/kernels/_kernels.elsewhere.so").touch()
    shutil.copytree(ROOT / "deploy/wheel", copy / "deploy/wheel")
    build = "import sys; sys.path.insert(0, 'deploy/wheel'); from backend import *"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{build}; build_wheel('dist'); build_sdist('dist')"],
        cwd=copy,
        env={**os.environ, "MLXRUNNER_BUILD_KERNELS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(built) -> zipfile.ZipFile:
    [file] = built.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def sdist(built) -> set[str]:
    """Its files, by the paths that they have in the project."""
    [file] = built.glob("*.tar.gz")
    with tarfile.open(file) as opened:
        return {name.partition("/")[2] for name in opened.getnames()}


def test_every_module_is_in_it(wheel):
    modules = {
        f"mlxrunner/{path.relative_to(ROOT).as_posix()}"
        for top in ("app", "models")
        for path in (ROOT / top).rglob("*.py")
        if "training" not in path.parts
    }
    assert modules <= set(wheel.namelist())


def test_the_training_of_the_built_in_model_is_not_in_it(wheel):
    assert not [name for name in wheel.namelist() if "training" in name]


def test_the_built_in_model_is_in_it(wheel):
    held = {
        name.removeprefix("mlxrunner/models/builtin/")
        for name in wheel.namelist()
        if name.startswith("mlxrunner/models/builtin/")
    }
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "MODEL_CARD.md",
    } <= held


def test_its_only_top_level_name_is_ours(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mlxrunner"}


def test_neither_are_the_sources_of_the_kernels_nor_what_was_compiled_among_them(wheel):
    kernels = {name for name in wheel.namelist() if name.startswith("mlxrunner/models/kernels/")}
    assert kernels
    strange = {name for name in kernels if not name.endswith((".py", ".pyi"))}
    assert strange <= {"mlxrunner/models/kernels/not_built.txt"}


def test_an_sdist_has_all_that_a_wheel_is_built_from(wheel, sdist):
    assert {"pyproject.toml", "README.md", "LICENSE"} <= sdist
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "models/kernels/src").iterdir()
        if path.is_file()
    }
    assert {"models/kernels/CMakeLists.txt", *sources} <= sdist
    packed = {
        name.removeprefix("mlxrunner/")
        for name in wheel.namelist()
        if name.startswith(("mlxrunner/app/", "mlxrunner/models/"))
    }
    assert packed - {"models/kernels/not_built.txt"} <= sdist
    assert {"deploy/wheel/backend.py", "deploy/wheel/launcher.py"} <= sdist
    assert not [name for name in sdist if name.endswith(".so")]


def test_it_brings_the_command(wheel):
    [points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "mlxrunner = mlxrunner:main" in wheel.read(points).decode()


def test_its_record_is_right(wheel):
    [record] = [name for name in wheel.namelist() if name.endswith("RECORD")]
    rows = list(csv.reader(io.StringIO(wheel.read(record).decode())))
    assert {name for name, _, _ in rows} == set(wheel.namelist())
    for name, digest, size in rows:
        if name != record:
            content = wheel.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
            assert digest == f"sha256={expected.rstrip('=')}"
            assert int(size) == len(content)


def test_an_installed_wheel_answers_beside_foreign_packages_of_the_same_names(wheel, tmp_path):
    """Of its own process and of the worker process alike: both names are common."""
    site, foreign, home = tmp_path / "site", tmp_path / "foreign", tmp_path / "home"
    wheel.extractall(site)
    home.mkdir()
    for folder in (foreign, home):
        for name in ("app", "models"):
            (folder / name).mkdir(parents=True)
            (folder / name / "__init__.py").write_text("raise ImportError('a foreign package')")
    environment = tmp_path / "environment"
    venv.create(environment)
    [packages] = environment.glob("lib/python*/site-packages")
    # a path in a .pth file is searched without the .pth files there, so not for our source tree
    dependencies = Path(orjson.__file__).parents[1]
    (packages / "test.pth").write_text(f"{foreign}\n{site}\n{dependencies}\n")
    with serving(
        [environment / "bin/python", "-m", "mlxrunner", "serve", "--runner", "process"],
        cwd=home,
        log=tmp_path / "log",
    ) as url:
        ask(url)


# Hides every distribution that the serving lock does not name. Coverage, which watches this
# process too, may load the rest of itself.
SERVING_ONLY = """
import importlib.metadata, re, sys

lock = open("requirements/serve.txt").read()
kept = {name.lower() for name in re.findall(r"^([\\w.-]+)==", lock, re.MULTILINE)}
kept |= {"mlxrunner", "coverage"}
hidden = {
    top
    for top, names in importlib.metadata.packages_distributions().items()
    if not any(re.sub(r"[-_.]+", "-", name).lower() in kept for name in names)
}
assert "pytest" in hidden

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is not in the serving lock", name=name)

sys.meta_path.insert(0, Hide())
from app.cli import main
sys.exit(main(sys.argv[1:]))
"""


def fetch(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def until_ready(url: str, server: subprocess.Popen[bytes], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server has ended"
        try:
            status = fetch(f"{url}/v1/status")["Status"]
            if status == OLLAMA_STATUS_CODES["ready"]:
                return
            assert status == OLLAMA_STATUS_CODES["loading"], "the model could not be loaded"
        except urllib.error.URLError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"not ready within {seconds} s")


@contextmanager
def serving(command: Sequence[str | Path], *, cwd: Path, log: Path) -> Generator[str]:
    """The address of a server that is ready. command: without the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*map(str, command), "--port", str(port)],
            cwd=cwd,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
    try:
        until_ready(f"http://127.0.0.1:{port}", server)
        yield f"http://127.0.0.1:{port}"
    except AssertionError:
        print(log.read_text())
        raise
    finally:
        server.terminate()
        server.wait(20)


def ask(url: str) -> None:
    [model] = fetch(f"{url}/v1/models")["data"]
    question = {"model": model["id"], "messages": [{"role": "user", "content": "Hello!"}]}
    answer = fetch(f"{url}/v1/chat/completions", {**question, "max_tokens": 8})
    assert answer["choices"][0]["message"]["content"]


def test_the_serving_lock_is_enough_to_answer(tmp_path):
    """Once `safetensors` asked for numpy when a file was opened, and only tests had numpy."""
    command = [sys.executable, "-c", SERVING_ONLY, "serve"]
    with serving(command, cwd=ROOT, log=tmp_path / "log") as url:
        ask(url)
