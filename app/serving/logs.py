"""How the server's log is written: for people, or as one JSON object per line.

Knows: logging, the request that is being answered. Must not know: what anybody logs. Whatever a
client sent stays within its line: control characters, line ends and marks that turn the writing
round are written as escapes, so that no line can be forged or hidden, and no terminal driven.

The thread that writes the log.

Lines are made where they arise and written here: a pipe that nobody reads, or a terminal in which
somebody pressed Ctrl-S, would stop the event loop otherwise, and with it everybody.
"""

import json
import logging
import os
import select
import sys
import threading
from collections.abc import Mapping
from contextvars import Context
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

from app.core.request_context import REQUEST_CONTEXT
from app.core.settings import Settings

# Lines that wait for somebody to read those before them; more are lost, and counted.
_MAX_QUEUED_RECORDS = 4096

# Seconds that lines may take to be written when a process ends.
_FLUSH_TIMEOUT = 1.0


class QueuedLogHandler(QueueHandler):
    """Hands lines to a thread that writes them to a file descriptor. Nobody who logs ever waits."""

    def __init__(self, descriptor: int) -> None:
        # no lock of its own in Python: a signal's handler may come in between, and may flush
        self._records: SimpleQueue[logging.LogRecord] = SimpleQueue()
        super().__init__(self._records)
        self._dropped = 0
        self._listener = _LogWriter(self._records, descriptor)
        self._listener.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        if self._records.qsize() >= _MAX_QUEUED_RECORDS:
            self._dropped += 1
            return
        if self._dropped:
            lost, self._dropped = self._dropped, 0
            # of no request: a formatter asks whose line it is
            self._records.put(Context().run(self.prepare, _make_dropped_record(lost)))
        self._records.put(record)

    def flush(self) -> None:
        self._wait_until_written()

    def close(self) -> None:
        if self._wait_until_written():
            self._listener.stop()
        # else its thread is left where it is: a process that ends does not wait for it
        super().close()

    def _wait_until_written(self) -> bool:
        """Whether all lines until now are, after a while."""
        mark = _FlushMarker()
        self._records.put(mark)
        return mark.reached.wait(_FLUSH_TIMEOUT)


def _make_dropped_record(count: int) -> logging.LogRecord:
    message = "%d log lines were dropped because the output of the log was not read in time"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (count,), None)


class _FlushMarker(logging.LogRecord):
    """No line, but where all lines before it are written."""

    def __init__(self) -> None:
        super().__init__(__name__, logging.DEBUG, __file__, 0, "", None, None)
        self.reached = threading.Event()


class _LogWriter(QueueListener):
    """Writes records to a file descriptor, on the listener's own thread.

    It takes the place of the listener's handlers: `logging` locks every handler while it emits, and
    waits for all these locks when the process ends, which a thread that is blocked on a full pipe
    would never release. For the same reason it does not write to sys.stderr: Python waits for that
    object's lock when the process ends, and aborts.
    """

    def __init__(self, queue: SimpleQueue[logging.LogRecord], descriptor: int) -> None:
        super().__init__(queue)
        self._descriptor = descriptor

    def handle(self, record: logging.LogRecord) -> None:
        if isinstance(record, _FlushMarker):
            record.reached.set()
            return
        left = memoryview(f"{record.getMessage()}\n".encode(errors="backslashreplace"))
        try:
            while left:
                left = left[self._write(left) :]
        except OSError:
            return  # nobody will ever read it, and there is nobody to tell

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # another process that has this file does not want to wait
            select.select([], [self._descriptor], [])
            return 0


_INDENT = "    "


def configure_logging(settings: Settings) -> None:
    """Logs go to stderr from now on, this server's and its libraries'."""
    handler = _make_handler()
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else HumanFormatter())
    chosen = logging.getLevelNamesMapping()[settings.log_level.upper()]
    root = logging.getLogger()
    before, root.handlers = root.handlers, [handler]
    for old in before:
        if isinstance(old, QueuedLogHandler):
            old.close()
    # ours only: what libraries say at the lowest level drowns it
    root.setLevel(max(chosen, logging.INFO))
    logging.getLogger("app").setLevel(logging.DEBUG if settings.debug else chosen)
    # faults are told in any case
    logging.getLogger("app.access").setLevel(
        logging.NOTSET if settings.access_log else logging.ERROR
    )
    # app.access says more
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    # every request of a download, with addresses that are as good as keys
    logging.getLogger("httpx2").setLevel(logging.WARNING)


def flush_logs() -> None:
    """What was logged until now is written when this returns, unless nobody reads it."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _make_handler() -> logging.Handler:
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]  # where a service has none
        return logging.NullHandler()
    try:
        return QueuedLogHandler(sys.stderr.fileno())
    except OSError:  # it is no file, and so nothing that one could wait for
        return logging.StreamHandler(sys.stderr)


def escape_control_characters(text: str) -> str:
    """The same text, with escapes for what would not be seen, or would be more than a text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class HumanFormatter(logging.Formatter):
    """`time level logger [request]: message`. What belongs to a line and does not fit into it, such
    as a traceback, stands below it and is indented: no other line begins with a time."""

    def format(self, record: logging.LogRecord) -> str:
        visit = REQUEST_CONTEXT.get()
        request = "" if visit is None else f" [{visit.id}]"
        head = f"{self.formatTime(record)} {record.levelname} {record.name}{request}"
        lines = [f"{head}: {escape_control_characters(record.getMessage())}"]
        for more in _format_tracebacks(self, record):
            lines += [f"{_INDENT}{escape_control_characters(line)}" for line in more.splitlines()]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """JSON, all of it ASCII: time (RFC 3339, UTC), level, logger, message; of a request
    request_id, caller and model, as far as they are known; exception; and what the line says in
    fields of its own (`extra={"fields": …}`)."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        visit = REQUEST_CONTEXT.get()
        if visit is not None:
            known = {"request_id": visit.id, "caller": visit.caller, "model": visit.model}
            told |= {name: value for name, value in known.items() if value}
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        told |= {name: value for name, value in fields.items() if name not in told}
        if more := _format_tracebacks(self, record):
            told["exception"] = "\n".join(more)
        # DEL is ASCII, and control all the same
        return json.dumps(told, default=str).replace("\x7f", "\\u007f")


def _format_tracebacks(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """What stands below the line: a traceback, a stack."""
    found: list[str] = []
    if record.exc_info and record.exc_info[0] is not None:
        found.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        found.append(formatter.formatStack(record.stack_info))
    return found
