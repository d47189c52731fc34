"""How the server's log is written: for people, or as one JSON object per line.

Knows: logging, the request that is being answered. Must not know: what anybody logs. Whatever a
client sent stays within its line: control characters, line ends and marks that turn the writing
round are written as escapes, so that no line can be forged or hidden, and no terminal driven.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from app.core.settings import Settings
from app.core.visit import REQUEST_CONTEXT
from app.log_writing import QueuedLogHandler

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
