"""How many threads compute at once.

Knows: the cores that this process may run on, the time that its containers give it. Must not know:
what is computed. One thread for each core, not for each of a core's hardware threads: these share
the units that multiply. A share of time is rounded down: a thread beyond it makes all of them wait
for the next period.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

VARIABLE = "MLXRUNNER_THREADS"

# the most that our own operations are shared among (kernels/src/pool.hpp)
MOST = 256

_TOPOLOGY = Path("/sys/devices/system/cpu")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


class ThreadsError(OSError):
    """MLXRUNNER_THREADS is not a number of threads. An OSError: the machine was asked for what it
    does not have, and whoever reports those reports this one too."""


def thread_count(
    environ: Mapping[str, str],
    *,
    allowed: Iterable[int] | None = None,
    topology: Path = _TOPOLOGY,
    own: Path = _OWN_CGROUPS,
    cgroups: Path = _CGROUPS,
) -> int:
    """From one to MOST: MLXRUNNER_THREADS, else the cores, or what the cgroups around this process
    give of them. allowed: the CPUs that it may run on. own: which groups it is in. Raises
    ThreadsError."""
    if said := environ.get(VARIABLE, "").strip():
        if not (said.isascii() and said.isdecimal() and int(said) > 0):
            raise ThreadsError(f"{VARIABLE}: {said!r} is not a number of threads")
        if int(said) > MOST:
            raise ThreadsError(f"{VARIABLE}: {said} threads are too many, the maximum is {MOST}")
        return int(said)
    cpus = _allowed() if allowed is None else frozenset(allowed)
    limits = [_cores(cpus, topology), *_quotas(own, cgroups)]
    return max(1, int(min(MOST, *limits)))


def _allowed() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _cores(cpus: frozenset[int], topology: Path) -> int:
    """CPUs of which nobody says what core they are of count as one each."""
    cores = {
        "".join(_lines(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list")) or f"cpu{cpu}"
        for cpu in cpus
    }
    return len(cores)


def _quotas(own: Path, cgroups: Path) -> Iterator[float]:
    """CPUs' worth of time, of each group that limits it."""
    for folder in _folders(own, cgroups):
        # cgroup v2 in one file, v1 in two; "max" and -1 are no limit
        told = " ".join(_lines(folder / "cpu.max")).split() or [
            "".join(_lines(folder / "cpu.cfs_quota_us")).strip(),
            "".join(_lines(folder / "cpu.cfs_period_us")).strip(),
        ]
        if len(told) == 2 and all(part.isdecimal() and int(part) > 0 for part in told):
            yield int(told[0]) / int(told[1])


def _folders(own: Path, cgroups: Path) -> Iterator[Path]:
    """The groups that this process is in, and all around them. In a container of its own, the
    outermost of these is the container's."""
    tops = {"": cgroups, "cpu": cgroups / "cpu", "cpu,cpuacct": cgroups / "cpu,cpuacct"}
    yield from tops.values()
    for line in _lines(own):
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = tops.get(kinds, cgroups / kinds)
        folder = top / path.strip("/")
        while folder != top and folder.is_relative_to(top):
            yield folder
            folder = folder.parent


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
