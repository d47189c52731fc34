"""The capabilities of a terminal, by its environment."""

import io
from collections.abc import Mapping

import pytest

from app.core.terminal import (
    OutputTerminal,
    ProgressLine,
    detect_terminal,
    draw_bar,
    erase_line,
    get_width,
    print_message,
    wrap_words,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


PLAIN = OutputTerminal()
COLOR_ONLY = OutputTerminal(has_color=True)
FULL = OutputTerminal(is_terminal=True, has_color=True, can_rewrite=True)
NO_COLOR = OutputTerminal(is_terminal=True, can_rewrite=True)
DUMB = OutputTerminal(is_terminal=True)


@pytest.mark.parametrize(
    ("environ", "on_terminal", "in_pipe"),
    [
        ({}, FULL, PLAIN),
        ({"TERM": "xterm"}, FULL, PLAIN),
        ({"NO_COLOR": "1"}, NO_COLOR, PLAIN),
        ({"NO_COLOR": ""}, FULL, PLAIN),
        ({"TERM": "dumb"}, DUMB, PLAIN),
        ({"FORCE_COLOR": "1"}, FULL, COLOR_ONLY),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, NO_COLOR, PLAIN),
        (
            {"FORCE_COLOR": "1", "TERM": "dumb"},
            OutputTerminal(is_terminal=True, has_color=True),
            COLOR_ONLY,
        ),
    ],
)
def test_the_environment_and_the_stream_decide(
    environ: Mapping[str, str], on_terminal: OutputTerminal, in_pipe: OutputTerminal
) -> None:
    assert detect_terminal(Terminal(), environ) == on_terminal
    assert detect_terminal(io.StringIO(), environ) == in_pipe


def test_text_is_painted_only_with_colour() -> None:
    assert FULL.paint("200", "green") == "\x1b[32m200\x1b[0m"
    assert FULL.paint("", "green") == ""
    assert DUMB.paint("200", "green") == "200"


@pytest.mark.parametrize(
    ("done", "total", "bar"),
    [
        (0, 100, "[....]"),
        (50, 100, "[##..]"),
        (100, 100, "[####]"),
        (200, 100, "[####]"),
        (1, 0, "[####]"),
    ],
)
def test_a_bar_is_filled_in_proportion(done: float, total: float, bar: str) -> None:
    assert draw_bar(done, total, 4) == bar


def test_a_line_is_erased_without_an_escape_sequence() -> None:
    assert erase_line(4) == "\r   \r"
    assert get_width(-1) == 80


def test_a_label_cannot_control_the_terminal() -> None:
    stream = Terminal()
    ProgressLine(stream).show("a\x1b[2J")
    assert stream.getvalue() == "\r" + r"a\x1b[2J"


def test_a_message_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """The path of a model, and texts in its files, are part of messages."""
    print_message("models/\x1b]0;title\x07\n\rx has no config.json")
    expected = r"mlxrunner: models/\x1b]0;title\x07\n\rx has no config.json"
    assert capsys.readouterr().err == f"{expected}\n"


def test_lines_are_wrapped_at_words_on_a_terminal_only() -> None:
    command = "`mlxrunner pull mlx-community/Qwen3-4B-4bit`"
    text = f"{'word ' * 14}end: run {command} or /{'x' * 100} now\n\nsecond"
    assert wrap_words(text, io.StringIO()) == text
    wrapped = wrap_words(text, Terminal())
    assert wrapped.split("\n") == [
        f"{'word ' * 14}end: run",
        f"  {command} or",
        f"  /{'x' * 100}",
        "  now",
        "",
        "second",
    ]
