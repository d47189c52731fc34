"""No other test runs during a measurement, in any pytest worker."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.machine_lock import MachineLock, machine_lock_of_run
from tests.server_process import ROOT, TIMEOUT

WORKER = """
import sys, time
from pathlib import Path
from tests.machine_lock import MachineLock
machine, log = MachineLock(Path(sys.argv[1])), Path(sys.argv[2])
def note(what):
    with log.open("a") as file:
        file.write(what + "\\n")
times = 0
while not Path(sys.argv[4]).exists() if sys.argv[3] == "endless" else times < 20:
    times += 1
    with machine.shared():
        note("begin")
        time.sleep(0.005)
        note("end")
        if sys.argv[3] == "measures":
            with machine.exclusive():
                note("measure")
                time.sleep(0.005)
                note("measured")
"""


def test_no_test_runs_during_a_measurement_and_none_waits_forever(tmp_path: Path):
    log = tmp_path / "log"
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, tmp_path / "locks", log, kind], cwd=ROOT)
        for kind in ("measures", "measures", "tests", "tests")
    ]
    for worker in workers:
        assert worker.wait(TIMEOUT) == 0
    running, measuring, measured = 0, False, 0
    for what in log.read_text().split():
        match what:
            case "measure":
                assert running == 0
                assert not measuring
                measuring = True
            case "measured":
                measuring, measured = False, measured + 1
            case "begin" | "end":
                assert not measuring
                running += 1 if what == "begin" else -1
            case _:
                raise AssertionError(what)
    assert measured == 40


def test_a_measurement_does_not_wait_for_new_tests(tmp_path: Path):
    log, locks, stop = tmp_path / "log", tmp_path / "locks", tmp_path / "stop"
    busy = [
        subprocess.Popen([sys.executable, "-c", WORKER, locks, log, "endless", stop], cwd=ROOT)
        for _ in range(2)
    ]
    machine = MachineLock(locks)
    with machine.shared():
        while not log.exists():
            time.sleep(0.005)
        with machine.exclusive():
            before = log.read_text()
            time.sleep(0.05)
            assert log.read_text() == before
    stop.touch()
    for worker in busy:
        assert worker.wait(TIMEOUT) == 0


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
