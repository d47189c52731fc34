"""The CI scripts: `.ci/interpreters` finds the Pythons, `.ci/run` starts the parts.

The real search runs with this test's own interpreter at every searched path.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
THIS_VERSION = "{}.{}".format(*sys.version_info)

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def list_versions() -> list[str]:
    process = subprocess.run(
        [ROOT / ".ci/interpreters", "--versions"], capture_output=True, text=True, check=True
    )
    return process.stdout.split()


def write_script(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def write_python(path: Path) -> Path:
    return write_script(path, f'exec "{sys.executable}" "$@"')


def find_interpreters(folder: Path, **variables: str) -> list[str]:
    """The output lines of `.ci/interpreters` with `folder/bin` as PATH and `folder/home` as
    HOME."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("bash", "awk", "env"):
        program = shutil.which(name)
        assert program is not None
        (tools / name).symlink_to(program)
    process = subprocess.run(
        [tools / "bash", ROOT / ".ci/interpreters"],
        env={"PATH": str(tools), "HOME": str(folder / "home"), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout.splitlines()


def test_the_python_of_the_image_is_tested() -> None:
    [version] = re.findall(
        r"^ARG BASE=python:(\d+\.\d+)", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE
    )
    assert version in list_versions()


def test_the_oldest_supported_version_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["requires-python"] == f">={list_versions()[0]}"


def test_this_python_is_a_tested_version() -> None:
    assert THIS_VERSION in list_versions()


PATHS = {
    "PATH": "bin/python3",
    "PATH, by its version": f"bin/python{THIS_VERSION}",
    "pyenv": "home/.pyenv/versions/3.x/bin/python3",
    "uv": "home/.local/share/uv/python/cpython-3.x/bin/python3",
    "asdf": "home/.asdf/installs/python/3.x/bin/python3",
    "mise": "home/.local/share/mise/installs/python/3.x/bin/python3",
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_interpreters_of_version_managers_are_found(tmp_path: Path, path: str) -> None:
    # interpreters of this machine at fixed paths are found as well
    without = find_interpreters(tmp_path)
    shutil.rmtree(tmp_path / "bin")
    write_python(tmp_path / path)
    [line] = [line for line in find_interpreters(tmp_path) if line.startswith(f"{THIS_VERSION} ")]
    if not [line for line in without if line.startswith(f"{THIS_VERSION} ")]:
        assert line == f"{THIS_VERSION} {sys.executable}"


def test_the_variable_of_a_version_manager_is_used(tmp_path: Path) -> None:
    write_python(tmp_path / "elsewhere/versions/3.x/bin/python3")
    lines = find_interpreters(tmp_path, PYENV_ROOT=str(tmp_path / "elsewhere"))
    assert [line for line in lines if line.startswith(f"{THIS_VERSION} ")]


def test_an_interpreter_that_does_not_run_is_ignored(tmp_path: Path) -> None:
    """A shim of pyenv for a version that is not selected."""
    shim = write_script(
        tmp_path / f"bin/python{THIS_VERSION}", "echo 'pyenv: command not found' >&2", "exit 127"
    )
    lines = find_interpreters(tmp_path)
    assert str(shim) not in "\n".join(lines)
    write_python(tmp_path / "home/.pyenv/versions/3.x/bin/python3")
    shutil.rmtree(tmp_path / "bin")
    write_script(shim, "exit 127")
    assert [line for line in find_interpreters(tmp_path) if line.startswith(f"{THIS_VERSION} ")]


def test_an_interpreter_without_venv_is_ignored(tmp_path: Path) -> None:
    """Debian's python3 without its package python3-venv: simulated by a module that shadows
    ensurepip and cannot be imported."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/ensurepip.py").write_text("raise ImportError\n")
    before = find_interpreters(tmp_path)
    shutil.rmtree(tmp_path / "bin")
    write_script(
        tmp_path / "bin/python3",
        f'PYTHONPATH="{tmp_path / "broken"}" exec "{sys.executable}" "$@"',
    )
    assert find_interpreters(tmp_path) == before


def run_ci(folder: Path, found_versions: list[str], *arguments: str) -> tuple[int, str]:
    """(exit status, output) of `.ci/run` in a copy, if these versions were found. The Python is
    replaced by a script that prints its arguments."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    tools = folder / "tools"
    for name in ("g++", "chromium", "nginx"):  # so that nothing needs to be installed
        write_script(tools / name)
    for version in found_versions:
        write_script(folder / f"opt {version}/python3", f'echo "{version}: $*"; exit 3')
    lines = [f'echo "{version} {folder}/opt {version}/python3"' for version in found_versions]
    write_script(
        folder / ".ci/interpreters",
        f'if [ "$1" = --versions ]; then echo {" ".join(list_versions())}; exit; fi',
        *lines,
    )
    process = subprocess.run(
        ["bash", folder / ".ci/run", *arguments],
        env={"PATH": f"{tools}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout


def test_the_oldest_python_runs_the_parts_and_their_status_is_that_of_the_run(
    tmp_path: Path,
) -> None:
    status, printed = run_ci(tmp_path, ["3.11", "3.13"], "--minutes", "9")
    assert (status, printed) == (3, "3.11: -m tests.run_parts ci --minutes 9\n")


def test_without_any_python_the_run_fails_with_a_message(tmp_path: Path) -> None:
    status, printed = run_ci(tmp_path, [])
    assert status == 1
    assert printed.startswith("found no Python (3.11 3.12 3.13 3.14) that can create")


def test_the_parts_need_only_the_standard_library() -> None:
    """They run before anything is installed."""
    process = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tests.run_parts",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stderr == ""
