"""`deploy/install.py`: the choice of uv or pip, the build tools, and a whole installation.

The script runs before anything is installed, so it is loaded by its path.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.models.kernels.test_install import make_environ
from tests.rows import rows
from tests.test_package import check_answer, run_server
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deploy_install", ROOT / "deploy/install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


install = load_script()


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with uv and without configuration files."""
    program = tmp_path / "bin/uv"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    return {
        "PATH": str(program.parent),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "PIP_CONFIG_FILE": os.devnull,
    }


def test_uv_is_used_if_it_is_installed(environ: dict[str, str]) -> None:
    uv, note = install.find_uv(environ)
    assert (uv, note) == (f"{environ['PATH']}/uv", None)
    assert install.find_uv({**environ, "PATH": "/nonexistent"}) == (None, None)


@pytest.mark.parametrize(
    ("setting", "note"),
    [
        ("index-url = file:///a", "pip is used: index-url is set for pip, but no index is set"),
        ("no-index = true", "pip is used: no-index is set for pip, but no index is set"),
        ("extra-index-url = file:///a", None),
    ],
)
def test_pip_is_used_if_its_index_is_configured(
    environ: dict[str, str], tmp_path: Path, setting: str, note: str | None
) -> None:
    """The public index would otherwise be asked on a machine that has another one."""
    (tmp_path / "pip.conf").write_text(f"[global]\n{setting}\n")
    environ["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
    # also read: the configuration of this machine
    if install.find_pip_index({**environ, "PIP_CONFIG_FILE": "/nonexistent"}):
        pytest.skip("pip's index is configured on this machine")
    uv, found = install.find_uv(environ)
    assert (uv is None) is (note is not None)
    assert (found or "").startswith(note or "")
    assert install.find_uv({**environ, "UV_DEFAULT_INDEX": "file:///a"})[1] is None


def test_a_variable_of_pip_counts_like_its_file(environ: dict[str, str]) -> None:
    assert install.find_pip_index({**environ, "PIP_INDEX_URL": "file:///a"}) == "index-url"
    assert install.find_pip_index(environ) is None


def test_if_uv_fails_pip_installs(
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[tuple[str, ...]] = []
    run = install.run

    def record(*command: str, environ: dict[str, str] | None = None) -> None:
        calls.append(command)
        if command[0].endswith("uv"):
            run(*command, environ=environ)

    monkeypatch.setattr(install, "run", record)
    installer = install.Installer(
        environment=tmp_path / "venv", uv=f"{environ['PATH']}/uv", clear=True
    )
    installer.install_lock(tmp_path / "lock.txt")
    assert [Path(command[0]).name[:6] for command in calls] == ["uv", "python"]
    assert "--require-hashes" in calls[0]
    assert "--require-hashes" in calls[1]
    [line] = capsys.readouterr().err.split("\n")[1:-1]
    assert line.startswith("uv failed, so pip is used (")


@pytest.mark.parametrize("index", [{}, {"PIP_INDEX_URL": "file:///a"}], ids=["uv", "pip"])
def test_the_uv_of_a_lock_installs_the_other_packages_unless_only_pip_has_an_index(
    tmp_path: Path, index: dict[str, str]
) -> None:
    locks: list[str] = []
    program = tmp_path / "bin/uv"

    class Recorder(install.Installer):
        def install_lock(self, lock: Path) -> None:
            locks.append(lock.read_text("utf-8"))
            program.parent.mkdir()
            program.write_text("#!/bin/sh\n")
            program.chmod(0o755)

    lock = ROOT / "requirements/dev.txt"
    installer = Recorder(environment=tmp_path, uv=None, clear=False)
    environ = {"PIP_CONFIG_FILE": os.devnull, "XDG_CONFIG_HOME": str(tmp_path), **index}
    found = install.add_uv(installer, lock, environ)
    assert [re.findall("^[a-z0-9-]+==", text, re.MULTILINE) for text in locks] == [["uv=="]]
    if index or not install.find_pip_index(environ):
        assert found.uv == (None if index else str(program))
    # nothing is installed if there is one
    with_uv = Recorder(environment=tmp_path, uv="/usr/bin/uv", clear=False)
    assert install.add_uv(with_uv, lock, environ) is with_uv


def test_a_failed_command_reports_its_output() -> None:
    with pytest.raises(install.InstallError, match="an answer"):
        install.run(sys.executable, "-c", "print('an answer'); raise SystemExit(1)")


@pytest.mark.parametrize("package", ["pip", "setuptools"])
def test_one_package_of_the_lock_keeps_its_hashes(package: str) -> None:
    with install.extract_lock(package) as lock:
        text = lock.read_text()
    assert re.findall(r"(?m)^[\w.-]+==", text) == [f"{package}=="]
    assert "--hash=sha256:" in text


def test_the_compiler_is_that_of_the_makefile(tmp_path: Path) -> None:
    """Both decide whether the kernels are compiled."""
    assert install.find_compiler({"MLXRUNNER_BUILD_KERNELS": "0"}) is None
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "command -v $(CXX) c++ g++ clang++" in makefile


def test_a_step_is_one_line_in_a_pipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with install.step(2, "installing", progress_log=tmp_path):
        pass
    assert capsys.readouterr().out == "[2/4] installing … 0 s\n"


def test_a_long_step_shows_its_progress_in_a_pipe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal, the step was silent for minutes."""
    monkeypatch.setattr(install, "LOG_SECONDS", 0.01)
    log, written = tmp_path / "editable" / "log-build.txt", list[str]()
    log.parent.mkdir()

    def has_written(text: str) -> bool:
        written.append(capsys.readouterr().out)
        return text in "".join(written)

    with install.step(4, "compiling", progress_log=tmp_path):
        for done in ("1/43", "20/43"):
            with log.open("a") as file:
                file.write(f"[{done}] Building CXX object\n")
            os.utime(log, (time.time() + 60, time.time() + 60))
            wait_until(lambda done=done: has_written(f"{done} files after "))
    written.append(capsys.readouterr().out)
    text = re.sub(r"\d+ s\b", "N s", "".join(written))
    assert text == (
        "[4/4] compiling …\n      1/43 files after N s\n      20/43 files after N s\n"
        "[4/4] compiling … N s\n"
    )


@rows(
    ("jobs", "text"),
    [
        ("1", "with one job, about 4 minutes"),
        ("2", "with 2 jobs, about 2 minutes"),
        ("3", "with 3 jobs, about 2 minutes"),
        ("16", "with 16 jobs, about a minute"),
    ],
)
def test_the_time_to_compile_depends_on_the_number_of_jobs(jobs: str, text: str) -> None:
    environ = {"CMAKE_BUILD_PARALLEL_LEVEL": jobs}
    assert install.describe_compilation(environ) == f"compiling the CPU kernels {text}"
    assert install.describe_compilation({}).startswith("compiling the CPU kernels with ")


def copy_sources(folder: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


@pytest.mark.network
@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_a_clone_answers_after_two_commands(tmp_path: Path) -> None:
    """In a path with spaces, without HOME, without compiler, in a folder with foreign packages."""
    clone = tmp_path / "a clone"
    copy_sources(clone)
    empty = tmp_path / "bin"
    empty.mkdir()
    for name in ("sh", "touch", "rm", "cat"):
        program = shutil.which(name)
        assert program is not None
        (empty / name).symlink_to(program)
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    variables = make_environ(PATH=str(empty))
    variables.pop("HOME", None)
    process = subprocess.run(
        [str(shutil.which("make")), "venv", f"PYTHON={python}"],
        cwd=clone,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    steps = re.findall(r"(?m)^\[(\d)/4\] .* … \d+ s$", process.stdout)
    assert steps == ["1", "2", "3", "4"]
    assert "no C++20 compiler was found" in process.stderr
    installed = clone.glob(".venv/lib/*/site-packages/*.dist-info")
    names = {path.name.partition("-")[0] for path in installed}
    assert names.isdisjoint({"cmake", "nanobind", "ninja", "scikit_build_core", "setuptools"})
    foreign = tmp_path / "foreign"
    for name in ("app", "models"):
        (foreign / name).mkdir(parents=True)
        (foreign / name / "__init__.py").write_text("raise ImportError('a foreign package')")
    with run_server(
        [clone / ".venv/bin/mlxrunner", "serve"], cwd=foreign, log=tmp_path / "log"
    ) as url:
        check_answer(url)
