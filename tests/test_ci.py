"""The CI scripts: `.ci/interpreters` finds the Pythons, `.ci/run` divides the work.

The real search runs with this test's own interpreter at every searched path. `make` is replaced by
a script that records its calls: the real one takes longer than the rest of the suite.
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

COVERAGE = "ARGS=--cov --cov-report=term"

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


def run_ci(
    folder: Path, found_versions: list[str], *, failing: str = "none"
) -> tuple[int, list[str], str]:
    """(exit status, calls of make, output) of `.ci/run` in a copy, if these versions were found. A
    call of make that contains `failing` fails."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    lines = [f"echo {version} /opt/{version}/python3" for version in found_versions]
    write_script(
        folder / ".ci/interpreters",
        f'if [ "$1" = --versions ]; then echo {" ".join(list_versions())}; exit; fi',
        *lines,
    )
    tools = folder / "tools"
    for name in ("g++", "chromium", "nginx"):  # so that nothing needs to be installed
        write_script(tools / name)
    write_script(
        tools / "make",
        f'echo "$@" >> "{folder}/calls"',
        f'case "$*" in *"{failing}"*) exit 2;; esac',
    )
    process = subprocess.run(
        ["bash", folder / ".ci/run"],
        env={"PATH": f"{tools}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    calls = folder / "calls"
    return (
        process.returncode,
        calls.read_text().splitlines() if calls.exists() else [],
        process.stdout,
    )


def test_the_oldest_python_runs_all_tests_and_newer_ones_a_part(tmp_path: Path) -> None:
    write_python(tmp_path / ".venv/bin/python").write_text("#!/bin/sh\necho 3.11\n")
    status, calls, printed = run_ci(tmp_path, ["3.11", "3.12", "3.13"])
    assert status == 0
    check, middle, newest, programs, exhaustive, suite = calls
    assert check == "check PYTHON=/opt/3.11/python3"
    server = "t=tests/test_interpreter.py"
    assert middle == f"test PYTHON=/opt/3.12/python3 VENV=.venv-3.12 {server} ARGS="
    assert newest.startswith(f"test PYTHON=/opt/3.13/python3 VENV=.venv-3.13 {server} ")
    assert programs.startswith("clients PYTHON=/opt/3.11/python3 VENV=.venv ARGS=-m programs ")
    all_parts = "test-all PYTHON=/opt/3.11/python3 VENV=.venv ARGS=--without-suite"
    assert exhaustive.startswith(all_parts)
    assert suite == f"test PYTHON=/opt/3.11/python3 VENV=.venv {COVERAGE}"
    assert printed.splitlines() == [
        "Python 3.11: the suite",
        "Python 3.12: a server, passed",
        "Python 3.13: a part of the suite, passed",
        "Python 3.14: not run, there is no interpreter that runs",
    ]


def test_the_partial_suite_names_existing_tests(tmp_path: Path) -> None:
    _, calls, _ = run_ci(tmp_path, ["3.11", "3.14"])
    [part] = re.findall(r" t=(.*) ARGS=", "\n".join(calls))
    assert len(part.split()) > 5
    assert [path for path in part.split() if not (ROOT / path).exists()] == []


def test_missing_newer_pythons_are_reported(tmp_path: Path) -> None:
    status, calls, printed = run_ci(tmp_path, ["3.11"])
    assert status == 0
    assert [call.split()[0] for call in calls] == ["check", "clients", "test-all", "test"]
    assert printed.splitlines()[-1] == "3.13+ not run"


def test_an_environment_of_another_version_is_kept(tmp_path: Path) -> None:
    write_python(tmp_path / ".venv/bin/python").write_text("#!/bin/sh\necho 3.13\n")
    _, calls, _ = run_ci(tmp_path, ["3.11", "3.13"])
    _, newest, _, _, suite = calls
    assert " VENV=.venv " in newest
    assert suite == f"test PYTHON=/opt/3.11/python3 VENV=.venv-3.11 {COVERAGE}"


@pytest.mark.parametrize(
    "failing", ["check", "VENV=.venv-3.12", "VENV=.venv-3.13", "clients", "test-all"]
)
def test_a_failure_fails_the_run_but_the_rest_still_runs(tmp_path: Path, failing: str) -> None:
    write_python(tmp_path / ".venv/bin/python").write_text("#!/bin/sh\necho 3.11\n")
    status, calls, printed = run_ci(tmp_path, ["3.11", "3.12", "3.13"], failing=failing)
    assert status == 2
    assert len(calls) == 6
    assert ("FAILED" in printed) == (failing not in ("check", "clients", "test-all"))


def test_without_any_python_the_run_fails_with_a_message(tmp_path: Path) -> None:
    status, calls, printed = run_ci(tmp_path, [])
    assert (status, calls) == (1, [])
    assert printed.startswith("none of Python 3.11 3.12 3.13 3.14 runs here")
