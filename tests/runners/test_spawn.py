"""Model processes that are spawned, the first one of a server before the server is imported."""

import os
import platform
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.runners import spawn as spawn_module
from app.runners.spawn import SpawnedProcess, request_huge_pages, spawn, spawn_early


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
        spawn("model")
    assert {end.fileno() for pair in pairs for end in pair} == {-1}


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SpawnedProcess]]:
    """The processes that are spawned, which only wait."""
    found: list[SpawnedProcess] = []
    command = (sys.executable, "-c", "import sys; sys.stdin.read()")
    monkeypatch.setattr(spawn_module, "build_command", lambda *_: command)

    def spawn_and_note(name: str) -> SpawnedProcess:
        found.append(spawn(name))
        return found[-1]

    monkeypatch.setattr(spawn_module, "spawn", spawn_and_note)
    yield found
    for one in found:
        one.process.kill()
        with one.process, one.channel_end:
            pass


def test_the_early_process_is_returned_once(spawned: list[SpawnedProcess]):
    with spawn_early("model") as spawn_model:
        [early] = spawned
        assert spawn_model("model") is early
        later = spawn_model("model")
        assert spawned == [early, later]
    assert [one.process.poll() for one in spawned] == [None, None]


def test_an_early_process_that_is_not_used_is_killed(spawned: list[SpawnedProcess]):
    with pytest.raises(KeyboardInterrupt), spawn_early("model"):
        raise KeyboardInterrupt
    [early] = spawned
    assert early.process.returncode == -signal.SIGKILL
    assert early.channel_end.fileno() == -1


def test_a_failed_early_start_is_repeated_later(
    spawned: list[SpawnedProcess], monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as broken:
        broken.setattr(spawn_module, "build_command", lambda *_: ("/nowhere/python",))
        with spawn_early("model") as spawn_model:
            assert spawned == []
            with pytest.raises(OSError, match="No such file"):
                spawn_model("model")


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
