"""The server's log: plain text or one JSON object per line, written by a separate thread. On a
terminal, the lines are shorter, in color, and a status line follows them:

    12:03:44 chat builtin 200 12→22 tok 539 tok/s 60 ms
    12:03:45 chat 404 model_not_found: … 1 ms req_…
    12:03:46 warning: …

Knows: logging, the context of the current request. Must not know: the log messages of other
modules.

Control characters, line breaks and bidirectional control characters are escaped, so that client
text cannot forge or hide log lines, or control a terminal.

Lines are formatted on the thread that logs them and written by a separate thread. Otherwise, a full
pipe, or a terminal stopped with Ctrl-S, would block the event loop and all requests.
"""

import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import Context
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

from app.core.errors import escape_control_characters
from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.settings import Settings
from app.core.terminal import Color, OutputTerminal, detect_terminal, erase_line, get_width
from app.core.units import pluralize

# The maximum number of queued lines. Further lines are dropped and counted.
_MAX_QUEUED_RECORDS = 4096

# The timeout in seconds for writing queued lines when the process exits.
_FLUSH_TIMEOUT = 1.0

_INDENT = "    "

_ACCESS_LOGGER = "app.access"

# The server logs its own start, shutdown and requests.
_LIBRARY_LOGGER = "uvicorn"

_SHORT_NAMES: Mapping[str, str] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

_LEVEL_COLORS: Mapping[int, Color] = {
    logging.DEBUG: "dim",
    logging.WARNING: "yellow",
    logging.ERROR: "red",
    logging.CRITICAL: "red",
}

# finish reasons that need no mention
_USUAL_REASONS = frozenset({"stop", "tool_calls", "embedded"})


class QueuedLogHandler(QueueHandler):
    """Queues lines for a thread that writes them to a file descriptor. Logging never blocks."""

    def __init__(self, descriptor: int) -> None:
        # SimpleQueue is reentrant, so a signal handler may interrupt it and flush
        self._records: SimpleQueue[logging.LogRecord] = SimpleQueue()
        super().__init__(self._records)
        self._dropped = 0
        self._listener = _LogWriter(self._records, descriptor)
        self._listener.start()

    def show_status(self, text: str) -> None:
        """Shows a line below the log, instead of the previous one. Only for a terminal that can
        rewrite a line. text: without control characters; "" removes the line."""
        self._records.put(_StatusLine(text))

    def write_block(self, text: str) -> None:
        """Writes lines that are not a log record. text: without control characters from other
        sources."""
        self._records.put(_make_record(text))

    def enqueue(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        if self._records.qsize() >= _MAX_QUEUED_RECORDS:
            self._dropped += 1
            return
        if self._dropped:
            lost, self._dropped = self._dropped, 0
            # use an empty context, because the line belongs to no request
            self._records.put(Context().run(self.prepare, _make_dropped_record(lost)))
        self._records.put(record)

    def flush(self) -> None:
        self._wait_until_written()

    def close(self) -> None:
        if self._wait_until_written():
            self._listener.stop()
        # on timeout, the writer thread is still blocked; it is a daemon, so the process exits
        # anyway
        super().close()

    def _wait_until_written(self) -> bool:
        """Waits until all lines so far are written. Returns False if this takes longer than
        `_FLUSH_TIMEOUT`."""
        mark = _FlushMarker()
        self._records.put(mark)
        return mark.reached.wait(_FLUSH_TIMEOUT)


def _make_dropped_record(count: int) -> logging.LogRecord:
    message = "%s dropped: the output of the log was not read in time"
    lines = pluralize(count, "log line")
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (lines,), None)


def _make_record(text: str) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.INFO, __file__, 0, "%s", (text,), None)


class _FlushMarker(logging.LogRecord):
    """A marker in the queue. reached: set when all lines before the marker have been written."""

    def __init__(self) -> None:
        super().__init__(__name__, logging.DEBUG, __file__, 0, "", None, None)
        self.reached = threading.Event()


class _StatusLine(logging.LogRecord):
    """A new status line. text: replaces the previous one."""

    def __init__(self, text: str) -> None:
        super().__init__(__name__, logging.INFO, __file__, 0, "", None, None)
        self.text = text


