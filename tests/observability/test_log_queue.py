"""The log is written by a thread: a slow or missing reader does not block the server."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import httpx
import pytest

from app.observability import logs
from app.observability.logs import QueuedLogHandler
from tests.server_process import ROOT, TIMEOUT

# more than the size of a pipe
MORE_THAN_A_PIPE = 1 << 17


@dataclass
class Pipe:
    """log: writes into the pipe."""

    log: logging.Logger
    handler: QueuedLogHandler
    write_end: int
    read_end: int

    def read(self) -> list[str]:
        """All lines logged until now. The thread writes while this reads."""
        reader = _Reader(self.read_end)
        self.handler.flush()
        self.handler.flush()
        return reader.stop().decode().splitlines()

    def block_writer(self) -> None:
        """Logs a line that fills the pipe, and waits until the thread writes it. From then on, no
        line leaves the queue until `read`."""
        self.log.info("x" * MORE_THAN_A_PIPE)
        queue, end = self.handler.queue, time.monotonic() + TIMEOUT
        assert isinstance(queue, SimpleQueue)
        while not queue.empty():
            assert time.monotonic() < end
            time.sleep(0.001)


class _Reader:
    def __init__(self, read_end: int) -> None:
        self._end = read_end
        self._read = bytearray()
        self._done = False
        os.set_blocking(read_end, False)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            done = self._done
            try:
                self._read += os.read(self._end, MORE_THAN_A_PIPE)
            except BlockingIOError:
                if done:
                    return
                time.sleep(0.005)

    def stop(self) -> bytes:
        self._done = True
        self._thread.join(TIMEOUT)
        return bytes(self._read)


def run_in_thread(work: Callable[[], object]) -> None:
    """Fails if the work blocks."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    assert not thread.is_alive()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    read_end, write_end = os.pipe()
    handler = QueuedLogHandler(write_end)
    log = logging.Logger("tested")
    log.addHandler(handler)
    yield Pipe(log, handler, write_end, read_end)
    os.close(read_end)  # further writes of the thread fail
    handler.close()
    os.close(write_end)


def test_lines_are_written_completely_and_in_order(pipe: Pipe):
    for n in range(1000):
        pipe.log.info("line %d, ü and \udc80", n)
    assert pipe.read() == [f"line {n}, ü and \\udc80" for n in range(1000)]


def test_a_line_is_written_without_waiting_for_more(pipe: Pipe):
    pipe.log.info("here")
    assert os.read(pipe.read_end, 100) == b"here\n"


def test_logging_does_not_block_and_dropped_lines_are_counted(pipe: Pipe):
    """A hanging `docker logs`, or Ctrl-S at a terminal, stopped the server."""
    pipe.block_writer()

    def log_lines() -> None:
        for n in range(10_000):
            pipe.log.info("%d", n)

    run_in_thread(log_lines)
    _, *lines = pipe.read()
    num_kept = len(lines)
    assert lines == [str(n) for n in range(num_kept)]
    assert 0 < num_kept < 10_000
    pipe.log.info("at last")
    notice, last = pipe.read()
    assert notice.startswith(f"{10_000 - num_kept} log lines dropped: the output")
    assert last == "at last"


def test_dropped_lines_are_reported_once(pipe: Pipe):
    pipe.block_writer()
    for _ in range(10_000):
        pipe.log.info("x" * 100)
    pipe.read()
    for _ in range(3):
        pipe.log.info("again")
    lines = pipe.read()
    assert [
        "log lines dropped: the output of the log was not read in time" in line for line in lines
    ] == [True, False, False, False]


def test_flush_ends_without_a_reader(pipe: Pipe):
    pipe.log.info("x" * MORE_THAN_A_PIPE)
    start = time.monotonic()
    pipe.handler.flush()
    assert 0.5 < time.monotonic() - start < TIMEOUT


def test_a_closed_reader_does_not_block(pipe: Pipe, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "_FLUSH_TIMEOUT", 100 * TIMEOUT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), pipe.read_end)
    for _ in range(100):
        pipe.log.info("to nobody")
    run_in_thread(pipe.handler.flush)


def test_a_non_blocking_file_gets_all_lines(pipe: Pipe):
    """Another process that shares the terminal may have made it non-blocking."""
    os.set_blocking(pipe.write_end, False)
    pipe.log.info("x" * MORE_THAN_A_PIPE)
    pipe.log.info("end")
    lines = pipe.read()
    assert [len(line) for line in lines] == [MORE_THAN_A_PIPE, 3]


def handle_as_python_3_13(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """`logging.Handler.handle` of 3.13 and newer, which uses `with self.lock`."""
    accepted = handler.filter(record)
    if accepted:
        assert handler.lock is not None
        with handler.lock:
            handler.emit(record)
    return bool(accepted)


def test_lines_are_written_with_the_locking_of_python_3_13(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
):
    """A handler whose lock was None raised in the writing thread: on Python 3.13 the log was empty
    from the first line on. This test handles records as 3.13 does, on every supported version."""
    monkeypatch.setattr(logging.Handler, "handle", handle_as_python_3_13)
    for n in range(10):
        pipe.log.info("line %d", n)
    assert pipe.read() == [f"line {n}" for n in range(10)]


PROGRAM = """
import logging
from app.core.settings import Settings
from app.observability.logs import configure_logging
configure_logging(Settings(log_format="json"))
for n in range(2000):
    logging.getLogger("app.x").info("line %d", n)
{end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("raise RuntimeError('planted')", 1), ("raise SystemExit(3)", 3), ("", 0)],
)
def test_all_lines_are_written_at_the_end_of_a_process(end: str, status: int):
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == status
    assert process.stderr.count('"line ') == 2000
    assert ("planted" in process.stderr) == ("planted" in end)


def test_a_process_ends_without_a_reader_of_its_log():
    """Python waits for the lock of sys.stderr at exit, which a writing thread would hold, and
    aborts."""
    command = [sys.executable, "-c", PROGRAM.format(end="")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        assert process.wait(TIMEOUT) == 0


def test_a_server_without_a_reader_of_its_log_serves_and_stops(tiny_model: Path):
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
            with httpx.Client(base_url=url, timeout=TIMEOUT) as client:
                headers = {"x-request-id": "x" * 128}
                for _ in range(400):  # at least 250 bytes each; a pipe holds 64 KiB
                    assert client.get("/v1/models", headers=headers).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT) == -signal.SIGTERM
        finally:
            process.kill()
