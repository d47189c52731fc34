"""Whether there is a compiler or not, an install goes well; what could not be built is told in one
line, and what was built is what the Makefile takes it for."""

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
        bool(MISSING), reason=f"requirements/serve.txt brings what is missing: {MISSING}"
    ),
    pytest.mark.skipif("mlx-cpu" not in NAMES, reason="MLX does not compute on the CPU here"),
]
compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler"
)
make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def project(tmp_path) -> Path:
    """What an install reads, but for what was compiled in place."""
    copy = tmp_path / "project"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile"):
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


def around(**variables: str) -> dict[str, str]:
    """The environment, without what the `make` or the person that started the tests may have said
    of building."""
    said = ("CC", "CUDA", "CXX", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MLXRUNNER_BUILD_KERNELS")
    return {name: value for name, value in os.environ.items() if name not in said} | variables


def installed(project: Path, *, python: Path = Path(sys.executable)) -> tuple[str, Path]:
    """What CMake says, and where it installed: what an install does, without pip around it."""
    cmake, ninja = (Path(sysconfig.get_path("scripts"), name) for name in ("cmake", "ninja"))
    folder, place = project.parent / "build", project.parent / "installed"
    said = run(
        *(cmake, "-S", project / "models/kernels", "-B", folder, "-G", "Ninja"),
        *(f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={python}"),
        *(f"-DCMAKE_INSTALL_PREFIX={place}",),
        cwd=project,
        env=around(),
    )
    said += run(cmake, "--install", folder, cwd=project)
    return said, place / "models/kernels"


def test_without_a_compiler_an_install_goes_on_and_says_what_is_lost(project, tmp_path):
    place, empty = tmp_path / "place", tmp_path / "empty"
    empty.mkdir()
    said = run(
        *(sys.executable, "-m", "pip", "install", "--verbose", "--no-index"),
        *("--no-build-isolation", "--no-deps", "--target", place, project),
        cwd=tmp_path,
        env=around(PATH=str(empty)),
    )
    line = f"mlxrunner: no C++20 compiler was found, so the CPU kernels are not built: {LOST}; "
    package = place / "mlxrunner"
    told = (package / "models/kernels/not_built.txt").read_text("utf-8")
    assert told == f"{line}install g++, and then mlxrunner again (with make or pip)\n"
    assert told.strip() in said
    assert not list(place.rglob("*.so"))
    here = f"import sys; sys.path.insert(0, {str(package)!r}); "
    ask = "from models import kernels as k; print(k.__file__, k.describe().built, k.ops())"
    answer = run(sys.executable, "-c", here + ask, cwd=tmp_path)
    assert answer.split() == [str(package / "models/kernels/__init__.py"), "False", "None"]
    ask = (
        "from models import cpu_backend, kernels; "
        "print(kernels.describe().why, cpu_backend.ACTIVE.why, sep='\\n')"
    )
    kernels_why, blas_why = run(sys.executable, "-c", here + ask, cwd=tmp_path).splitlines()
    assert kernels_why == (
        "no C++20 compiler was found, so the CPU kernels are not built; install g++, and then "
        "mlxrunner again (with make or pip)"
    )
    # the second where the system has no OpenBLAS either
    assert blas_why in ("None", f"{cpu_backend.NOT_BUILT}: {kernels_why}")


@compiler
def test_what_does_not_compile_is_left_out_and_the_compilers_words_are_kept(project):
    """An extension of one line in the place of ours, which takes most of a minute to compile."""
    source = project / "models/kernels/src"
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(broken LANGUAGES CXX)\n"
        "add_library(broken MODULE broken.cpp)\n"
    )
    (source / "broken.cpp").write_text("#error this cannot be compiled\n")
    said, place = installed(project)
    [told] = (place / "not_built.txt").read_text("utf-8").splitlines()
    assert told in said
    assert LOST in told
    log = Path(told.partition(" could not compile the CPU kernels (see ")[2].partition(")")[0])
    assert "this cannot be compiled" in log.read_text("utf-8")


@compiler
def test_a_module_that_would_not_know_mlxs_arrays_is_left_out(project):
    """MLX built with another nanobind: each of our functions would refuse MLX's arrays."""
    source = project / "models/kernels/src"
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(other LANGUAGES CXX)\n"
        "add_library(other MODULE other.cpp)\nset_target_properties(other PROPERTIES PREFIX ''"
        f" OUTPUT_NAME _kernels SUFFIX {SUFFIX})\n".replace("''", '""')
    )
    (source / "other.cpp").write_text('extern const char tag[] = "nanobind_other_a1_v7";\n')
    said, place = installed(project)
    [told] = (place / "not_built.txt").read_text("utf-8").splitlines()
    assert told in said
    assert "another nanobind" in told
    assert "nanobind_other_a1_v7" in told
    assert not list(place.glob("*.so"))


