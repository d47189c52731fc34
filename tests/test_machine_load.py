"""The CPU time of this test run and of other programs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine_load import OtherPrograms, sum_tree_ticks

BUSY = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


def stat(process: int, parent: int, name: str, *ticks: int) -> str:
    """The content of a file /proc/PID/stat."""
    return f"{process} ({name}) S {parent} {'0 ' * 9}{' '.join(map(str, ticks))} 20 0 1 0"


def test_the_time_of_a_process_includes_its_descendants():
    stats = [
        stat(10, 1, "make", 1, 2, 300, 400),
        stat(11, 10, "a) name ( of (", 10, 20, 0, 0),
        stat(12, 11, "worker", 1000, 0, 0, 0),
        stat(20, 1, "another", 5000, 0, 0, 0),
    ]
    assert sum_tree_ticks(stats, 10) == 1733
    assert sum_tree_ticks(stats, 99) == 0


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc")
def test_the_time_of_other_programs_excludes_that_of_the_tests(monkeypatch: pytest.MonkeyPatch):
    """Compares two meters that differ only in the process whose descendants are excluded."""
    ours = OtherPrograms()
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr("os.getpid", lambda: -1)  # without descendants
    all_programs = OtherPrograms()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    share, total = ours.compute_share(), all_programs.compute_share()
    assert 0 <= share < total <= 1
