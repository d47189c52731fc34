"""What an error says to the client, and what of it the log may repeat; panics of libraries."""

import asyncio

import pytest

from app.core.errors import AppError, Kind, LibraryPanic, PanicGuard, quote_client
from tests.fakes import panic


def test_the_log_leaves_out_what_the_client_sent():
    error = AppError(Kind.INVALID, f"no {quote_client('ada')} and no {quote_client('bob')} here")
    assert error.message == str(error) == "no ada and no bob here"
    assert error.loggable() == "no … and no … here"


def test_marks_are_the_servers_own():
    """A client that sends the closing mark does not end its quotation."""
    sent = quote_client("a") + "b" + quote_client("c")
    error = AppError(Kind.INVALID, f"not {quote_client(sent)}!")
    assert error.message == "not abc!"
    assert error.loggable() == "not …!"


def test_a_message_that_was_cut_within_a_quotation_ends_there():
    error = AppError(Kind.INVALID, f"not {quote_client('a long text')}"[:8])
    assert error.message == "not a l"
    assert error.loggable() == "not …"


def test_an_error_made_of_another_keeps_its_marks():
    error = AppError(Kind.INVALID, f"not {quote_client('a')}")
    assert AppError(Kind.BUSY, error.marked).loggable() == "not …"


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
