"""The CPU time of processes, from /proc (proc_pid_stat(5), proc_stat(5))."""

import os
from collections.abc import Iterable
from pathlib import Path

_STAT = Path("/proc/stat")


class OtherPrograms:
    """Measures the CPU time that other programs use while tests run. The tests' own processes are
    the descendants of the process that started pytest's workers."""

    def __init__(self) -> None:
        is_worker = "PYTEST_XDIST_WORKER" in os.environ
        self._root = os.getppid() if is_worker else os.getpid()
        self._busy, self._elapsed = self._read()

    def compute_share(self) -> float:
        """Returns the share of the machine's CPU time since the meter was created, between 0 and 1.
        It is 0 without /proc."""
        busy, elapsed = self._read()
        if elapsed == self._elapsed:
            return 0.0
        # the counters of /proc/stat and of the processes are not read at the same time
        return min(1.0, max(0.0, (busy - self._busy) / (elapsed - self._elapsed)))

    def _read(self) -> tuple[int, int]:
        """Returns the clock ticks of other programs, and those that have passed on all cores."""
        if not _STAT.exists():
            return 0, 0
        # user, nice, system, idle, iowait, irq, softirq, steal
        ticks = [int(field) for field in _STAT.read_text().split()[1:9]]
        elapsed, idle = sum(ticks), ticks[3] + ticks[4]
        return elapsed - idle - sum_tree_ticks(read_stats(), self._root), elapsed


def sum_tree_ticks(stats: Iterable[str], root: int) -> int:
    """Returns the clock ticks of a process, its descendants, and their children that have ended.

    stats: the contents of /proc/*/stat.
    """
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for stat in stats:
        # the second field is the name in parentheses, which may contain both spaces and parentheses
        number, _, rest = stat.partition(" (")
        fields = rest.rpartition(") ")[2].split()
        parents[int(number)] = int(fields[1])
        used[int(number)] = sum(map(int, fields[11:15]))
    members, found = {root}, {root}
    while found:
        found = {process for process, parent in parents.items() if parent in found} - members
        members |= found
    return sum(used.get(process, 0) for process in members)


def read_stats() -> Iterable[str]:
    """Yields the contents of /proc/*/stat."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            yield file.read_text()
        except (FileNotFoundError, ProcessLookupError):  # the process has just ended
            continue
