"""Bytes that the engine may use when nobody says how many.

Knows: the device, the machine, the containers that this process runs in. Must not know: models.
What is free counts, not only what there is: what others hold now is not ours to plan with.

What arrays are computed with in this process.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import mlx.core as mx

from app.core.jobs import ComputeBackend
from models import cpu_backend, kernels

# rows and columns of a product that takes a good BLAS a few milliseconds, and a bad one not long
_MATRIX_SIZE = 512


def detect_backend() -> ComputeBackend:
    if mx.default_device().type == mx.DeviceType.gpu:
        return ComputeBackend(device="gpu")
    ours = kernels.describe()
    return ComputeBackend(
        device="cpu",
        kernels=ours.isa if ours.enabled else None,
        blas=cpu_backend.ACTIVE.blas,
        threads=cpu_backend.ACTIVE.threads,
    )


def measure_gigaflops() -> float:
    """What a product of two float32 matrices reaches, the best of three. Like all that makes arrays
    to be called on one thread."""
    left, right = mx.ones((_MATRIX_SIZE, _MATRIX_SIZE)), mx.ones((_MATRIX_SIZE, _MATRIX_SIZE))
    mx.eval(left, right)
    taken: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        mx.eval(left @ right)
        taken.append(time.perf_counter() - began)
    return 2 * _MATRIX_SIZE**3 / min(taken) / 1e9


# of a device whose memory is its own; of a machine that has other things to do, and of what
# these leave free at the moment
_DEVICE_SHARE, _MACHINE_SHARE, _FREE_SHARE = 0.9, 0.7, 0.9

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")

# the limit, what is taken of it, and how much of that is files that the kernel would let go:
# cgroup v2, v1
_CGROUP_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def device_budget(held: int = 0) -> int:
    """On Metal by the recommended working set, on CUDA by the memory that is free, else by that of
    the machine or of the container. What this process has in use already is counted as free, and so
    are `held` bytes which other processes of ours have."""
    device = mx.device_info()
    if mx.metal.is_available():
        return int(_DEVICE_SHARE * cast(int, device["max_recommended_working_set_size"]))
    held += mx.get_active_memory() + mx.get_cache_memory()
    if mx.default_device().type == mx.DeviceType.gpu:
        total = cast(int, device.get("total_memory", device.get("memory_size", 0)))
        free = cast(int, device.get("free_memory", total))
        if total:
            return int(_DEVICE_SHARE * min(total, free + held))
    return _machine_budget(held)


def _machine_budget(held: int) -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = _available_bytes(total)
    for folder in _cgroups():
        for limit_file, taken_file, files in _CGROUP_FILES:
            limit = _read_number(folder / limit_file)
            if limit is None or limit >= total:
                continue
            # the kernel counts files among what is available to the machine, too (MemAvailable)
            kept = _page_cache_bytes(folder / "memory.stat", files)
            taken = max(0, (_read_number(folder / taken_file) or 0) - kept)
            total, free = limit, min(free, limit - taken)
    return max(0, int(min(_MACHINE_SHARE * total, _FREE_SHARE * (free + held))))


def _available_bytes(total: int) -> int:
    """Of the machine, before somebody must give way; all of it where nobody tells."""
    for line in _read_lines(_MEMINFO):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return total


def _cgroups() -> Iterator[Path]:
    """The folders of the groups that this process is in, and of all around them. In a container of
    its own, the outermost of these is the container's."""
    yield _CGROUPS
    yield _CGROUPS / "memory"
    for line in _read_lines(_OWN_CGROUPS):
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top = _CGROUPS / "memory" if kinds else _CGROUPS
        folder = top / path.strip("/")
        while folder != top:
            yield folder
            folder = folder.parent


def _page_cache_bytes(stat: Path, names: tuple[str, str]) -> int:
    pairs = (line.split() for line in _read_lines(stat))
    return sum(int(value) for name, value in pairs if name in names)


def _read_number(path: Path) -> int | None:
    """None for a file that is not there, and for no limit ("max")."""
    said = "".join(_read_lines(path)).strip()
    return int(said) if said.isdecimal() else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
