"""A separate process estimates the memory requirement of a model."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.engine import fit
from app.engine.model_info import complete_config
from app.runners.preflight import estimate_memory
from app.runners.restart_policy import RUNNER_CRASHED
from tests import tiny
from tests.runners.spawning import is_alive
from tests.server_process import ROOT
from tests.waiting import wait_until


@pytest.fixture
def files(tiny_model: Path) -> ModelFiles:
    return complete_config(store.find(str(tiny_model)))


def test_the_process_gives_the_same_estimate(files: ModelFiles) -> None:
    settings = Settings(context=700, parallel=3)
    estimate, expected = (
        asyncio.run(estimate_memory(files, settings, 0)),
        fit.estimate_memory(files, settings),
    )
    assert (estimate.min_bytes, estimate.preferred_bytes) == (
        expected.min_bytes,
        expected.preferred_bytes,
    )
    assert estimate.device_budget > 0


def test_invalid_files_give_the_same_error(files: ModelFiles, tmp_path: Path) -> None:
    broken = complete_config(store.find(str(tiny.write(tmp_path / "broken"))))
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(AppError, match="safetensors") as caught:
        asyncio.run(estimate_memory(broken, Settings(), 0))
    assert caught.value.kind is ErrorKind.MODEL_FILES


def test_a_failing_process_is_an_error_with_its_output(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(AppError, match=r"status 3: no such library$") as caught:
        asyncio.run(estimate_memory(files, Settings(), 0))
    assert (caught.value.kind, caught.value.code) == (ErrorKind.MODEL_FILES, RUNNER_CRASHED)


def test_a_process_that_cannot_be_started_is_an_engine_error(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(AppError, match="the process could not be started") as caught:
        asyncio.run(estimate_memory(files, Settings(), 0))
    assert caught.value.kind is ErrorKind.ENGINE


def test_an_app_package_in_the_working_directory_is_ignored(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would import that package first, with the working directory in its path."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert asyncio.run(estimate_memory(files, Settings(), 0)).min_bytes > 0


HANG = """
import os
import app.engine.fit as it, app.runners.parent_watch as line

def estimate_memory(*_):
    open({pid_file!r}, "w").write(f"{{os.getpid()}}\\n")
    os.read(os.pipe()[0], 1)

it.estimate_memory = estimate_memory
line.tie_to_parent = lambda: None
"""

ESTIMATE = """
import asyncio, sys
from app import store
from app.core.settings import Settings
from app.runners.preflight import estimate_memory
asyncio.run(estimate_memory(store.resolve(sys.argv[1]), Settings(), 0))
"""


def test_the_process_exits_when_its_parent_is_killed(
    tiny_model: Path, tmp_path: Path, plant: Callable[[str], None]
) -> None:
    pid_file = tmp_path / "pid"
    plant(HANG.format(pid_file=str(pid_file)))
    with subprocess.Popen([sys.executable, "-c", ESTIMATE, str(tiny_model)], cwd=ROOT) as parent:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        process = int(pid_file.read_text())
        assert is_alive(process)
        parent.kill()
    wait_until(lambda: not is_alive(process))


def test_a_hanging_process_is_killed(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(AppError, match="took longer than "):
        asyncio.run(estimate_memory(files, replace(Settings(), load_timeout=0.5), 0))
    assert not is_alive(int((tmp_path / "pid").read_text()))
