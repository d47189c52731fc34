"""No other test runs during a measurement, in any pytest worker."""

import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from tests.machine_lock import MachineLock, machine_lock_of_run
from tests.server_process import TIMEOUT


def is_free(file: Path, operation: int) -> bool:
    """Whether another worker would get the lock."""
    with file.open("w") as opened:
        try:
            fcntl.flock(opened, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_no_test_begins_during_a_measurement_and_no_measurement_during_a_test(tmp_path: Path):
    machine, users, turn = MachineLock(tmp_path), tmp_path / "users", tmp_path / "turn"
    with machine.shared():
        assert is_free(users, fcntl.LOCK_SH)
        assert is_free(turn, fcntl.LOCK_SH)
        assert not is_free(users, fcntl.LOCK_EX)
        with machine.exclusive():
            assert not is_free(users, fcntl.LOCK_SH)
            assert not is_free(turn, fcntl.LOCK_SH)
        assert is_free(users, fcntl.LOCK_SH)
        assert not is_free(users, fcntl.LOCK_EX)
    assert is_free(users, fcntl.LOCK_EX)
    assert is_free(turn, fcntl.LOCK_EX)


def test_a_child_that_outlives_its_test_holds_no_lock(tmp_path: Path):
    """Locks belong to the open file, which a fork shares."""
    machine = MachineLock(tmp_path / "locks")
    with machine.shared():
        child = os.fork()
        if child == 0:
            time.sleep(TIMEOUT)
            os._exit(0)
    try:
        with machine.shared(), machine.exclusive():
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_run_that_a_test_starts_does_not_wait_for_a_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measurement waits for the test, which waits for the run that it started. Processes that
    pytest starts in a test have PYTEST_CURRENT_TEST in their environment."""
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "outer-run")
    nested = machine_lock_of_run()
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    outer = machine_lock_of_run()
    with outer.shared(), outer.exclusive(), nested.shared():
        pass
