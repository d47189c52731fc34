"""The isolated hub, cache and stores of the store tests, and servers and own engines in threads."""

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import cli
from app.commands import chat_engine
from tests.commands.run_command import FIRST_WORDS, OwnEngines, RunCommand, Runner
from tests.commands.thread_server import StepGate, ThreadServer, gate_steps, run_thread_server
from tests.store.conftest import hub, nowhere_else, packed_model
from tests.store.stand_in import StandIn

__all__ = ["hub", "nowhere_else", "packed_model"]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MLXRUNNER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    return Runner(folder=tmp_path)


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Runs the command in this process, in pipes. Returns the exit status, stdout and stderr."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        status = cli.main(["run", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def own_engines(monkeypatch: pytest.MonkeyPatch) -> OwnEngines:
    engines = OwnEngines()
    monkeypatch.setattr(chat_engine, "open_own_server", engines.open)
    return engines


@pytest.fixture(scope="module")
def gate() -> Iterator[StepGate]:
    with gate_steps() as gate:
        yield gate


@pytest.fixture(scope="module")
def server(gate: StepGate) -> Iterator[ThreadServer]:
    """A server whose engine can be stopped. Each prompt token is one step."""
    with run_thread_server(prefill_chunk=1) as server:
        yield server


@pytest.fixture
def held(gate: StepGate) -> Iterator[StepGate]:
    """Stops the engine of the server after the first words of the next answer."""
    gate.hold_after(FIRST_WORDS)
    yield gate
    gate.release()


@pytest.fixture
def slow(gate: StepGate) -> Iterator[StepGate]:
    """Slows the engine of the server down."""
    gate.slow_down()
    yield gate
    gate.release()


@pytest.fixture
def hub_endpoint(hub: StandIn, tiny_model: Path) -> str:
    hub.add("org/tiny", tiny_model)
    return hub.endpoint
