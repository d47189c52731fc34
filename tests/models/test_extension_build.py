"""A process uses the compiled extension only if its server found the same one at its start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models import extension_build, kernels
from models.extension_build import (
    BUILT_LATER,
    CHANGED,
    VARIABLE,
    ExtensionChangedError,
    compute_identity,
    may_use,
)
from tests.server_process import run_server

ROOT = Path(__file__).resolve().parents[2]
FOLDER = extension_build.FOLDER

built = pytest.mark.skipif(not kernels.describe().built, reason="the kernels are not built")


def describe(pinned: str | None) -> subprocess.CompletedProcess[str]:
    """The kernels of a new process whose server found this at its start."""
    program = (
        "import json; from models import cpu_backend, kernels; "
        "print(json.dumps([kernels.describe().enabled, kernels.describe().why, "
        "cpu_backend.count_blas_calls()]))"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    variables.pop(VARIABLE, None)
    if pinned is not None:
        variables[VARIABLE] = pinned
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


@built
@pytest.mark.parametrize("pinned", [None, extension_build.IDENTITY, "/elsewhere/kernels none"])
def test_the_same_extension_is_used(pinned: str | None) -> None:
    assert json.loads(describe(pinned).stdout)[:2] == [True, None]


@built
def test_an_extension_that_was_built_later_is_not_used() -> None:
    """Neither the kernels nor the BLAS shim, which counts its calls."""
    assert json.loads(describe(f"{FOLDER} none").stdout) == [False, BUILT_LATER, None]


@built
def test_with_another_extension_the_process_ends() -> None:
    process = describe(f"{FOLDER} {'0' * 64}")
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].endswith(f"ExtensionChangedError: {CHANGED}")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
def test_a_server_pins_the_extension_for_its_model_processes() -> None:
    with run_server("--runner", "process") as server:
        children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
        pids = {pid for file in children for pid in file.read_text().split()}
        environs = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
    assert environs
    for variables in environs:
        assert f"{VARIABLE}={extension_build.IDENTITY}".encode() in variables


def test_the_identity_depends_on_both_files(tmp_path: Path) -> None:
    found = [compute_identity(tmp_path)]
    for name, content in ((extension_build._NAMES[0], b"a"), (extension_build._NAMES[1], b"a")):
        (tmp_path / name).write_bytes(content)
        found.append(compute_identity(tmp_path))
    (tmp_path / name).write_bytes(b"b")
    found.append(compute_identity(tmp_path))
    assert found[0] == f"{tmp_path} none"
    assert len(set(found)) == 4


def test_without_its_files_a_process_does_not_replace_one_that_had_them(tmp_path: Path) -> None:
    pinned = {VARIABLE: f"{tmp_path} {'0' * 64}"}
    with pytest.raises(ExtensionChangedError, match="restart the server"):
        may_use(pinned, current=compute_identity(tmp_path), folder=tmp_path)
    assert not may_use({VARIABLE: f"{tmp_path} none"}, current="x", folder=tmp_path)
    assert may_use({}, current="x", folder=tmp_path)
