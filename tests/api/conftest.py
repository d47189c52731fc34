"""Fixtures of the tests of HTTP."""

from functools import partial
from pathlib import Path

import pytest

from tests.api.asgi import ask
from tests.fakes import FakeGenerate

TRANSCRIPTS = Path(__file__).parents[1] / "transcripts"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--transcripts", action="store_true", help="write tests/transcripts again")


@pytest.fixture
def generate() -> FakeGenerate:
    return FakeGenerate()


@pytest.fixture
def call(generate: FakeGenerate):
    """call(method, path, body, headers, **settings) → Reply"""
    return partial(ask, generate)


@pytest.fixture
def transcript(request: pytest.FixtureRequest):
    """transcript(name, bytes): compares with tests/transcripts/name; --transcripts writes it."""

    def check(name: str, got: bytes) -> None:
        path = TRANSCRIPTS / name
        if request.config.getoption("--transcripts", default=False):
            path.write_bytes(got)
        assert path.read_bytes() == got

    return check
