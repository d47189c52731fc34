"""A lock for latency measurements: no other test runs at the same time.

A limit such as "at most twice as long" concerns the server and the attack. Tests of other pytest
workers would use the same two cores. So each test holds a shared lock, and a measurement takes it
exclusively: it starts after the running tests have ended, and the next tests wait for it.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class MachineLock:
    """folder: the same for all workers of a run. Used by one thread of each worker."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._shared_lock: IO[str] | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Held while a test runs."""
        with self._locked("turn", fcntl.LOCK_SH):  # do not overtake a waiting measurement
            self._shared_lock = self._lock("users", fcntl.LOCK_SH)
        try:
            yield
        finally:
            _unlock(self._shared_lock)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within `shared`: waits until no other test runs, and prevents new ones."""
        assert self._shared_lock is not None
        fcntl.flock(self._shared_lock, fcntl.LOCK_UN)  # otherwise two measurements would deadlock
        with self._locked("turn", fcntl.LOCK_EX):
            fcntl.flock(self._shared_lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._shared_lock, fcntl.LOCK_SH)

    @contextmanager
    def _locked(self, name: str, operation: int) -> Iterator[None]:
        file = self._lock(name, operation)
        try:
            yield
        finally:
            _unlock(file)

    def _lock(self, name: str, operation: int) -> IO[str]:
        file = (self._folder / name).open("w")
        fcntl.flock(file, operation)
        return file


def _unlock(file: IO[str]) -> None:
    # closing is not enough: a forked child process has the same file open
    fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def machine_lock_of_run() -> MachineLock:
    """The lock that all workers of this run share; without workers, one for this process.

    A run that a test starts has a separate lock. With the lock of the outer run it would wait
    for a measurement, which waits for the test that started it."""
    nested = "PYTEST_CURRENT_TEST" in os.environ
    own = str(os.getpid())
    run_id = own if nested else os.environ.get("PYTEST_XDIST_TESTRUNUID", own)
    return MachineLock(Path(tempfile.gettempdir()) / f"mlxrunner-tests-{run_id}")
