"""What a model needs is found out in a process of its own."""

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
from tests import tiny
from tests.runners.spawning import lives, wait_until
from tests.server_process import ROOT


@pytest.fixture
def files(tiny_model: Path) -> ModelFiles:
    return complete_config(store.find(str(tiny_model)))


def test_the_process_says_what_would_be_found_here(files: ModelFiles) -> None:
    settings = Settings(context=700, parallel=3)
    told, here = (
        asyncio.run(estimate_memory(files, settings, 0)),
        fit.estimate_memory(files, settings),
    )
    assert (told.min_bytes, told.preferred_bytes) == (here.min_bytes, here.preferred_bytes)
    assert told.device_budget > 0


def test_files_that_are_no_model_are_refused_with_the_same_words(
    files: ModelFiles, tmp_path: Path
) -> None:
    broken = complete_config(store.find(str(tiny.write(tmp_path / "broken"))))
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(AppError, match="safetensors") as caught:
        asyncio.run(estimate_memory(broken, Settings(), 0))
    assert caught.value.kind is ErrorKind.MODEL_FILES


def test_a_process_that_breaks_is_an_error_that_tells_what_it_said(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(AppError, match=r"status 3: no such library$") as caught:
        asyncio.run(estimate_memory(files, Settings(), 0))
    assert caught.value.kind is ErrorKind.MODEL_FILES


def test_a_process_that_cannot_be_started_is_no_fault_of_the_model(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(AppError, match="cannot start a process") as caught:
        asyncio.run(estimate_memory(files, Settings(), 0))
    assert caught.value.kind is ErrorKind.ENGINE


def test_a_folder_that_has_an_app_of_its_own_is_a_fine_place_to_serve_from(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another package of the name of ours is found first, unless Python is told not to look."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert asyncio.run(estimate_memory(files, Settings(), 0)).min_bytes > 0


HANGS = """
import os
import app.engine.fit as it, app.runners.parent_watch as line

def estimate_memory(*_):
    open({told!r}, "w").write(f"{{os.getpid()}}\\n")
    os.read(os.pipe()[0], 1)

it.estimate_memory = estimate_memory
line.tie_to_parent = lambda: None
"""

ASKS = """
import asyncio, sys
from app import store
from app.core.settings import Settings
from app.runners.preflight import estimate_memory
asyncio.run(estimate_memory(store.resolve(sys.argv[1]), Settings(), 0))
"""


def test_nobody_is_left_behind_by_an_asker_that_was_killed(
    tiny_model: Path, tmp_path: Path, plant: Callable[[str], None]
) -> None:
    told = tmp_path / "pid"
    plant(HANGS.format(told=str(told)))
    with subprocess.Popen([sys.executable, "-c", ASKS, str(tiny_model)], cwd=ROOT) as asker:
        wait_until(lambda: told.exists() and told.read_text().endswith("\n"))
        process = int(told.read_text())
        assert lives(process)
        asker.kill()
    wait_until(lambda: not lives(process))


def test_a_process_that_hangs_is_ended(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(AppError, match="took longer than "):
        asyncio.run(estimate_memory(files, replace(Settings(), load_timeout=0.5), 0))
    assert not lives(int((tmp_path / "pid").read_text()))
