"""Tests of grammars wait longer for a compilation than a server does: a second of work can take
more than the server's ten seconds on a machine with many other processes."""

import pytest

SECONDS = 300.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.grammar.compiler._COMPILE_TIMEOUT", SECONDS)
