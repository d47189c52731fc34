"""The printed answer: reasoning, control characters, timings."""

import io
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout

import pytest

from app.commands.answer import AnswerPrinter, AnswerTimes, render_timings
from app.commands.chat_client import ChatEvent
from app.core.events import (
    Finish,
    ModelLoading,
    PrefillProgress,
    ReasoningDelta,
    TextDelta,
    Timings,
    Usage,
)
from app.core.terminal import ProgressLine

FINISH = Finish(
    reason="stop",
    usage=Usage(prompt_tokens=30, completion_tokens=11, cached_tokens=10),
    timings=Timings(prefill_ns=2 * 10**9, decode_ns=5 * 10**9, total_ns=8 * 10**9),
)
THOUGHT: list[ChatEvent] = [ReasoningDelta(text="hm"), TextDelta(text="yes"), FINISH]


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return FakeTerminal()


def print_on(terminal: FakeTerminal, events: Iterable[ChatEvent]) -> AnswerPrinter:
    """pytest replaces stdout between the setup and the test."""
    with redirect_stdout(terminal):
        printer = AnswerPrinter("m", verbose=False)
        printer.print_events(events)
    return printer


def test_reasoning_is_dim_on_a_terminal(terminal: FakeTerminal):
    printer = print_on(terminal, THOUGHT)
    assert terminal.getvalue() == "\x1b[2mhm\n\x1b[0m\nyes\n"
    assert printer.text == "yes"


def test_reasoning_is_marked_by_words_without_color(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NO_COLOR", "1")
    print_on(terminal, THOUGHT)
    assert terminal.getvalue() == "Thinking...\nhm\n...done thinking.\n\nyes\n"


def test_reasoning_is_omitted_in_a_pipe(capsys: pytest.CaptureFixture[str]):
    AnswerPrinter("m", verbose=False).print_events(THOUGHT)
    assert capsys.readouterr().out == "yes\n"


def test_an_interrupted_reasoning_leaves_the_terminal_in_its_normal_style(terminal: FakeTerminal):
    def interrupted() -> Iterable[ChatEvent]:
        yield ReasoningDelta(text="hm")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        print_on(terminal, interrupted())
    assert terminal.getvalue() == "\x1b[2mhm\n\x1b[0m\n"


def test_a_model_cannot_control_the_terminal(terminal: FakeTerminal):
    printer = print_on(terminal, [TextDelta(text="a\x1b[31m\x9b1m\tb\n"), FINISH])
    assert terminal.getvalue() == "a\ufffd[31m\ufffd1m\tb\n"
    assert printer.text == "a\x1b[31m\x9b1m\tb\n"


def test_a_pipe_gets_the_exact_text(capsys: pytest.CaptureFixture[str]):
    AnswerPrinter("m", verbose=False).print_events([TextDelta(text="a\x1bb"), FINISH])
    assert capsys.readouterr().out == "a\x1bb\n"


def test_loading_is_a_line_that_is_erased(monkeypatch: pytest.MonkeyPatch):
    out = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", out)
    events: list[ChatEvent] = [
        ModelLoading(progress=0, queued=True),
        ModelLoading(progress=50),
        PrefillProgress(computed_tokens=1, total_tokens=2),
        TextDelta(text="a"),
    ]
    AnswerPrinter("m", verbose=False).print_events(events)
    lines = [line.rstrip() for line in out.getvalue().split("\r")]
    assert lines == [
        *("", "m is waiting until another model is unloaded"),
        *("loading m [############............]  50 %", "", ""),
    ]


def test_progress_is_not_written_to_a_pipe():
    out = io.StringIO()
    line = ProgressLine(out)
    line.show("loading", 0.5)
    line.erase()
    assert out.getvalue() == ""


def test_a_progress_line_never_wraps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "20")
    out = FakeTerminal()
    ProgressLine(out).show("loading a model with a long name", 0.5)
    assert out.getvalue() == "\rloading a model wit"


def test_the_rates_count_only_computed_tokens():
    lines = render_timings(FINISH, AnswerTimes(load=1.5, first_token=2.25, total=8))
    rows = dict(line.split(":") for line in lines)
    assert {label: value.strip() for label, value in rows.items()} == {
        "total duration": "8.000 s",
        "load duration": "1.500 s",
        "time to first token": "2.250 s",
        "prompt eval count": "30 tokens",
        "cached count": "10 tokens",
        "prompt eval duration": "2.000 s",
        "prompt eval rate": "10.00 tokens/s",
        "eval count": "11 tokens",
        "eval duration": "5.000 s",
        "eval rate": "2.00 tokens/s",
    }