class _LogWriter(QueueListener):
    """Writes records to a file descriptor, on the listener's thread.

    This class replaces the listener's handlers. `logging` locks a handler while it emits a record,
    and waits for these locks at exit. A thread that is blocked on a full pipe would never release
    its lock. For the same reason, this class does not write to sys.stderr: at exit, Python waits
    for the lock of sys.stderr and then aborts.
    """

    def __init__(self, queue: SimpleQueue[logging.LogRecord], descriptor: int) -> None:
        super().__init__(queue)
        self._descriptor = descriptor
        self._status = ""

    def handle(self, record: logging.LogRecord) -> None:
        if isinstance(record, _FlushMarker):
            record.reached.set()
            return
        width = get_width(self._descriptor)
        erase = erase_line(width) if self._status else ""
        if isinstance(record, _StatusLine):
            # a line that fills the terminal would wrap, and could not be erased
            self._status = record.text[: width - 1]
            text = erase + self._status
        else:
            text = f"{erase}{record.getMessage()}\n{self._status}"
        left = memoryview(text.encode(errors="backslashreplace"))
        try:
            while left:
                left = left[self._write(left) :]
        except OSError:
            return  # the descriptor is broken, so errors cannot be reported

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # another process has made this file non-blocking
            select.select([], [self._descriptor], [])
            return 0


def configure_logging(settings: Settings) -> None:
    """Configures the logs of the server and of its libraries. All logs go to stderr."""
    handler = _make_handler()
    terminal = _detect_terminal(settings)
    if terminal.is_terminal:
        handler.setFormatter(TerminalFormatter(terminal))
        handler.addFilter(is_shown)
    else:
        handler.setFormatter(
            JsonFormatter() if settings.log_format == "json" else HumanFormatter(terminal)
        )
    root = logging.getLogger()
    before, root.handlers = root.handlers, [handler]
    for old in before:
        if isinstance(old, QueuedLogHandler):
            old.close()
    set_log_levels(settings)
    # redundant: app.access logs more details
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    # httpx2 would log every request of a download, including credentials in URLs
    logging.getLogger("httpx2").setLevel(logging.WARNING)


def set_log_levels(settings: Settings) -> None:
    """Sets the levels of the server's log."""
    chosen = logging.getLevelNamesMapping()[settings.log_level.upper()]
    # enable the debug level only for mlxrunner's modules, because libraries log too much at this
    # level
    logging.getLogger().setLevel(max(chosen, logging.INFO))
    logging.getLogger("app").setLevel(logging.DEBUG if settings.debug else chosen)
    # errors are always logged
    logging.getLogger("app.access").setLevel(
        logging.NOTSET if settings.access_log else logging.ERROR
    )


def get_terminal_log(settings: Settings) -> tuple[QueuedLogHandler, OutputTerminal] | None:
    """Returns the handler that writes to a terminal, and the capabilities of the terminal. None if
    stderr is not a terminal, if the format is json, or if only warnings are wanted."""
    terminal = _detect_terminal(settings)
    if not terminal.is_terminal or settings.log_level not in ("debug", "info"):
        return None
    handlers = logging.getLogger().handlers
    found = [handler for handler in handlers if isinstance(handler, QueuedLogHandler)]
    return (found[0], terminal) if found else None


def _detect_terminal(settings: Settings) -> OutputTerminal:
    # a service may have no stderr
    if settings.log_format == "json" or sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        return OutputTerminal()
    return detect_terminal(sys.stderr, os.environ)


def flush_logs() -> None:
    """Waits until all lines logged so far are written. Gives up after a timeout if the output is
    not read."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _make_handler() -> logging.Handler:
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]  # a service may have no stderr
        return logging.NullHandler()
    try:
        return QueuedLogHandler(sys.stderr.fileno())
    except OSError:  # stderr has no file descriptor, so writing cannot block
        return logging.StreamHandler(sys.stderr)


class HumanFormatter(logging.Formatter):
    """Formats lines as `time level logger [request]: message`. Tracebacks follow on indented lines,
    so that only the first line of a record begins with a time. terminal: colors the level if
    FORCE_COLOR is set."""

    def __init__(self, terminal: OutputTerminal | None = None) -> None:
        super().__init__()
        self._terminal = terminal or OutputTerminal()

    def format(self, record: logging.LogRecord) -> str:
        visit = REQUEST_CONTEXT.get()
        request = "" if visit is None else f" [{visit.id}]"
        color = "red" if record.levelno > logging.INFO else "green"
        level = self._terminal.paint(record.levelname, color)
        head = f"{self.formatTime(record)} {level} {record.name}{request}"
        line = f"{head}: {escape_control_characters(record.getMessage())}"
        return "\n".join([line, *_render_tracebacks(self, record)])


class JsonFormatter(logging.Formatter):
    """Formats records as ASCII-only JSON. Every record has time (RFC 3339, UTC), level, logger and
    message. The request_id, caller and model of the current request are added if they are known.
    The record's exception or stack and additional fields (`extra={"fields": …}`) follow."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        entry: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        visit = REQUEST_CONTEXT.get()
        if visit is not None:
            known = {"request_id": visit.id, "caller": visit.caller, "model": visit.model}
            entry |= {name: value for name, value in known.items() if value}
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        entry |= {name: value for name, value in fields.items() if name not in entry}
        if more := _format_tracebacks(self, record):
            entry["exception"] = "\n".join(more)
        # json.dumps does not escape DEL, which is a control character in ASCII
        return json.dumps(entry, default=str).replace("\x7f", "\\u007f")


