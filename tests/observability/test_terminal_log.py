"""Log lines at a terminal: short, in color, and safe against client input."""

import logging
import os
import pty
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.settings import Settings
from app.core.terminal import OutputTerminal
from app.observability.logs import (
    QueuedLogHandler,
    TerminalFormatter,
    configure_logging,
    get_terminal_log,
    is_shown,
)
from tests.observability.test_logs import HOSTILE_TEXTS, log

__all__ = ["log"]

PLAIN = TerminalFormatter(OutputTerminal(is_terminal=True))

CHAT = {
    "method": "POST",
    "path": "/v1/chat/completions",
    "status": 200,
    "ms": 60,
    "client": "127.0.0.1:5",
    "model": "builtin",
    "prompt_tokens": 12,
    "cached_tokens": 0,
    "completion_tokens": 22,
    "finish": "stop",
}


def format_access(fields: Mapping[str, Any], **context: Any) -> str:
    """The line without its time."""
    record = logging.LogRecord("app.access", logging.INFO, "x.py", 1, "long", None, None)
    record.fields = fields
    token = REQUEST_CONTEXT.set(RequestContext(id="req_1", **context))
    try:
        return PLAIN.format(record).partition(" ")[2]
    finally:
        REQUEST_CONTEXT.reset(token)


def format_message(level: int, message: str) -> str:
    record = logging.LogRecord("app.x", level, "x.py", 1, message, None, None)
    return PLAIN.format(record).partition(" ")[2]


def test_a_generation_has_its_tokens_and_its_speed() -> None:
    line = format_access(CHAT, decoded_tokens=21, decode_ns=39_000_000)
    assert line == "chat builtin 200 12→22 tok 538 tok/s 60 ms"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"cached_tokens": 8}, "chat builtin 200 12 (8 cached)→22 tok 60 ms"),
        ({"finish": "length"}, "chat builtin 200 12→22 tok length 60 ms"),
        (
            {"finish": "cancelled", "status": 499},
            "chat builtin 499 12→22 tok cancelled 60 ms req_1",
        ),
        ({"caller": "anna"}, "chat builtin 200 12→22 tok anna 60 ms"),
        ({"path": "/api/chat"}, "api/chat builtin 200 12→22 tok 60 ms"),
        (
            {"path": "/v1/embeddings", "completion_tokens": 0, "finish": "embedded"},
            "embeddings builtin 200 12 tok 60 ms",
        ),
    ],
)
def test_only_what_is_unusual_is_mentioned(change: Mapping[str, Any], expected: str) -> None:
    assert format_access({**CHAT, **change}) == expected


def test_an_error_has_its_reason_and_the_id_of_its_request() -> None:
    fields = {"method": "POST", "path": "/v1/messages", "status": 429, "ms": 1}
    fields |= {"error": "server_busy", "reason": "the queue is full"}
    assert format_access(fields) == "messages 429 server_busy: the queue is full 1 ms req_1"


def test_other_requests_have_their_method_and_path() -> None:
    fields = {"method": "GET", "path": "/v1/models", "status": 200, "ms": 1}
    assert format_access(fields) == "GET /v1/models 200 1 ms"


def test_a_message_has_its_level_only_if_it_is_a_problem() -> None:
    assert format_message(logging.INFO, "loading") == "loading"
    assert format_message(logging.WARNING, "slow") == "warning: slow"
    assert format_message(logging.ERROR, "lost") == "error: lost"


@pytest.mark.parametrize("hostile", HOSTILE_TEXTS)
def test_no_text_of_a_client_reaches_the_terminal_unescaped(hostile: str) -> None:
    fields = {**CHAT, "path": hostile, "model": hostile, "method": hostile, "caller": hostile}
    assert format_access(fields).isprintable()
    assert format_access({**fields, "error": "x", "reason": hostile}).isprintable()
    assert format_message(logging.ERROR, hostile).isprintable()


def test_a_traceback_is_indented() -> None:
    try:
        raise ValueError("planted")
    except ValueError:
        record = logging.LogRecord("app.x", logging.ERROR, "x", 1, "bad", None, sys.exc_info())
    lines = PLAIN.format(record).splitlines()
    assert lines[0].endswith("error: bad")
    assert lines[-1] == "    ValueError: planted"
    assert all(line.startswith("    ") for line in lines[1:])


def test_what_uvicorn_tells_about_its_normal_operation_is_dropped() -> None:
    def record(name: str, level: int) -> logging.LogRecord:
        return logging.LogRecord(name, level, "x.py", 1, "x", None, None)

    assert not is_shown(record("uvicorn.error", logging.INFO))
    assert is_shown(record("uvicorn.error", logging.ERROR))
    assert is_shown(record("app.server", logging.INFO))


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal with 40 columns: ours, theirs."""
    ours, theirs = pty.openpty()
    os.system(f"stty cols 40 -onlcr < {os.ttyname(theirs)}")
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_the_status_line_stays_below_the_log(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    handler = QueuedLogHandler(theirs)
    blank = f"\r{' ' * 39}\r"
    handler.show_status("loading 1 %")
    handler.show_status("loading 2 %")
    handler.handle(logging.makeLogRecord({"msg": "a line"}))
    handler.show_status("")
    handler.handle(logging.makeLogRecord({"msg": "another"}))
    handler.show_status("x" * 100)
    handler.write_block("two\nlines")
    handler.show_status("")
    handler.flush()
    expected = (
        f"loading 1 %{blank}loading 2 %{blank}a line\nloading 2 %{blank}another\n"
        f"{'x' * 39}{blank}two\nlines\n{'x' * 39}{blank}"
    )
    output = b""
    while len(output) < len(expected):
        output += os.read(ours, 1 << 16)
    assert output.decode() == expected
    handler.close()


def test_a_terminal_has_a_banner_unless_only_warnings_or_json_are_wanted(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch, log: object
) -> None:
    with os.fdopen(os.dup(terminal[1]), "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        for settings, has_banner in (
            (Settings(), True),
            (Settings(log_level="debug"), True),
            (Settings(log_level="warning"), False),
            (Settings(log_format="json"), False),
        ):
            configure_logging(settings)
            assert (get_terminal_log(settings) is not None) is has_banner
