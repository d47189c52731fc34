"""The package: a wheel built from a copy of the sources has the built-in model and the command, but
no tests; and the packages of the serving lock are sufficient to serve."""

import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
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

from app.api.status import OLLAMA_STATUS_CODES
from tests.ports import find_free_port

# each test builds a wheel or starts a server with other packages
pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE", "openapi.yaml"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("app", "benchmarks", "models", "tests", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "models/kernels/_kernels.elsewhere.so").touch()
    shutil.copytree(ROOT / "deploy/wheel", copy / "deploy/wheel")
    shutil.copy(ROOT / "deploy/install.py", copy / "deploy/install.py")
    shutil.copytree(ROOT / "requirements", copy / "requirements")
    return copy


def run_backend(sources: Path, calls: str, **variables: str) -> None:
    hooks = "import sys; sys.path.insert(0, 'deploy/wheel'); from backend import *"
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{hooks}; {calls}"],
        cwd=sources,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


@pytest.fixture(scope="module")
def dist(sources) -> Path:
    """The folder with the built wheel and sdist. The kernels are omitted, because compiling them
    takes almost a minute: `make wheel` builds and tests a wheel with them."""
    calls = "build_wheel('dist'); build_sdist('dist')"
    run_backend(sources, calls, MLXRUNNER_BUILD_KERNELS="0")
    return sources / "dist"


@pytest.fixture(scope="module")
def wheel(dist) -> zipfile.ZipFile:
    [file] = dist.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def sdist(dist) -> set[str]:
    """The files of the sdist, by their paths in the project."""
    [file] = dist.glob("*.tar.gz")
    with tarfile.open(file) as opened:
        return {name.partition("/")[2] for name in opened.getnames()}


def test_the_wheel_has_every_module(wheel):
    modules = {
        f"mlxrunner/{path.relative_to(ROOT).as_posix()}"
        for top in ("app", "models")
        for path in (ROOT / top).rglob("*.py")
    }
    assert modules <= set(wheel.namelist())


def test_the_wheel_has_no_tools_and_no_benchmarks(wheel):
    assert not [name for name in wheel.namelist() if {"benchmarks", "tools"} & {*Path(name).parts}]


def test_the_wheel_has_the_built_in_model(wheel):
    files = {
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
    } <= files


def test_the_wheel_has_the_page_and_the_schema(wheel):
    names = set(wheel.namelist())
    for path in (ROOT / "app/api/page/static").iterdir():
        assert f"mlxrunner/app/api/page/static/{path.name}" in names
    assert wheel.read("mlxrunner/openapi.yaml") == (ROOT / "openapi.yaml").read_bytes()


def test_the_only_top_level_name_is_mlxrunner(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mlxrunner"}


def test_the_wheel_has_neither_sources_nor_foreign_builds_of_the_kernels(wheel):
    kernels = {name for name in wheel.namelist() if name.startswith("mlxrunner/models/kernels/")}
    assert kernels
    other_files = {name for name in kernels if not name.endswith((".py", ".pyi"))}
    assert other_files <= {"mlxrunner/models/kernels/not_built.txt"}


def test_the_sdist_has_all_sources_of_the_wheel(wheel, sdist):
    assert {"pyproject.toml", "README.md", "LICENSE", "openapi.yaml"} <= sdist
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "models/kernels/src").iterdir()
        if path.is_file()
    }
    assert {"models/kernels/CMakeLists.txt", *sources} <= sdist
    wheel_files = {
        name.removeprefix("mlxrunner/")
        for name in wheel.namelist()
        if name.startswith(("mlxrunner/app/", "mlxrunner/models/"))
    }
    assert wheel_files - {"models/kernels/not_built.txt"} <= sdist
    assert {"deploy/wheel/backend.py", "deploy/wheel/launcher.py"} <= sdist
    locks = {f"requirements/{lock}.txt" for lock in ("serve", "cuda", "build")}
    assert {"deploy/install.py", "deploy/wheel/cuda_distribution.py", *locks} <= sdist
    assert not [name for name in sdist if name.endswith(".so")]


