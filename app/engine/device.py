"""The compute device: what this process computes with, and the default memory budget of the engine.

Knows: the device, the machine, the containers that this process runs in. Must not know: models.

The budget depends on the free memory, not only on the installed memory: memory that other processes
hold is not available.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import mlx.core as mx

from app.core.jobs import ComputeBackend
from models import cpu_backend, kernels

# rows and columns of the benchmark's matrices: a fast BLAS multiplies them in a few milliseconds, a
# slow one in reasonable time
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
    """The speed of multiplying two float32 matrices, in GFLOP/s; the best of three runs. Creates
    arrays, so all calls must come from one thread."""
    left, right = mx.ones((_MATRIX_SIZE, _MATRIX_SIZE)), mx.ones((_MATRIX_SIZE, _MATRIX_SIZE))
    mx.eval(left, right)
    taken: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        mx.eval(left @ right)
        taken.append(time.perf_counter() - began)
    return 2 * _MATRIX_SIZE**3 / min(taken) / 1e9


# the fraction of a GPU's own memory that is used; that of a machine's memory, which other programs
# share; and that of the memory that is free at the moment
_DEVICE_SHARE, _MACHINE_SHARE, _FREE_SHARE = 0.9, 0.7, 0.9

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")

# names of the files with the limit and the usage, and of the statistics that count reclaimable page
# cache: cgroup v2, v1
_CGROUP_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def device_budget(held: int = 0) -> int:
    """Bytes that the engine may use when no memory size is configured.

    On Metal this follows the recommended working set, on CUDA the free device memory, else the free
    memory of the machine or container. Memory that this process already uses counts as free.

    held: bytes that our other processes use; they count as free too.
    """
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
            # the kernel's MemAvailable counts page cache as available, too
            kept = _page_cache_bytes(folder / "memory.stat", files)
            taken = max(0, (_read_number(folder / taken_file) or 0) - kept)
            total, free = limit, min(free, limit - taken)
    return max(0, int(min(_MACHINE_SHARE * total, _FREE_SHARE * (free + held))))


def _available_bytes(total: int) -> int:
    """The memory of the machine that is available without swapping; `total` if the system does not
    report it."""
    for line in _read_lines(_MEMINFO):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return total


def _cgroups() -> Iterator[Path]:
    """The folders of this process's cgroups and of their ancestors. In a container with its own
    cgroup namespace, the outermost is the container's."""
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
    """The number in a file; None if the file does not exist or holds no number ("max" means no
    limit)."""
    said = "".join(_read_lines(path)).strip()
    return int(said) if said.isdecimal() else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
