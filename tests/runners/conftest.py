"""Fixtures for runners."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that plants code into every process that is started: it runs before all else."""

    def planted(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return planted
