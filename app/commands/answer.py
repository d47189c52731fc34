"""Prints an answer while it is generated: progress, reasoning, text and timings.

Knows: the events of an answer, styles of the terminal. Must not know: how the answer is requested,
the conversation.

The text goes to stdout, everything else to stderr. On a terminal, the reasoning precedes the text
in a dim color. In a pipe, it is omitted.
"""

import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TextIO

from app.commands.chat_client import ChatEvent
from app.core.events import Finish, ModelLoading, PrefillProgress, ReasoningDelta, TextDelta
from app.core.terminal import ProgressLine

_DIM, _RESET = "\x1b[2m", "\x1b[0m"

# control characters of a model's output, which must not control the terminal
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# the progress of a prefill is displayed only if it takes longer than this number of seconds
_PREFILL_DELAY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTimes:
    """The times that the client measured, in seconds. load: the time to load the model, 0 if it was
    loaded. first_token: the time from the request to the first text or reasoning; None if there was
    none. total: both and the rest of the answer."""

    load: float
    first_token: float | None
    total: float


def supports_color(out: TextIO, environment: Mapping[str, str]) -> bool:
    """Returns whether escape sequences may be written (no-color.org)."""
    dumb = environment.get("TERM", "dumb") == "dumb"
    return out.isatty() and not dumb and not environment.get("NO_COLOR")


class AnswerPrinter:
    """Prints one answer. model: its name in the progress line. verbose: whether the timings follow.
    load: the seconds that loading the model took before the request.

    After `print_events`, even if it was interrupted, `text` is the text so far.
    """

    def __init__(self, model: str, *, verbose: bool, load: float = 0.0) -> None:
        self.text = ""
        self._model = model
        self._verbose = verbose
        self._terminal = sys.stdout.isatty()
        self._color = supports_color(sys.stdout, os.environ)
        self._progress = ProgressLine(sys.stderr)
        self._reasoning = False
        self._column = 0
        self._started = time.monotonic()
        self._loaded, self._load_before = 0.0, load
        self._first: float | None = None

    def print_events(self, events: Iterable[ChatEvent]) -> Finish | None:
        """Prints the events as they arrive. Whatever happens, the terminal is in its normal style
        and at the beginning of a line afterwards."""
        finish: Finish | None = None
        try:
            for event in events:
                if isinstance(event, Finish):
                    finish = event
                else:
                    self._print_event(event)
        finally:
            self._progress.erase()
            self._end_reasoning()
            self._end_line()
        if self._verbose and finish is not None:
            times = AnswerTimes(
                load=self._load_before + self._loaded,
                first_token=self._first,
                total=self._load_before + self._seconds(),
            )
            for line in render_timings(finish, times):
                print(line, file=sys.stderr)
            sys.stderr.flush()
        return finish

    def _print_event(
        self, event: ModelLoading | PrefillProgress | ReasoningDelta | TextDelta
    ) -> None:
        match event:
            case ModelLoading():
                self._loaded = self._seconds()
                if event.queued:
                    self._progress.show(f"{self._model} is waiting until another model is unloaded")
                else:
                    show_loading(self._progress, self._model, event.progress)
            case PrefillProgress():
                self._show_prefill(event)
            case ReasoningDelta():
                self._begin_output()
                self._print_reasoning(event.text)
            case TextDelta():
                self._begin_output()
                self._end_reasoning()
                self.text += event.text
                self._write(event.text)

    def _show_prefill(self, event: PrefillProgress) -> None:
        if self._seconds() - self._loaded < _PREFILL_DELAY or not event.total_tokens:
            return
        done, total = event.computed_tokens, event.total_tokens
        self._progress.show("reading the prompt", done / total, f"{done} of {total} tokens")

    def _begin_output(self) -> None:
        self._progress.erase()
        if self._first is None:
            self._first = self._seconds()

    def _print_reasoning(self, text: str) -> None:
        if not self._terminal:
            return
        if not self._reasoning:
            self._reasoning = True
            sys.stdout.write(_DIM if self._color else "Thinking...\n")
        self._write(text)

    def _end_reasoning(self) -> None:
        if not self._reasoning:
            return
        self._reasoning = False
        self._end_line()
        sys.stdout.write(_RESET if self._color else "...done thinking.\n")
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _write(self, text: str) -> None:
        # a pipe gets the exact text
        sys.stdout.write(_CONTROL.sub("\ufffd", text) if self._terminal else text)
        sys.stdout.flush()
        self._column = 0 if text.endswith("\n") else 1

    def _end_line(self) -> None:
        if self._column:
            self._column = 0
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _seconds(self) -> float:
        return time.monotonic() - self._started


def show_loading(progress: ProgressLine, model: str, percent: int) -> None:
    progress.show(f"loading {model}", percent / 100)


def render_timings(finish: Finish, times: AnswerTimes) -> list[str]:
    """Returns the lines of --verbose, with Ollama's labels and two more."""
    usage, timings = finish.usage, finish.timings
    computed = usage.prompt_tokens - usage.cached_tokens
    first = "none" if times.first_token is None else f"{times.first_token:.3f} s"
    # the first token is the end of the prefill
    rate = _format_rate(max(usage.completion_tokens - 1, 0), timings.decode_ns)
    rows = [
        ("total duration", f"{times.total:.3f} s"),
        ("load duration", f"{times.load:.3f} s"),
        ("time to first token", first),
        ("prompt eval count", f"{usage.prompt_tokens} tokens"),
        ("cached count", f"{usage.cached_tokens} tokens"),
        ("prompt eval duration", f"{timings.prefill_ns / 1e9:.3f} s"),
        ("prompt eval rate", _format_rate(computed, timings.prefill_ns)),
        ("eval count", f"{usage.completion_tokens} tokens"),
        ("eval duration", f"{timings.decode_ns / 1e9:.3f} s"),
        ("eval rate", rate),
    ]
    return [f"{label + ':':<22}{value}" for label, value in rows]


def _format_rate(count: int, nanoseconds: int) -> str:
    return f"{count * 1e9 / nanoseconds:.2f} tokens/s" if nanoseconds else "none"
