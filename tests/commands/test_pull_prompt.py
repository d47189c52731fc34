"""Downloads start only with consent: the pull option, or yes at the prompt."""

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


def use_terminal(monkeypatch: pytest.MonkeyPatch, answer: str) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_without_a_terminal_there_is_no_prompt(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ModelNotFoundError, match="run `mlxrunner pull org/tiny`"):
        resolve_or_download(Settings(models=(ModelSettings(name="org/tiny"),)))
    assert hub.requests == []


def test_the_pull_option_downloads_without_a_prompt(hub: StandIn, commit: str) -> None:
    assert (
        resolve_or_download(Settings(models=(ModelSettings(name="org/tiny"),), pull=True)).path.name
        == commit
    )


def test_a_local_model_is_served_without_a_request_to_the_hub(hub: StandIn, commit: str) -> None:
    pull("org/tiny", None)
    hub.requests.clear()
    hub.add("org/tiny", Path("/nowhere"))
    assert (
        resolve_or_download(Settings(models=(ModelSettings(name="org/tiny"),), pull=True)).path.name
        == commit
    )
    assert hub.requests == []


@pytest.mark.parametrize("answer", ["y\n", "YES\n"])
def test_the_prompt_has_the_size_and_accepts_yes(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    terminal = use_terminal(monkeypatch, answer)
    assert (
        resolve_or_download(Settings(models=(ModelSettings(name="org/tiny"),))).name == "org/tiny"
    )
    assert "download org/tiny (59.2 kB)? [y/N] " in terminal.getvalue()


@pytest.mark.parametrize("answer", ["\n", "n\n", "", "yet\n"])
def test_any_other_answer_is_no(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    use_terminal(monkeypatch, answer)
    with pytest.raises(ModelNotFoundError):
        resolve_or_download(Settings(models=(ModelSettings(name="org/tiny"),)))
    assert hub.downloads(WEIGHTS) == []


def test_an_interrupted_download_is_resumed_after_consent(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.status[WEIGHTS] = 500
    with pytest.raises(AppError):
        pull("org/tiny", None)
    hub.faults.status.clear()
    terminal = use_terminal(monkeypatch, "y\n")
    assert (
        resolve_or_download(Settings(models=(ModelSettings(name="org/tiny"),))).path.name == commit
    )
    assert "the download of org/tiny is incomplete" in terminal.getvalue()
