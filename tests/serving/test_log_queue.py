"""The log is written by a thread: whoever reads it, or does not, stops nobody."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from app.serving.logs import QueuedLogHandler
from tests.server_process import ROOT, TIMEOUT

# a pipe's size, and more
MUCH = 1 << 17


@dataclass
class Pipe:
    """log: writes into a pipe, which is read when this is asked for what came."""

    log: logging.Logger
    handler: QueuedLogHandler
    into: int
    end: int

    def read(self) -> list[str]:
        """All that was logged until now. The thread writes while this reads."""
        reader = _Reader(self.end)
        self.handler.flush()
        self.handler.flush()
        return reader.stop().decode().splitlines()


class _Reader:
    def __init__(self, end: int) -> None:
        self._end = end
        self._read = bytearray()
        self._over = False
        os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            over = self._over
            try:
                self._read += os.read(self._end, MUCH)
            except BlockingIOError:
                if over:
                    return
                time.sleep(0.005)

    def stop(self) -> bytes:
        self._over = True
        self._thread.join(TIMEOUT)
        return bytes(self._read)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    end, into = os.pipe()
    handler = QueuedLogHandler(into)
    log = logging.Logger("tested")
    log.addHandler(handler)
    yield Pipe(log, handler, into, end)
    os.close(end)  # whatever the thread still writes fails now
    handler.close()
    os.close(into)


def test_lines_are_written_whole_and_in_their_order(pipe: Pipe):
    for n in range(1000):
        pipe.log.info("line %d, ü and \udc80", n)
    assert pipe.read() == [f"line {n}, ü and \\udc80" for n in range(1000)]


def test_a_line_that_was_said_is_written_without_waiting_for_others(pipe: Pipe):
    pipe.log.info("here")
    assert os.read(pipe.end, 100) == b"here\n"


def test_nobody_waits_for_a_reader_and_what_was_lost_is_told(pipe: Pipe):
    """`docker logs` that hangs, Ctrl-S at a terminal: the server stopped."""
    begun = time.monotonic()
    for n in range(10_000):
        pipe.log.info("%d %s", n, "x" * 100)
    assert time.monotonic() - begun < 5
    lines = pipe.read()
    pipe.log.info("at last")
    *more, last = pipe.read()
    assert last == "at last"
    # usually in one place; in two, where the thread still got a line out between them
    following = 0
    for line in [*lines, *more]:
        number, _, rest = line.partition(" ")
        if rest.startswith("log lines were dropped because the output of the log was not read"):
            following += int(number)
        else:
            assert int(number) == following
            following += 1
    assert following == 10_000
    assert len(lines) < 10_000


def test_a_loss_is_told_once(pipe: Pipe):
    for _ in range(10_000):
        pipe.log.info("x" * 100)
    pipe.read()
    for _ in range(3):
        pipe.log.info("again")
    lines = pipe.read()
    assert [
        "log lines were dropped because the output of the log was not read in time" in line
        for line in lines
    ] == [True, False, False, False]


def test_to_flush_ends_though_nobody_reads(pipe: Pipe):
    pipe.log.info("x" * MUCH)
    begun = time.monotonic()
    pipe.handler.flush()
    assert 0.5 < time.monotonic() - begun < TIMEOUT


def test_a_reader_that_is_gone_stops_nothing(pipe: Pipe):
    os.dup2(os.open(os.devnull, os.O_RDONLY), pipe.end)
    for _ in range(100):
        pipe.log.info("to nobody")
    begun = time.monotonic()
    pipe.handler.flush()
    assert time.monotonic() - begun < 0.9


def test_a_file_that_does_not_want_to_wait_gets_all_the_same(pipe: Pipe):
    """Whoever shares a terminal with us may have made it so."""
    os.set_blocking(pipe.into, False)
    pipe.log.info("x" * MUCH)
    pipe.log.info("end")
    lines = pipe.read()
    assert [len(line) for line in lines] == [MUCH, 3]


def handle_as_python_3_13(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """`logging.Handler.handle` of 3.13 and newer, which enters the lock that 3.12 asks for."""
    accepted = handler.filter(record)
    if accepted:
        assert handler.lock is not None
        with handler.lock:
            handler.emit(record)
    return bool(accepted)


def test_lines_are_written_where_logging_enters_the_lock_of_each_handler(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
):
    """A handler whose lock was None raised in the thread that writes: on Python 3.13 the log was
    empty from the first line on. Here every supported version handles records as 3.13 does."""
    monkeypatch.setattr(logging.Handler, "handle", handle_as_python_3_13)
    for n in range(10):
        pipe.log.info("line %d", n)
    assert pipe.read() == [f"line {n}" for n in range(10)]


CRASHING = """
import logging
from app.core.settings import Settings
from app.serving.logs import configure_logging
configure_logging(Settings(log_format="json"))
for n in range(2000):
    logging.getLogger("app.x").info("line %d", n)
{end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("raise RuntimeError('planted')", 1), ("raise SystemExit(3)", 3), ("", 0)],
)
def test_a_process_that_ends_has_written_everything(end: str, status: int):
    command = [sys.executable, "-c", CRASHING.format(end=end)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert done.stderr.count('"line ') == 2000
    assert ("planted" in done.stderr) == ("planted" in end)


def test_a_process_ends_though_nobody_reads():
    """Python waits for sys.stderr, which a thread that writes into it would hold, and aborts."""
    command = [sys.executable, "-c", CRASHING.format(end="")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        assert process.wait(TIMEOUT) == 0


def test_a_server_whose_log_nobody_reads_serves_and_ends(tiny_model: Path):
    command = [sys.executable, "-m", "app", "serve", "--runner", "thread", "--port", "0"]
    with subprocess.Popen(
        [*command, "--log-level", "debug", str(tiny_model)], cwd=ROOT, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        try:
            url = ""
            while not url:
                _, found, url = process.stderr.readline().decode().partition(" running on ")
                url = url.split(" ")[0] if found else ""
            with httpx.Client(base_url=url, timeout=10) as client:
                headers = {"x-request-id": "x" * 128}
                for _ in range(400):  # of 250 bytes each, at least, and a pipe holds 64 KiB
                    assert client.get("/v1/models", headers=headers).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT) == -signal.SIGTERM
        finally:
            process.kill()
