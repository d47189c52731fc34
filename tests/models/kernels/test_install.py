"""Installs succeed with and without a compiler: one line reports a failed build of the kernels, and
the Makefile detects changed sources."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

from models import cpu_backend

ROOT = Path(__file__).resolve().parents[3]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
LOST = "models run on a CPU with MLX's own operations, many times slower"

TOOLS = ("pip", "cmake", "ninja", "nanobind", "scikit_build_core")
MISSING = [name for name in TOOLS if importlib.util.find_spec(name) is None]
NAMES = {str(found.metadata["Name"]).lower() for found in importlib.metadata.distributions()}

pytestmark = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"requirements/serve.txt installs the missing {MISSING}"
    ),
    pytest.mark.skipif("mlx-cpu" not in NAMES, reason="MLX does not use the CPU"),
]
compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
)
make = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of the files that an install reads, without compiled files."""
    copy = tmp_path / "project"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile", "openapi.yaml"):
        shutil.copy(ROOT / name, copy / name)
    built = shutil.ignore_patterns("__pycache__", "*.so", "not_built.txt", "builtin")
    shutil.copytree(ROOT / "models", copy / "models", ignore=built)
    shutil.copytree(ROOT / "deploy/wheel", copy / "deploy/wheel")
    return copy


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def make_environ(**variables: str) -> dict[str, str]:
    """The environment without build variables of the calling `make` or shell."""
    removed = (
        "CC",
        "CUDA",
        "CXX",
        "MAKEFLAGS",
        "MAKEOVERRIDES",
        "MFLAGS",
        "MLXRUNNER_BUILD_KERNELS",
    )
    return {name: value for name, value in os.environ.items() if name not in removed} | variables


def run_install(project: Path, *, python: Path = Path(sys.executable)) -> tuple[str, Path]:
    """Run the CMake steps of an install; its output and the installed folder."""
    cmake, ninja = (Path(sysconfig.get_path("scripts"), name) for name in ("cmake", "ninja"))
    folder, place = project.parent / "build", project.parent / "installed"
    output = run(
        *(cmake, "-S", project / "models/kernels", "-B", folder, "-G", "Ninja"),
        *(f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={python}"),
        *(f"-DCMAKE_INSTALL_PREFIX={place}",),
        cwd=project,
        env=make_environ(),
    )
    output += run(cmake, "--install", folder, cwd=project)
    return output, place / "models/kernels"


def test_an_install_without_a_compiler_succeeds_and_reports_the_missing_kernels(project, tmp_path):
    place, empty = tmp_path / "place", tmp_path / "empty"
    empty.mkdir()
    output = run(
        *(sys.executable, "-m", "pip", "install", "--verbose", "--no-index"),
        *("--no-build-isolation", "--no-deps", "--target", place, project),
        cwd=tmp_path,
        env=make_environ(PATH=str(empty)),
    )
    line = f"mlxrunner: no C++20 compiler was found, so the CPU kernels are not built: {LOST}; "
    package = place / "mlxrunner"
    reason = (package / "models/kernels/not_built.txt").read_text("utf-8")
    assert reason == f"{line}install g++, and then reinstall mlxrunner (with make or pip)\n"
    assert reason.strip() in output
    assert not list(place.rglob("*.so"))
    prefix = f"import sys; sys.path.insert(0, {str(package)!r}); "
    program = "from models import kernels as k; print(k.__file__, k.describe().built, k.ops())"
    answer = run(sys.executable, "-c", prefix + program, cwd=tmp_path)
    assert answer.split() == [str(package / "models/kernels/__init__.py"), "False", "None"]
    program = (
        "from models import cpu_backend, kernels; "
        "print(kernels.describe().why, cpu_backend.ACTIVE.why, sep='\\n')"
    )
    kernels_why, blas_why = run(sys.executable, "-c", prefix + program, cwd=tmp_path).splitlines()
    assert kernels_why == (
        "no C++20 compiler was found, so the CPU kernels are not built; install g++, and then "
        "reinstall mlxrunner (with make or pip)"
    )
    # the second value applies if the system also lacks OpenBLAS
    assert blas_why in ("None", f"{cpu_backend.NOT_BUILT}: {kernels_why}")


@pytest.mark.exhaustive
@compiler
def test_an_install_succeeds_after_a_compile_error_and_keeps_the_log(project):
    """A one-line extension replaces ours, which takes most of a minute to compile."""
    source = project / "models/kernels/src"
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(broken LANGUAGES CXX)\n"
        "add_library(broken MODULE broken.cpp)\n"
    )
    (source / "broken.cpp").write_text("#error this cannot be compiled\n")
    output, place = run_install(project)
    [reason] = (place / "not_built.txt").read_text("utf-8").splitlines()
    assert reason in output
    assert LOST in reason
    log = Path(reason.partition(" could not compile the CPU kernels (see ")[2].partition(")")[0])
    assert "this cannot be compiled" in log.read_text("utf-8")


