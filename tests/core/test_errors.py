"""What an error says to the client, and what of it the log may repeat; panics of libraries."""

import asyncio

import pytest

from app.core.errors import AppError, ErrorKind, LibraryPanic, PanicGuard, mark_client_text
from tests.fakes import make_rust_panic


def test_the_log_leaves_out_what_the_client_sent():
    error = AppError(
        ErrorKind.INVALID, f"no {mark_client_text('ada')} and no {mark_client_text('bob')} here"
    )
    assert error.message == str(error) == "no ada and no bob here"
    assert error.redact() == "no … and no … here"


def test_marks_are_the_servers_own():
    """A client that sends the closing mark does not end its quotation."""
    sent = mark_client_text("a") + "b" + mark_client_text("c")
    error = AppError(ErrorKind.INVALID, f"not {mark_client_text(sent)}!")
    assert error.message == "not abc!"
    assert error.redact() == "not …!"


def test_a_message_that_was_cut_within_a_quotation_ends_there():
    error = AppError(ErrorKind.INVALID, f"not {mark_client_text('a long text')}"[:8])
    assert error.message == "not a l"
    assert error.redact() == "not …"


def test_an_error_made_of_another_keeps_its_marks():
    error = AppError(ErrorKind.INVALID, f"not {mark_client_text('a')}")
    assert AppError(ErrorKind.BUSY, error.marked_message).redact() == "not …"


def test_a_panic_becomes_an_exception():
    with pytest.raises(LibraryPanic, match="retry-limit"), PanicGuard():
        raise make_rust_panic()


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        asyncio.CancelledError(),
        ValueError("no"),
        AppError(ErrorKind.INVALID, "no"),
    ],
)
def test_everything_else_passes_unchanged(error):
    with pytest.raises(type(error)) as caught, PanicGuard():
        raise error
    assert caught.value is error


def test_where_nothing_is_raised_nothing_happens():
    with PanicGuard():
        pass
