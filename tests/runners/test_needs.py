"""What a model needs is found out in a process of its own."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app import store
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.settings import Settings
from app.engine import fit
from app.engine.describe import complete
from app.runners.needs import need
from tests import tiny


@pytest.fixture
def files(tiny_model: Path) -> ModelFiles:
    return complete(store.find(str(tiny_model)))


def test_the_process_says_what_would_be_found_here(files: ModelFiles) -> None:
    settings = Settings(context=700, parallel=3)
    told, here = asyncio.run(need(files, settings)), fit.need(files, settings)
    assert (told.least, told.wanted) == (here.least, here.wanted)
    assert told.budget > 0


def test_files_that_are_no_model_are_refused_with_the_same_words(
    files: ModelFiles, tmp_path: Path
) -> None:
    broken = complete(store.find(str(tiny.write(tmp_path / "broken"))))
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(AppError, match="safetensors") as caught:
        asyncio.run(need(broken, Settings()))
    assert caught.value.kind is Kind.MODEL_FILES


def test_a_process_that_breaks_is_an_error_that_tells_what_it_said(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(AppError, match="no such library") as caught:
        asyncio.run(need(files, Settings()))
    assert caught.value.kind is Kind.MODEL_FILES


def test_a_process_that_hangs_is_ended(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(AppError, match="took longer than 0.5 s"):
        asyncio.run(need(files, replace(Settings(), load_timeout=0.5)))
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()
