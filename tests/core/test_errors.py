"""Error messages for the client, their redacted form for the log, and panics of libraries."""

import asyncio

import pytest

from app.core.errors import AppError, ErrorKind, LibraryPanic, PanicGuard, mark_client_text
from tests.fakes import make_rust_panic


def test_the_log_omits_client_text():
    error = AppError(
        ErrorKind.INVALID, f"no {mark_client_text('ada')} and no {mark_client_text('bob')} here"
    )
    assert error.message == str(error) == "no ada and no bob here"
    assert error.redact() == "no … and no … here"


def test_a_client_cannot_close_the_marks():
    """Marks in the text of a client do not end the marked part."""
    client_text = mark_client_text("a") + "b" + mark_client_text("c")
    error = AppError(ErrorKind.INVALID, f"not {mark_client_text(client_text)}!")
    assert error.message == "not abc!"
    assert error.redact() == "not …!"


def test_a_message_truncated_within_client_text_is_redacted_to_its_end():
    error = AppError(ErrorKind.INVALID, f"not {mark_client_text('a long text')}"[:8])
    assert error.message == "not a l"
    assert error.redact() == "not …"


def test_an_error_created_from_another_keeps_its_marks():
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
def test_other_exceptions_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, PanicGuard():
        raise error
    assert caught.value is error


def test_the_guard_does_nothing_without_an_exception():
    with PanicGuard():
        pass
