"""Several distributions that install the same libmlx.so are detected without importing MLX.

The files of the installed MLX are linked into a new folder, and the metadata of another
distribution is added next to them, as an installer leaves it.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from app.core import distributions
from app.core.distributions import (
    MlxLibrary,
    check_mlx_library,
    get_own_version,
    get_version,
    inspect_mlx_library,
    repair_commands,
)
from app.core.errors import AppError

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "mlx/lib/libmlx.so"

[CPU] = [
    found
    for found in importlib.metadata.distributions()
    if str(found.metadata["Name"]).lower() == "mlx-cpu"
] or [None]

pytestmark = pytest.mark.skipif(CPU is None, reason="MLX does not use the CPU")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder like site-packages, with the files of the installed mlx and mlx-cpu."""
    folder = tmp_path / "site"
    for name in ("mlx", "mlx-cpu"):
        found = importlib.metadata.distribution(name)
        for file in found.files or ():
            if ".." in file.parts or not Path(str(found.locate_file(file))).is_file():
                continue
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(str(found.locate_file(file)), folder / file)
    return folder


def add_metadata(folder: Path, name: str, size: int) -> None:
    info = folder / f"{name.replace('-', '_')}-0.32.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.4\n")
    (info / "RECORD").write_text(f"{LIBRARY},sha256=abc,{size}\n{info.name}/METADATA,,\n")


def replace_library(folder: Path, size: int) -> None:
    (folder / LIBRARY).unlink()
    with (folder / LIBRARY).open("wb") as file:
        file.truncate(size)


