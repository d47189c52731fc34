"""Downloads begin when a person says so, and not before."""

import io
import sys
from pathlib import Path

import pytest

from app.commands.pull import pull, resolve_or_download
from app.core.errors import AppError
from app.core.settings import ModelSettings, Settings
from app.store.model_names import ModelNotFoundError
from tests.store.stand_in import StandIn

WEIGHTS = "model.safetensors"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def commit(hub: StandIn, tiny_model: Path) -> str:
    return hub.add("org/tiny", tiny_model)


def sit_at_a_terminal(monkeypatch: pytest.MonkeyPatch, answer: str) -> Terminal:
    told = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", told)
    return told


def test_nothing_is_asked_where_nobody_sits(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ModelNotFoundError, match="run `mlxrunner pull org/tiny`"):
        resolve_or_download(Settings(models=(ModelSettings(name="org/tiny"),)))
    assert hub.asked == []


def test_pull_goes_ahead(hub: StandIn, commit: str) -> None:
    assert (
        resolve_or_download(Settings(models=(ModelSettings(name="org/tiny"),), pull=True)).path.name
        == commit
    )


def test_what_is_here_is_served_without_a_look_at_the_hub(hub: StandIn, commit: str) -> None:
    pull("org/tiny", None)
    hub.asked.clear()
    hub.add("org/tiny", Path("/nowhere"))
    assert (
        resolve_or_download(Settings(models=(ModelSettings(name="org/tiny"),), pull=True)).path.name
        == commit
    )
    assert hub.asked == []


@pytest.mark.parametrize("answer", ["y\n", "YES\n"])
def test_at_a_terminal_the_size_is_told_and_yes_is_yes(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    told = sit_at_a_terminal(monkeypatch, answer)
    assert (
        resolve_or_download(Settings(models=(ModelSettings(name="org/tiny"),))).name == "org/tiny"
    )
    assert "download org/tiny (59.2 kB)? [y/N] " in told.getvalue()


@pytest.mark.parametrize("answer", ["\n", "n\n", "", "yet\n"])
def test_anything_else_is_no(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    sit_at_a_terminal(monkeypatch, answer)
    with pytest.raises(ModelNotFoundError):
        resolve_or_download(Settings(models=(ModelSettings(name="org/tiny"),)))
    assert hub.downloads(WEIGHTS) == []


def test_an_interrupted_download_is_completed_by_consent(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.status[WEIGHTS] = 500
    with pytest.raises(AppError):
        pull("org/tiny", None)
    hub.faults.status.clear()
    told = sit_at_a_terminal(monkeypatch, "y\n")
    assert (
        resolve_or_download(Settings(models=(ModelSettings(name="org/tiny"),))).path.name == commit
    )
    assert "the download of org/tiny is incomplete" in told.getvalue()
