"""Who uses the processors while a latency is measured: the test that measures, and no other worker.

A promise such as "at most twice as long" is about the server and what attacks it. Tests of other
workers would take the same two cores meanwhile. So each test holds a shared lock, and a measurement
takes the lock alone: it begins when the tests that run have ended, and the next ones wait for it.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class MachineLock:
    """folder: the same for all workers of a run. One thread of each worker uses this."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._shared_lock: IO[str] | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """While a test runs."""
        with self._locked("turn", fcntl.LOCK_SH):  # not past a measurement that waits
            self._shared_lock = self._lock("users", fcntl.LOCK_SH)
        try:
            yield
        finally:
            _unlock(self._shared_lock)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within `shared`: until no other test runs, and while none does."""
        assert self._shared_lock is not None
        fcntl.flock(
            self._shared_lock, fcntl.LOCK_UN
        )  # or two that want to measure wait for each other
        with self._locked("turn", fcntl.LOCK_EX):
            fcntl.flock(self._shared_lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._shared_lock, fcntl.LOCK_SH)

    @contextmanager
    def _locked(self, name: str, how: int) -> Iterator[None]:
        file = self._lock(name, how)
        try:
            yield
        finally:
            _unlock(file)

    def _lock(self, name: str, how: int) -> IO[str]:
        file = (self._folder / name).open("w")
        fcntl.flock(file, how)
        return file


def _unlock(file: IO[str]) -> None:
    # closing is not enough: a child that was forked meanwhile has the same file open
    fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def machine_lock_of_run() -> MachineLock:
    """The one that all workers of this run share; of a run without workers, its own."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    return MachineLock(Path(tempfile.gettempdir()) / f"mlxrunner-tests-{run}")
