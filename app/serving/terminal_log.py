"""Log lines for a person at a terminal: a time, short access lines, colour.

Knows: the fields of an access line, colours. Must not know: the thread that writes the lines.

    12:03:44 chat builtin 200 12→22 tok 539 tok/s 60 ms
    12:03:45 chat 404 model_not_found: … 1 ms req_…
    12:03:46 warning: …

Programs read the formats in app/serving/logs.py, which are used unless stderr is a terminal. They
have the logger's name, the client's address and all fields.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.terminal import Color, OutputTerminal
from app.core.text_escapes import escape_control_characters

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

_INDENT = "    "


def is_shown(record: logging.LogRecord) -> bool:
    """A filter for a terminal's handler. It drops what uvicorn tells about its normal operation."""
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
        lines = [f"{self._terminal.paint(clock, 'dim')} {text}"]
        if record.exc_info and record.exc_info[0] is not None:
            traceback = self.formatException(record.exc_info).splitlines()
            lines += [f"{_INDENT}{escape_control_characters(line)}" for line in traceback]
        return "\n".join(lines)

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
