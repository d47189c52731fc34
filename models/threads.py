"""How many threads compute at once.

Knows: the cores that this process may run on, the time that its containers give it. Must not know:
what is computed. One thread for each core, not for each of a core's hardware threads: these share
the units that multiply. A share of time is rounded down: a thread beyond it makes all of them wait
for the next period.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

THREADS_VARIABLE = "MLXRUNNER_THREADS"

# the most that our own operations are shared among (kernels/src/pool.hpp)
MAX_THREADS = 256

_TOPOLOGY = Path("/sys/devices/system/cpu")
_PROC_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class ThreadsError(OSError):
    """MLXRUNNER_THREADS is not a number of threads. An OSError: the machine was asked for what it
    does not have, and whoever reports those reports this one too."""


def get_num_threads(
    environ: Mapping[str, str],
    *,
    allowed_cpus: Iterable[int] | None = None,
    topology: Path = _TOPOLOGY,
    proc_cgroup: Path = _PROC_CGROUP,
    cgroup_root: Path = _CGROUP_ROOT,
) -> int:
    """From one to MOST: MLXRUNNER_THREADS, else the cores, or what the cgroups around this process
    give of them. allowed_cpus: the CPUs that it may run on. proc_cgroup: which groups it is in.
    Raises ThreadsError."""
    if said := environ.get(THREADS_VARIABLE, "").strip():
        if not (said.isascii() and said.isdecimal() and int(said) > 0):
            raise ThreadsError(f"{THREADS_VARIABLE}: {said!r} is not a number of threads")
        if int(said) > MAX_THREADS:
            raise ThreadsError(
                f"{THREADS_VARIABLE}: {said} threads are too many, the maximum is {MAX_THREADS}"
            )
        return int(said)
    cpus = _allowed_cpus() if allowed_cpus is None else frozenset(allowed_cpus)
    limits = [_count_cores(cpus, topology), *_cpu_quotas(proc_cgroup, cgroup_root)]
    return max(1, int(min(MAX_THREADS, *limits)))


def _allowed_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _count_cores(cpus: frozenset[int], topology: Path) -> int:
    """CPUs of which nobody says what core they are of count as one each."""
    cores = {
        "".join(_read_lines(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"))
        or f"cpu{cpu}"
        for cpu in cpus
    }
    return len(cores)


def _cpu_quotas(proc_cgroup: Path, cgroup_root: Path) -> Iterator[float]:
    """CPUs' worth of time, of each group that limits it."""
    for folder in _cgroup_folders(proc_cgroup, cgroup_root):
        # cgroup v2 in one file, v1 in two; "max" and -1 are no limit
        told = " ".join(_read_lines(folder / "cpu.max")).split() or [
            "".join(_read_lines(folder / "cpu.cfs_quota_us")).strip(),
            "".join(_read_lines(folder / "cpu.cfs_period_us")).strip(),
        ]
        if len(told) == 2 and all(part.isdecimal() and int(part) > 0 for part in told):
            yield int(told[0]) / int(told[1])


def _cgroup_folders(proc_cgroup: Path, cgroup_root: Path) -> Iterator[Path]:
    """The groups that this process is in, and all around them. In a container of its own, the
    outermost of these is the container's."""
    tops = {"": cgroup_root, "cpu": cgroup_root / "cpu", "cpu,cpuacct": cgroup_root / "cpu,cpuacct"}
    yield from tops.values()
    for line in _read_lines(proc_cgroup):
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = tops.get(kinds, cgroup_root / kinds)
        folder = top / path.strip("/")
        while folder != top and folder.is_relative_to(top):
            yield folder
            folder = folder.parent


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
