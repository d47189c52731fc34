"""What is kept of what a process wrote, and how its end is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runners.child_process import LogRateLimit, ProcessOutput, describe_exit


def lines(*pieces: bytes) -> list[str]:
    output = ProcessOutput()
    found = [line for piece in pieces for line in output.feed(piece)]
    return [*found, *output.flush()]


@given(
    text=st.lists(st.text("abcé日 :", max_size=30), max_size=8).map("\n".join),
    cuts=st.lists(st.integers(1, 40), max_size=20),
)
def test_lines_do_not_depend_on_how_they_arrive(text: str, cuts: list[int]):
    raw, pieces = text.encode(), list[bytes]()
    for cut in cuts:
        pieces.append(raw[:cut])
        raw = raw[cut:]
    whole = [line.rstrip() for line in text.split("\n")]
    assert lines(*pieces, raw) == [line for line in whole if line]


def test_a_line_without_an_end_takes_no_memory():
    output = ProcessOutput()
    for _ in range(1000):
        assert list(output.feed(b"x" * 65536)) == []
    [line] = output.feed(b"end\nnext")
    assert line == "x" * 2000 + " …"
    assert list(output.flush()) == ["next"]


def test_nothing_in_a_line_moves_a_terminal_or_begins_another():
    assert lines(b"a\tb\x1b[2Jc\r\nd\xff\n") == ["a       b\ufffd[2Jc", "d\ufffd"]


TRACEBACK = b"""INFO app: prompt of 3 tokens
Traceback (most recent call last):
  File "x.py", line 1, in <module>
ModuleNotFoundError: No module named 'mlx'
"""


def test_lines_that_give_a_reason_are_preferred():
    output = ProcessOutput()
    list(output.feed(TRACEBACK + b"DEBUG app: bye\n" * 4))
    assert output.find_reason() == "ModuleNotFoundError: No module named 'mlx'"


def test_else_the_last_lines_are_told():
    output = ProcessOutput()
    list(output.feed(b"one\ntwo\nthree\nfour\n"))
    assert output.find_reason() == "two; three; four"


def test_a_reason_is_short_and_old_lines_are_forgotten():
    output = ProcessOutput()
    for i in range(1000):
        list(output.feed(f"Error: {i} {'x' * 500}\n".encode()))
    assert len(output.find_reason()) <= 2000
    assert "Error: 999" in output.find_reason()
    list(output.feed(b"fine\n" * 50))
    assert output.find_reason() == "fine", "nothing is said twice"


def test_so_many_lines_pass_in_a_while_and_the_others_are_counted():
    quota = LogRateLimit()
    assert sum(quota.admit(1.0 + i / 1000) for i in range(250)) == 100
    assert quota.admit(20.0)
    assert (quota.take_dropped(), quota.take_dropped()) == (150, 0)


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (0, "ended with exit status 0"),
        (3, "ended with exit status 3"),
        (-9, "was killed by SIGKILL, possibly because the system ran out of memory"),
        (-11, "was killed by SIGSEGV"),
        (-63, "was killed by signal 63"),
    ],
)
def test_an_end_is_told_in_words(status: int, how: str):
    assert describe_exit(status) == how
