"""The output of a child process, and the description of its exit."""

import asyncio
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runners.child_process import (
    ChildProcess,
    LogRateLimit,
    ProcessOutput,
    describe_exit,
    request_huge_pages,
)


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


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", None),
    ],
)
def test_huge_pages_are_requested_unless_the_user_has_decided(
    known: str | None, expected: str | None
):
    environment = {} if known is None else {"GLIBC_TUNABLES": known}
    assert request_huge_pages(environment).get("GLIBC_TUNABLES") == expected


def test_a_failed_start_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch):
    pairs: list[tuple[socket.socket, socket.socket]] = []
    socketpair = socket.socketpair

    def make_pair() -> tuple[socket.socket, socket.socket]:
        pairs.append(socketpair())
        return pairs[-1]

    monkeypatch.setattr(socket, "socketpair", make_pair)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="No such file"):
        asyncio.run(ChildProcess.start("model"))
    assert {end.fileno() for pair in pairs for end in pair} == {-1}


def has_tunable() -> bool:
    name, version = platform.libc_ver()
    return name == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

ALLOCATE = """
import mlx.core as mx
weights = [mx.ones((1 << 20,)) for _ in range(32)]
mx.eval(weights)
print(open("/proc/self/smaps_rollup").read())
"""


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(),
    reason="the system has no transparent huge pages",
)
@pytest.mark.skipif(not has_tunable(), reason="needs glibc 2.35 or newer")
def test_arrays_are_in_huge_pages():
    """128 MiB in arrays of 4 MiB. The system may have too little contiguous memory for some."""
    result = subprocess.run(
        [sys.executable, "-c", ALLOCATE],
        env={**os.environ, **request_huge_pages({})},
        capture_output=True,
        text=True,
        check=True,
    )
    [kilobytes] = re.findall(r"AnonHugePages:\s+(\d+)", result.stdout)
    assert int(kilobytes) > 0
