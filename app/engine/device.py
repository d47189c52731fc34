"""The compute device, and the default memory budget of the engine.

Knows: the device, the machine, the cgroups of this process. Must not know: models.

The budget is based on free memory rather than installed memory, because memory used by other
processes is not available.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx

from app.core.jobs import ComputeBackend
from app.engine.memory_policy import DeviceMemory, unified_budget
from models import cpu_backend, kernels

log = logging.getLogger(__name__)

# The dimensions of the benchmark's matrices. A fast BLAS multiplies matrices of this size in a few
# milliseconds, and a slow BLAS takes a reasonable time.
_MATRIX_SIZE = 512


def detect_backend(activations: int | None = None) -> ComputeBackend:
    """Returns the compute backend of this process. activations: the model's value, see
    `ComputeBackend`."""
    if mx.default_device().type == mx.DeviceType.gpu:
        return ComputeBackend(device="gpu")
    info = kernels.describe()
    if info.tile_fault is not None:
        log.warning("AMX tiles are disabled: %s", info.tile_fault)
    return ComputeBackend(
        device="cpu",
        kernels=info.isa if info.enabled else None,
        blas=cpu_backend.ACTIVE.blas,
        threads=cpu_backend.ACTIVE.threads,
        activations=activations,
    )


def read_device_info() -> Mapping[str, object]:
    """Returns what MLX reports about the default device."""
    return mx.device_info()


def measure_gigaflops() -> float:
    """Benchmarks float32 matrix multiplication. Returns the best of three runs in GFLOP/s. Creates
    arrays, so all calls must be on the same thread."""
    left, right = mx.ones((_MATRIX_SIZE, _MATRIX_SIZE)), mx.ones((_MATRIX_SIZE, _MATRIX_SIZE))
    mx.eval(left, right)
    taken: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        mx.eval(left @ right)
        taken.append(time.perf_counter() - began)
    return 2 * _MATRIX_SIZE**3 / min(taken) / 1e9


# The fractions of memory that the engine may use: of a GPU's dedicated memory, of the machine's
# memory (shared with other programs), and of the memory that is currently free. memory_policy.py
# has those of a Mac.
_DEVICE_SHARE, _MACHINE_SHARE, _FREE_SHARE = 0.9, 0.7, 0.9

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")

# The file names of the memory limit and usage, and the names of the statistics for reclaimable page
# cache, first for cgroup v2 and then for v1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def device_budget(own_bytes: int = 0) -> int:
    """Returns the number of bytes that the engine may use if no memory size is configured.

    On Metal, the budget depends on the recommended working set and on the reserve for other
    programs. On CUDA, it depends on the free device memory. On other devices, it depends on the
    free memory of the machine or container. Memory that this process already uses counts as free.
    `own_bytes` is the number of bytes used by other mlxrunner processes, which also count as free.
    """
    if mx.metal.is_available():
        return unified_budget(read_device_memory())
    device = mx.device_info()
    own_bytes += mx.get_active_memory() + mx.get_cache_memory()
    if mx.default_device().type == mx.DeviceType.gpu:
        total = cast(int, device.get("total_memory", device.get("memory_size", 0)))
        free = cast(int, device.get("free_memory", total))
        if total:
            return int(_DEVICE_SHARE * min(total, free + own_bytes))
    return _machine_budget(own_bytes)


def read_device_memory() -> DeviceMemory:
    """Returns the sizes and limits of the device's memory."""
    if mx.metal.is_available():
        device = mx.device_info()
        return DeviceMemory(
            physical=cast(int, device.get("memory_size", _installed_bytes())),
            recommended=cast(int, device["max_recommended_working_set_size"]),
            max_buffers=cast(int | None, device.get("resource_limit")),
        )
    if mx.default_device().type == mx.DeviceType.gpu:
        return DeviceMemory()
    return DeviceMemory(physical=_installed_bytes())


def _installed_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _machine_budget(own_bytes: int) -> int:
    free, total = read_machine_memory()
    return max(0, int(min(_MACHINE_SHARE * total, _FREE_SHARE * (free + own_bytes))))


def read_machine_memory() -> tuple[int, int]:
    """Returns the free and the total number of bytes of the machine, or of the container if it has
    less. Memory that the system can reclaim, such as the page cache, counts as free."""
    total = _installed_bytes()
    free = _available_bytes(total)
    for folder in _cgroups():
        for limit_file, taken_file, files in _CGROUP_FILES:
            limit = _read_number(folder / limit_file)
            if limit is None or limit >= total:
                continue
            # The kernel's MemAvailable also counts page cache as available.
            kept = _page_cache_bytes(folder / "memory.stat", files)
            taken = max(0, (_read_number(folder / taken_file) or 0) - kept)
            total, free = limit, min(free, limit - taken)
    return free, total


def _available_bytes(total: int) -> int:
    """Returns the memory of the machine that is available without swapping, or `total` if the
    system does not report it."""
    for line in _read_lines(_MEMINFO):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return total


def _cgroups() -> Iterator[Path]:
    """Yields the directories of this process's cgroups and of their ancestors. In a container with
    its own cgroup namespace, the outermost visible cgroup is the container's."""
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
    """Returns the number in a file. Returns None if the file does not exist or contains no number
    ("max" means no limit)."""
    text = "".join(_read_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
