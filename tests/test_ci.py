"""What CI runs, and with which Pythons: `.ci/interpreters` finds them, `.ci/run` divides the work.

The search runs for real, with this test's own interpreter at every place that is searched. `make`
is a script that notes how it was called: what it would do takes longer than the rest of the suite.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HERE = "{}.{}".format(*sys.version_info)

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def versions() -> list[str]:
    said = subprocess.run(
        [ROOT / ".ci/interpreters", "--versions"], capture_output=True, text=True, check=True
    )
    return said.stdout.split()


def script(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def python(path: Path) -> Path:
    return script(path, f'exec "{sys.executable}" "$@"')


def interpreters(folder: Path, **variables: str) -> list[str]:
    """The lines of `.ci/interpreters` where `folder/bin` is all of PATH, and `folder/home` HOME."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("bash", "awk", "env"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    done = subprocess.run(
        [tools / "bash", ROOT / ".ci/interpreters"],
        env={"PATH": str(tools), "HOME": str(folder / "home"), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_images_python_is_one_that_is_tested() -> None:
    [version] = re.findall(
        r"^ARG BASE=python:(\d+\.\d+)", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE
    )
    assert version in versions()


def test_the_oldest_version_that_installs_is_the_oldest_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["requires-python"] == f">={versions()[0]}"


def test_this_python_is_one_that_is_tested() -> None:
    assert HERE in versions()


PLACES = {
    "PATH": "bin/python3",
    "PATH, by its version": f"bin/python{HERE}",
    "pyenv": "home/.pyenv/versions/3.x/bin/python3",
    "uv": "home/.local/share/uv/python/cpython-3.x/bin/python3",
    "asdf": "home/.asdf/installs/python/3.x/bin/python3",
    "mise": "home/.local/share/mise/installs/python/3.x/bin/python3",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_an_interpreter_is_found_where_its_manager_keeps_it(tmp_path: Path, place: str) -> None:
    # the interpreters that every machine may have are found as well, at fixed places
    without = interpreters(tmp_path)
    shutil.rmtree(tmp_path / "bin")
    python(tmp_path / place)
    [line] = [line for line in interpreters(tmp_path) if line.startswith(f"{HERE} ")]
    if not [line for line in without if line.startswith(f"{HERE} ")]:
        assert line == f"{HERE} {sys.executable}"


def test_a_variable_of_a_manager_leads_to_its_folder(tmp_path: Path) -> None:
    python(tmp_path / "elsewhere/versions/3.x/bin/python3")
    lines = interpreters(tmp_path, PYENV_ROOT=str(tmp_path / "elsewhere"))
    assert [line for line in lines if line.startswith(f"{HERE} ")]


def test_an_interpreter_that_does_not_run_does_not_count(tmp_path: Path) -> None:
    """A shim of pyenv for a version that is not selected."""
    shim = script(tmp_path / f"bin/python{HERE}", "echo 'pyenv: command not found' >&2", "exit 127")
    found = interpreters(tmp_path)
    assert str(shim) not in "\n".join(found)
    python(tmp_path / "home/.pyenv/versions/3.x/bin/python3")
    shutil.rmtree(tmp_path / "bin")
    script(shim, "exit 127")
    assert [line for line in interpreters(tmp_path) if line.startswith(f"{HERE} ")]


def test_an_interpreter_that_cannot_make_environments_does_not_count(tmp_path: Path) -> None:
    """Debian's python3 without its package python3-venv. Here without site's folders, and with a
    module that takes the place of ensurepip and cannot be imported."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/ensurepip.py").write_text("raise ImportError\n")
    before = interpreters(tmp_path)
    shutil.rmtree(tmp_path / "bin")
    script(
        tmp_path / "bin/python3",
        f'PYTHONPATH="{tmp_path / "broken"}" exec "{sys.executable}" "$@"',
    )
    assert interpreters(tmp_path) == before


def ci(folder: Path, found: list[str], *, failing: str = "none") -> tuple[int, list[str], str]:
    """(exit status, calls of make, all that was printed) of `.ci/run` in a copy of its own, where
    these versions were found. A call of make that holds `failing` fails."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    lines = [f"echo {version} /opt/{version}/python3" for version in found]
    script(
        folder / ".ci/interpreters",
        f'if [ "$1" = --versions ]; then echo {" ".join(versions())}; exit; fi',
        *lines,
    )
    tools = folder / "tools"
    for name in ("g++", "chromium", "nginx"):  # nothing is missing, so that nothing is installed
        script(tools / name)
    script(
        tools / "make",
        f'echo "$@" >> "{folder}/calls"',
        f'case "$*" in *"{failing}"*) exit 2;; esac',
    )
    done = subprocess.run(
        ["bash", folder / ".ci/run"],
        env={"PATH": f"{tools}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    calls = folder / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else [], done.stdout


def test_the_oldest_runs_all_the_newest_a_part_and_each_a_server(tmp_path: Path) -> None:
    python(tmp_path / ".venv/bin/python").write_text("#!/bin/sh\necho 3.11\n")
    status, calls, printed = ci(tmp_path, ["3.11", "3.12", "3.13"])
    assert status == 0
    check, middle, newest, suite = calls
    assert check == "check PYTHON=/opt/3.11/python3"
    server = "t=tests/test_interpreter.py"
    assert middle == f"test PYTHON=/opt/3.12/python3 VENV=.venv-3.12 {server} ARGS="
    assert newest.startswith(f"test PYTHON=/opt/3.13/python3 VENV=.venv-3.13 {server} ")
    assert suite == "test PYTHON=/opt/3.11/python3 VENV=.venv"
    assert printed.splitlines() == [
        "Python 3.11: the suite",
        "Python 3.12: a server, passed",
        "Python 3.13: a part of the suite, passed",
        "Python 3.14: not run, there is no interpreter that runs",
    ]


def test_the_part_names_tests_that_there_are(tmp_path: Path) -> None:
    _, calls, _ = ci(tmp_path, ["3.11", "3.14"])
    [part] = re.findall(r" t=(.*) ARGS=", "\n".join(calls))
    assert len(part.split()) > 5
    assert [path for path in part.split() if not (ROOT / path).exists()] == []


def test_with_the_oldest_alone_the_log_says_that_no_newer_one_ran(tmp_path: Path) -> None:
    status, calls, printed = ci(tmp_path, ["3.11"])
    assert status == 0
    assert [call.split()[0] for call in calls] == ["check", "test"]
    assert printed.splitlines()[-1] == "3.13+ not run"


def test_an_environment_of_another_version_is_left_as_it_is(tmp_path: Path) -> None:
    python(tmp_path / ".venv/bin/python").write_text("#!/bin/sh\necho 3.13\n")
    _, calls, _ = ci(tmp_path, ["3.11", "3.13"])
    _, newest, suite = calls
    assert " VENV=.venv " in newest
    assert suite == "test PYTHON=/opt/3.11/python3 VENV=.venv-3.11"


@pytest.mark.parametrize("failing", ["check", "VENV=.venv-3.12", "VENV=.venv-3.13"])
def test_what_failed_fails_the_run_and_the_rest_runs_all_the_same(
    tmp_path: Path, failing: str
) -> None:
    python(tmp_path / ".venv/bin/python").write_text("#!/bin/sh\necho 3.11\n")
    status, calls, printed = ci(tmp_path, ["3.11", "3.12", "3.13"], failing=failing)
    assert status == 2
    assert len(calls) == 4
    assert ("FAILED" in printed) == (failing != "check")


def test_without_any_python_the_run_fails_and_says_so(tmp_path: Path) -> None:
    status, calls, printed = ci(tmp_path, [])
    assert (status, calls) == (1, [])
    assert printed.startswith("none of Python 3.11 3.12 3.13 3.14 runs here")
