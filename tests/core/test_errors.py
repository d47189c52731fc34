"""Panics of libraries written in Rust."""

import asyncio

import pytest

from app.core.errors import AppError, Kind, LibraryPanic, PanicGuard
from tests.fakes import panic


def test_a_panic_becomes_an_exception():
    with pytest.raises(LibraryPanic, match="retry-limit"), PanicGuard():
        raise panic()


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        asyncio.CancelledError(),
        ValueError("no"),
        AppError(Kind.INVALID, "no"),
    ],
)
def test_everything_else_passes_unchanged(error):
    with pytest.raises(type(error)) as caught, PanicGuard():
        raise error
    assert caught.value is error


def test_where_nothing_is_raised_nothing_happens():
    with PanicGuard():
        pass