def test_the_wheel_has_the_command(wheel):
    [points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "mlxrunner = mlxrunner:main" in wheel.read(points).decode()


PLAIN_WHEELS = {
    "macos": "mlxrunner-{}-py3-none-macosx_14_0_arm64.whl",
    "cuda": "mlxrunner_cuda-{}-py3-none-any.whl",
}


@pytest.fixture(scope="module", params=PLAIN_WHEELS)
def plain_wheel(request, sources) -> tuple[str, zipfile.ZipFile]:
    """A target, and the wheel for it."""
    folder = f"dist-{request.param}"
    run_backend(sources, f"build_wheel({folder!r})", MLXRUNNER_BUILD_FOR=request.param)
    [file] = (sources / folder).iterdir()
    assert file.name == PLAIN_WHEELS[request.param].format(importlib.metadata.version("mlxrunner"))
    return request.param, zipfile.ZipFile(file)


def test_a_wheel_for_another_platform_has_the_same_package(wheel, plain_wheel):
    """It has no note about missing kernels, because a GPU computes."""
    _, opened = plain_wheel
    packaged = {name for name in opened.namelist() if name.startswith("mlxrunner/")}
    note = "mlxrunner/models/kernels/not_built.txt"
    assert packaged == {name for name in wheel.namelist() if name.startswith("mlxrunner/")} - {note}
    assert note in wheel.namelist()


def test_the_files_of_a_wheel_for_another_platform_are_consistent(plain_wheel):
    target, opened = plain_wheel
    [info] = {name.partition("/")[0] for name in opened.namelist() if ".dist-info/" in name}
    assert opened.filename is not None
    stem, version, *tag = Path(opened.filename).stem.split("-")
    assert info == f"{stem}-{version}.dist-info"
    lines = opened.read(f"{info}/WHEEL").decode().splitlines()
    assert [line for line in lines if line.startswith("Tag: ")] == [f"Tag: {'-'.join(tag)}"]
    assert "Root-Is-Purelib: true" in lines
    check_record(opened)
    requirements = read_requirements(opened)
    assert ("mlx[cuda13]>=0.32.4" in requirements) is (target == "cuda")
    assert any("mlx[cpu]" in requirement for requirement in requirements) is (target == "macos")


def test_the_distributions_differ_only_in_the_requirements_for_mlx(wheel, plain_wheel):
    target, opened = plain_wheel
    difference = set(read_requirements(opened)) ^ set(read_requirements(wheel))
    names = {requirement.split(">=")[0].split("[")[0] for requirement in difference}
    assert names == ({"mlx", "scipy-openblas32"} if target == "cuda" else set())


def test_no_extra_is_required_on_any_platform(wheel):
    """The extra `cpu` of earlier versions still exists, and adds nothing."""
    requirements = read_requirements(wheel)
    assert 'mlx[cpu]>=0.32.4; sys_platform == "linux"' in requirements
    assert 'mlx>=0.32.4; sys_platform != "linux"' in requirements
    assert [requirement for requirement in requirements if 'extra == "cpu"' in requirement] == []
    [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    assert "Provides-Extra: cpu\n" in wheel.read(metadata).decode()


def read_requirements(wheel: zipfile.ZipFile) -> list[str]:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    head = wheel.read(name).decode().partition("\n\n")[0]
    return re.findall(r"^Requires-Dist: (.*)$", head, re.MULTILINE)


def test_an_editable_install_for_cuda_has_its_name(sources):
    """The note of an earlier build for the CPU is removed."""
    note = sources / "models/kernels/not_built.txt"
    note.write_text("mlxrunner: no compiler")
    run_backend(sources, "build_editable('dist-editable')", MLXRUNNER_BUILD_FOR="cuda")
    [file] = (sources / "dist-editable").iterdir()
    assert file.name.startswith("mlxrunner_cuda-")
    with zipfile.ZipFile(file) as opened:
        check_record(opened)
        assert "mlx[cuda13]>=0.32.4" in read_requirements(opened)
        assert any(name.endswith(".pth") for name in opened.namelist())
    assert not note.exists()


def test_an_unknown_target_is_an_error(sources):
    with pytest.raises(AssertionError, match="MLXRUNNER_BUILD_FOR: 'windows' is none of"):
        run_backend(sources, "build_wheel('dist')", MLXRUNNER_BUILD_FOR="windows")


def test_the_record_of_the_wheel_is_correct(wheel):
    check_record(wheel)


def check_record(wheel: zipfile.ZipFile) -> None:
    [record] = [name for name in wheel.namelist() if name.endswith("RECORD")]
    rows = list(csv.reader(io.StringIO(wheel.read(record).decode())))
    assert {name for name, _, _ in rows} == set(wheel.namelist())
    for name, digest, size in rows:
        if name != record:
            content = wheel.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
            assert digest == f"sha256={expected.rstrip('=')}"
            assert int(size) == len(content)


def test_an_installed_wheel_works_with_foreign_packages_of_the_same_names(wheel, tmp_path):
    """In its own process and in the worker process: both names are common."""
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
    # .pth files in a path of a .pth file are not read, so our source tree is not on the path
    dependencies = Path(orjson.__file__).parents[1]
    (packages / "test.pth").write_text(f"{foreign}\n{site}\n{dependencies}\n")
    with run_server(
        [environment / "bin/python", "-m", "mlxrunner", "serve", "--runner", "process"],
        cwd=home,
        log=tmp_path / "log",
    ) as url:
        check_answer(url)


# Hides every distribution that is not in the serving lock, except for coverage, which also traces
# this process.
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
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def wait_until_ready(url: str, server: subprocess.Popen[bytes], seconds: float = 120) -> None:
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
def run_server(command: Sequence[str | Path], *, cwd: Path, log: Path) -> Generator[str]:
    """Run a server and yield its address when it is ready. command: without the port."""
    port = find_free_port()
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*map(str, command), "--port", str(port)],
            cwd=cwd,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", server)
        yield f"http://127.0.0.1:{port}"
    except AssertionError:
        print(log.read_text())
        raise
    finally:
        server.terminate()
        server.wait(60)


def check_answer(url: str) -> None:
    [model] = fetch(f"{url}/v1/models")["data"]
    question = {"model": model["id"], "messages": [{"role": "user", "content": "Hello!"}]}
    answer = fetch(f"{url}/v1/chat/completions", {**question, "max_tokens": 8})
    assert answer["choices"][0]["message"]["content"]


def test_the_serving_lock_is_sufficient(tmp_path):
    """`safetensors` once needed numpy to open a file, and only tests had numpy."""
    command = [sys.executable, "-c", SERVING_ONLY, "serve"]
    with run_server(command, cwd=ROOT, log=tmp_path / "log") as url:
        check_answer(url)