@pytest.mark.exhaustive
@compiler
def test_a_module_built_with_another_nanobind_is_not_installed(project):
    """With a different nanobind than MLX's, our functions would reject MLX's arrays."""
    source = project / "models/kernels/src"
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(other LANGUAGES CXX)\n"
        "add_library(other MODULE other.cpp)\nset_target_properties(other PROPERTIES PREFIX ''"
        f" OUTPUT_NAME _kernels SUFFIX {SUFFIX})\n".replace("''", '""')
    )
    (source / "other.cpp").write_text('extern const char tag[] = "nanobind_other_a1_v7";\n')
    output, place = run_install(project)
    [reason] = (place / "not_built.txt").read_text("utf-8").splitlines()
    assert reason in output
    assert "another nanobind" in reason
    assert "nanobind_other_a1_v7" in reason
    assert not list(place.glob("*.so"))


def test_an_install_without_mlx_says_how_to_install_it(project, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    _, place = run_install(project, python=bare)
    [reason] = (place / "not_built.txt").read_text("utf-8").splitlines()
    assert LOST in reason
    assert reason.endswith(
        "install mlx[cpu] first, and then reinstall mlxrunner with --no-build-isolation"
    )


def test_an_install_removes_old_modules(project):
    """Otherwise the old module would be loaded instead of one from the new sources."""
    (project / "models/kernels/src/CMakeLists.txt").write_text("message(FATAL_ERROR no)\n")
    place = project.parent / "installed/models/kernels"
    place.mkdir(parents=True)
    (place / f"_kernels{SUFFIX}").touch()
    (place / "libmlxrunner_blas.so").touch()
    run_install(project)
    assert [file.name for file in place.iterdir()] == ["not_built.txt"]


# the part of make's command that installs the package
INSTALL = "--only project"


def dry_run_make(project: Path, **variables: str) -> str:
    """Output of a dry run of `make venv`."""
    return run("make", "--dry-run", "venv", cwd=project, env=make_environ(**variables))


@pytest.fixture
def built_project(project) -> Path:
    """A project whose environment is newer than its dependencies."""
    (project / "requirements").mkdir()
    for lock in ("serve", "build"):
        (project / f"requirements/{lock}.txt").touch()
    for path in project.rglob("*"):
        os.utime(path, (1_000_000, 1_000_000))
    (project / ".venv").mkdir()
    for age, name in ((3_000_000, ".self"), (2_000_000, ".serve")):
        (project / ".venv" / name).touch()
        os.utime(project / ".venv" / name, (age, age))
    return project


@make
@compiler
def test_make_compiles_only_after_changes(built_project):
    assert INSTALL not in dry_run_make(built_project)
    (built_project / "models/kernels/src/module.cpp").touch()
    assert INSTALL in dry_run_make(built_project)


@make
@compiler
def test_make_compiles_a_new_source(built_project):
    (built_project / "models/kernels/src/new.cpp").touch()
    assert INSTALL in dry_run_make(built_project)


@make
@compiler
def test_make_detects_a_new_compiler(built_project):
    (built_project / ".venv/.self").rename(built_project / ".venv/.self-uncompiled")
    assert INSTALL in dry_run_make(built_project)
    assert INSTALL not in dry_run_make(built_project, MLXRUNNER_BUILD_KERNELS="0")


@make
@compiler
def test_make_reports_the_missing_kernels_each_time(built_project):
    assert run("make", "--silent", "venv", cwd=built_project, env=make_environ()) == ""
    line = f"mlxrunner: something was not there: {LOST}\n"
    (built_project / "models/kernels/not_built.txt").write_text(line)
    assert run("make", "--silent", "venv", cwd=built_project, env=make_environ()) == line


@pytest.mark.skipif(not list((ROOT / ".venv").glob(".self*")), reason="make did not install this")
def test_either_the_module_or_a_reason_exists():
    built = (ROOT / f"models/kernels/_kernels{SUFFIX}").is_file()
    assert built != (ROOT / "models/kernels/not_built.txt").is_file()
    if (ROOT / ".venv/.self-uncompiled").is_file():
        assert not built