def _format_tracebacks(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """Returns the traceback and the stack of a record, if any."""
    found: list[str] = []
    if record.exc_info and record.exc_info[0] is not None:
        found.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        found.append(formatter.formatStack(record.stack_info))
    return found


def _render_tracebacks(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """Returns the lines of the traceback and the stack of a record, indented."""
    lines = "\n".join(_format_tracebacks(formatter, record)).splitlines()
    return [f"{_INDENT}{escape_control_characters(line)}" for line in lines]


def is_shown(record: logging.LogRecord) -> bool:
    """A filter for a terminal's handler. It drops the messages that uvicorn logs in normal
    operation."""
    library = record.name.partition(".")[0] == _LIBRARY_LOGGER
    return not library or record.levelno >= logging.WARNING


class TerminalFormatter(logging.Formatter):
    """Formats lines as `time message`. Tracebacks follow on indented lines."""

    def __init__(self, terminal: OutputTerminal) -> None:
        super().__init__()
        self._terminal = terminal

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        context = REQUEST_CONTEXT.get()
        if record.name == _ACCESS_LOGGER and "status" in fields:
            text = " ".join(self._render_access(fields, context))
        else:
            text = self._render_message(record, context)
        line = f"{self._terminal.paint(clock, 'dim')} {text}"
        return "\n".join([line, *_render_tracebacks(self, record)])

    def _render_message(self, record: logging.LogRecord, context: RequestContext | None) -> str:
        text = escape_control_characters(record.getMessage())
        paint = self._terminal.paint
        if record.levelno >= logging.WARNING:
            level = "warning" if record.levelno == logging.WARNING else "error"
            text = f"{paint(f'{level}:', _LEVEL_COLORS[record.levelno])} {text}"
            return text if context is None else f"{text} {paint(context.id, 'dim')}"
        return paint(text, "dim") if record.levelno == logging.DEBUG else text

    def _render_access(
        self, fields: Mapping[str, Any], context: RequestContext | None
    ) -> Iterator[str]:
        paint = self._terminal.paint
        path, status = escape_control_characters(str(fields["path"])), int(fields["status"])
        is_usual = fields["method"] == "POST"
        name = _SHORT_NAMES.get(path, path.removeprefix("/v1").removeprefix("/"))
        yield name if is_usual else f"{escape_control_characters(str(fields['method']))} {path}"
        if model := fields.get("model"):
            yield paint(escape_control_characters(str(model)), "cyan")
        yield paint(str(status), "green" if status < 400 else "yellow" if status < 500 else "red")
        if "error" in fields:
            error, reason = str(fields["error"]), str(fields["reason"])
            yield escape_control_characters(f"{error}: {reason}" if reason else error)
        yield from _render_tokens(fields, context)
        finish = str(fields.get("finish", ""))
        if finish and "error" not in fields and not _USUAL_REASONS.issuperset(finish.split(",")):
            yield paint(finish, "yellow")
        if caller := fields.get("caller"):
            yield escape_control_characters(str(caller))
        yield paint(f"{fields['ms']} ms", "dim")
        if notice := fields.get("notice"):
            yield paint(escape_control_characters(str(notice)), "yellow")
        if status >= 400 and context is not None:
            yield paint(context.id, "dim")


def _render_tokens(fields: Mapping[str, Any], context: RequestContext | None) -> Iterator[str]:
    """Yields the token counts and the decode speed of a generation request."""
    if not fields.get("prompt_tokens"):
        return
    cached = f" ({fields['cached_tokens']} cached)" if fields["cached_tokens"] else ""
    output = f"→{fields['completion_tokens']}" if fields["completion_tokens"] else ""
    yield f"{fields['prompt_tokens']}{cached}{output} tok"
    if context is not None and (speed := context.decode_tokens_per_second):
        yield f"{speed:.3g} tok/s" if speed < 100 else f"{speed:.0f} tok/s"