def run_command(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run mlxrunner with the MLX of this folder. A finder rejects every import of MLX."""
    program = (
        "import sys\n"
        "class Forbid:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith('mlx.'): raise RuntimeError('MLX is imported')\n"
        f"sys.path[:0] = [{str(site)!r}, {str(ROOT)!r}]\n"
        "sys.meta_path.insert(0, Forbid())\n"
        "from app.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_this_environment_is_consistent() -> None:
    found = inspect_mlx_library()
    assert (found.loaded, found.is_consistent) == ("mlx-cpu", True)
    check_mlx_library()


def test_the_linked_folder_is_consistent(site: Path) -> None:
    found = inspect_mlx_library(site)
    assert found == MlxLibrary(
        providers=(("mlx-cpu", importlib.metadata.version("mlx-cpu")),), loaded="mlx-cpu", own=()
    )


@pytest.mark.parametrize("command", ["serve", "show", "doctor"])
def test_with_both_distributions_the_command_ends_with_one_line(site: Path, command: str) -> None:
    add_metadata(site, "mlx-cuda-13", 300_000_000)
    process = run_command(site, command)
    assert (process.returncode, process.stdout) == (1, "")
    [line] = process.stderr.splitlines()
    version = importlib.metadata.version("mlx-cpu")
    assert line == (
        "mlxrunner: mlx-cpu and mlx-cuda-13 are both installed, but have the same file libmlx.so "
        f"(now of mlx-cpu); repair MLX with: {sys.executable} -m pip uninstall --yes mlx-cpu "
        f"mlx-cuda-13 && {sys.executable} -m pip install --no-deps mlx-cpu=={version}"
    )


def test_the_distribution_of_the_library_is_kept(site: Path) -> None:
    add_metadata(site, "mlx-cuda-13", 30_000_000)
    replace_library(site, 30_000_000)
    with pytest.raises(AppError, match=r"now of mlx-cuda-13.*--no-deps mlx-cuda-13==0\.32\.4$"):
        check_mlx_library(inspect_mlx_library(site))


def test_our_own_distribution_decides_which_one_is_kept(site: Path) -> None:
    add_metadata(site, "mlx-cuda-13", 30_000_000)
    add_metadata(site, "mlxrunner-cuda", 1)
    found = inspect_mlx_library(site)
    assert found.loaded == "mlx-cpu"
    assert repair_commands(found)[1].endswith("install --no-deps mlx-cuda-13==0.32.4")


def test_both_distributions_of_ours_are_replaced(site: Path) -> None:
    """They also have the same files."""
    add_metadata(site, "mlx-cuda-13", 30_000_000)
    for name in ("mlxrunner", "mlxrunner-cuda"):
        add_metadata(site, name, 1)
    remove, install = repair_commands(inspect_mlx_library(site))
    assert remove.endswith("--yes mlx-cpu mlx-cuda-13 mlxrunner mlxrunner-cuda")
    version = importlib.metadata.version("mlx-cpu")
    assert install.endswith(f"--no-deps mlx-cpu=={version} mlxrunner==0.32.4")


@pytest.mark.parametrize("size", [5, None])
def test_a_library_of_another_distribution_is_an_error(site: Path, size: int | None) -> None:
    """None: the library was removed with the other distribution."""
    if size is None:
        (site / LIBRARY).unlink()
    else:
        replace_library(site, size)
    with pytest.raises(AppError, match=r"libmlx\.so is not the file of mlx-cpu"):
        check_mlx_library(inspect_mlx_library(site))


def test_without_metadata_there_is_no_error(site: Path) -> None:
    """Other package managers install MLX without RECORD."""
    for info in site.glob("mlx_cpu-*.dist-info"):
        shutil.rmtree(info)
    check_mlx_library(inspect_mlx_library(site))


def test_without_pip_the_commands_use_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions.importlib.util, "find_spec", lambda name: None)
    found = MlxLibrary(providers=(("mlx-cpu", "1"), ("mlx-cuda-13", "1")), loaded="mlx-cpu", own=())
    assert repair_commands(found) == (
        f"uv pip uninstall --python {sys.executable} mlx-cpu mlx-cuda-13",
        f"uv pip install --python {sys.executable} --no-deps mlx-cpu==1",
    )


def test_the_version_is_that_of_the_installed_distribution(tmp_path: Path) -> None:
    add_metadata(tmp_path, "mlxrunner-cuda", 1)
    (tmp_path / "app").symlink_to(ROOT / "app")
    program = "from app.core.distributions import get_own_version as f; print(f())"
    process = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == "0.32.4\n"
    assert get_own_version() == importlib.metadata.version("mlxrunner")


def test_a_version_is_that_of_the_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlx", "mlx-cpu", "pillow"):
        assert get_version(name) == importlib.metadata.version(name)
    info = tmp_path / "old.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: old\nVersion: 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert get_version("old") == "7"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        get_version("missing")


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    stem = name.replace("-", "_")
    info = f"{stem}-0.32.4.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.4\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,{len(data)}\n" for path, data in files.items())
    with zipfile.ZipFile(folder / f"{stem}-0.32.4-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")


@pytest.mark.exhaustive
def test_the_two_commands_repair_an_environment(tmp_path: Path) -> None:
    """pip installs, removes and repairs small wheels with the names and files of the real ones."""
    wheels, environment = tmp_path / "wheels", tmp_path / "environment"
    wheels.mkdir()
    write_wheel(wheels, "mlx", {"mlx/core.so": b""})
    write_wheel(wheels, "mlx-cpu", {LIBRARY: b"cpu"})
    write_wheel(wheels, "mlx-cuda-13", {LIBRARY: b"for cuda"})
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }

    def run(*command: str | Path) -> str:
        return subprocess.run(
            command, env=variables, check=True, capture_output=True, text=True
        ).stdout

    program = (
        "import json; from app.core import distributions as d; f = d.inspect_mlx_library(); "
        "print(json.dumps([f.loaded, f.is_consistent, *d.repair_commands(f)]))"
    )
    run(python, "-m", "pip", "install", "mlx", "mlx-cpu")
    assert json.loads(run(python, "-c", program))[:2] == ["mlx-cpu", True]
    run(python, "-m", "pip", "install", "mlx-cuda-13")
    loaded, consistent, *commands = json.loads(run(python, "-c", program))
    assert (loaded, consistent) == ("mlx-cuda-13", False)
    for command in commands:
        run("sh", "-c", command)
    assert json.loads(run(python, "-c", program))[:2] == ["mlx-cuda-13", True]
    # only the metadata of the CPU is left: its library is gone
    run(python, "-m", "pip", "install", "mlx-cpu")
    run(python, "-m", "pip", "uninstall", "--yes", "mlx-cuda-13")
    loaded, consistent, *commands = json.loads(run(python, "-c", program))
    assert (loaded, consistent) == (None, False)
    for command in commands:
        run("sh", "-c", command)
    assert json.loads(run(python, "-c", program))[:2] == ["mlx-cpu", True]
