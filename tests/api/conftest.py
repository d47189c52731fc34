"""Fixtures of the API tests."""

from functools import partial
from pathlib import Path

import pytest

from tests.api.asgi import send_request
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
    return partial(send_request, generate)


@pytest.fixture
def transcript(request: pytest.FixtureRequest):
    """transcript(name, bytes): compares with tests/transcripts/name, or writes that file with
    --transcripts."""

    def check(name: str, body: bytes) -> None:
        path = TRANSCRIPTS / name
        if request.config.getoption("--transcripts", default=False):
            path.write_bytes(body)
        assert path.read_bytes() == body

    return check