def test_without_mlx_beside_it_an_install_says_how_to_have_it(project, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    _, place = installed(project, python=bare)
    [told] = (place / "not_built.txt").read_text("utf-8").splitlines()
    assert LOST in told
    assert told.endswith("install mlx[cpu] first, and then mlxrunner with --no-build-isolation")


def test_what_an_earlier_install_left_among_the_sources_goes(project):
    """An old module would be loaded, and the new sources thought to be in use."""
    (project / "models/kernels/src/CMakeLists.txt").write_text("message(FATAL_ERROR no)\n")
    place = project.parent / "installed/models/kernels"
    place.mkdir(parents=True)
    (place / f"_kernels{SUFFIX}").touch()
    (place / "libmlxrunner_blas.so").touch()
    installed(project)
    assert [file.name for file in place.iterdir()] == ["not_built.txt"]


def made(project: Path, **variables: str) -> str:
    """What `make venv` would do now."""
    return run("make", "--dry-run", "venv", cwd=project, env=around(**variables))


@pytest.fixture
def settled(project) -> Path:
    """A project whose environment was made after all that it depends on."""
    (project / "requirements").mkdir()
    (project / "requirements/serve.txt").touch()
    for path in project.rglob("*"):
        os.utime(path, (1_000_000, 1_000_000))
    (project / ".venv").mkdir()
    for age, name in ((3_000_000, ".self"), (2_000_000, ".serve")):
        (project / ".venv" / name).touch()
        os.utime(project / ".venv" / name, (age, age))
    return project


@make
@compiler
def test_make_compiles_again_what_changed_and_nothing_else(settled):
    assert "--editable" not in made(settled)
    (settled / "models/kernels/src/module.cpp").touch()
    assert "--editable" in made(settled)


@make
@compiler
def test_a_source_that_is_new_is_compiled(settled):
    (settled / "models/kernels/src/new.cpp").touch()
    assert "--editable" in made(settled)


@make
@compiler
def test_a_compiler_that_came_later_is_noticed(settled):
    (settled / ".venv/.self").rename(settled / ".venv/.self-uncompiled")
    assert "--editable" in made(settled)
    assert "--editable" not in made(settled, MLXRUNNER_BUILD_KERNELS="0")


@make
@compiler
def test_make_says_each_time_what_is_lost(settled):
    assert run("make", "--silent", "venv", cwd=settled, env=around()) == ""
    line = f"mlxrunner: something was not there: {LOST}\n"
    (settled / "models/kernels/not_built.txt").write_text(line)
    assert run("make", "--silent", "venv", cwd=settled, env=around()) == line


@pytest.mark.skipif(not list((ROOT / ".venv").glob(".self*")), reason="make did not install this")
def test_there_is_either_a_module_or_a_reason():
    built = (ROOT / f"models/kernels/_kernels{SUFFIX}").is_file()
    assert built != (ROOT / "models/kernels/not_built.txt").is_file()
    if (ROOT / ".venv/.self-uncompiled").is_file():
        assert not built
