"""The output of a child process, and the description of its exit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runners.child_process import LogRateLimit, ProcessOutput, describe_exit


def read_lines(*pieces: bytes) -> list[str]:
    output = ProcessOutput()
    read = [line for piece in pieces for line in output.feed(piece)]
    return [*read, *output.flush()]


@given(
    text=st.lists(st.text("abcé日 :", max_size=30), max_size=8).map("\n".join),
    cuts=st.lists(st.integers(1, 40), max_size=20),
)
def test_lines_do_not_depend_on_how_they_arrive(text: str, cuts: list[int]):
    raw, pieces = text.encode(), list[bytes]()
    for cut in cuts:
        pieces.append(raw[:cut])
        raw = raw[cut:]
    expected = [line.rstrip() for line in text.split("\n")]
    assert read_lines(*pieces, raw) == [line for line in expected if line]


def test_an_endless_line_takes_bounded_memory():
    output = ProcessOutput()
    for _ in range(1000):
        assert list(output.feed(b"x" * 65536)) == []
    [line] = output.feed(b"end\nnext")
    assert line == "x" * 2000 + " …"
    assert list(output.flush()) == ["next"]


def test_control_characters_in_a_line_are_replaced():
    assert read_lines(b"a\tb\x1b[2Jc\r\nd\xff\n") == ["a       b\ufffd[2Jc", "d\ufffd"]


TRACEBACK = b"""INFO app: prompt of 3 tokens
Traceback (most recent call last):
  File "x.py", line 1, in <module>
ModuleNotFoundError: No module named 'mlx'
"""


def test_lines_with_an_error_are_preferred_as_the_reason():
    output = ProcessOutput()
    list(output.feed(TRACEBACK + b"DEBUG app: bye\n" * 4))
    assert output.find_reason() == "ModuleNotFoundError: No module named 'mlx'"


def test_without_an_error_the_last_lines_are_the_reason():
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
    assert output.find_reason() == "fine", "old lines are not reported again"


def test_lines_are_rate_limited_and_dropped_ones_are_counted():
    quota = LogRateLimit()
    assert sum(quota.admit(1.0 + i / 1000) for i in range(250)) == 100
    assert quota.admit(20.0)
    assert (quota.take_dropped(), quota.take_dropped()) == (150, 0)


@pytest.mark.parametrize(
    ("status", "description"),
    [
        (0, "ended with exit status 0"),
        (3, "ended with exit status 3"),
        (-9, "was killed by SIGKILL, possibly because the system ran out of memory"),
        (-11, "was killed by SIGSEGV"),
        (-63, "was killed by signal 63"),
    ],
)
def test_an_exit_status_is_described(status: int, description: str):
    assert describe_exit(status) == description
