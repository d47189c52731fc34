"""The memory of the machine: its pressure, the wired memory of this process, and the device
operations that release memory.

Knows: MLX's limits, the wired bytes, macOS's pressure level, the free memory of a Linux machine or
container. Must not know: models, sequences, the reasons for a limit (memory_policy.py).

Metal wires the buffers of a process up to one limit for all of them. MLX wires a buffer when it is
allocated, if the limit allows, and chooses by itself which buffers it unwires when the limit falls.
The limit therefore rises as needed and falls only to 0 when the engine is idle, or under memory
pressure.
"""

import ctypes
import sys
import threading
from typing import Protocol

import mlx.core as mx

from app.engine.device import read_machine_memory
from app.engine.memory_policy import MemoryPressure, wired_target
from app.engine.memory_profile import clear_allocator_cache
from models import kernels

# sysctl(3); the values match `MemoryPressure`
_LEVEL_NAME = b"kern.memorystatus_vm_pressure_level"

# The fractions of free memory below which Linux counts as short of memory. The default budget
# leaves a tenth of the free memory, so the engine alone does not reach them.
_WARNING_FRACTION, _CRITICAL_FRACTION = 0.05, 0.02


class CLibrary(Protocol):
    """The part of the C library that is used."""

    def sysctlbyname(self, *arguments: object) -> int: ...


def read_pressure() -> MemoryPressure:
    """Returns the memory pressure of this machine, or of the container if it is higher."""
    if sys.platform == "darwin":
        return read_macos_pressure(ctypes.CDLL(None))
    return classify_free_memory(*read_machine_memory())


def read_macos_pressure(library: CLibrary) -> MemoryPressure:
    """Returns the level that macOS reports. Unknown values, and a system without this value, count
    as normal. library: the C library."""
    level = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(level))
    failed = library.sysctlbyname(
        _LEVEL_NAME, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    if failed or level.value not in MemoryPressure.__members__.values():
        return MemoryPressure.NORMAL
    return MemoryPressure(level.value)


def classify_free_memory(free: int, total: int) -> MemoryPressure:
    """Returns the pressure of a machine with `free` of `total` bytes."""
    if free < _CRITICAL_FRACTION * total:
        return MemoryPressure.CRITICAL
    return MemoryPressure.WARNING if free < _WARNING_FRACTION * total else MemoryPressure.NORMAL


class MemoryDevice(Protocol):
    """The memory operations of a device."""

    def set_wired_limit(self, num_bytes: int) -> None: ...

    def clear_cache(self) -> None:
        """Frees the allocator's pool of unused buffers."""
        ...

    def trim(self) -> None:
        """Returns all unused memory of the process to the system."""
        ...

    def read_pressure(self) -> MemoryPressure: ...


class MlxMemory:
    """The memory operations of MLX's default device."""

    def set_wired_limit(self, num_bytes: int) -> None:
        mx.set_wired_limit(num_bytes)

    def clear_cache(self) -> None:
        clear_allocator_cache()

    def trim(self) -> None:
        clear_allocator_cache()
        kernels.trim_memory()

    def read_pressure(self) -> MemoryPressure:
        return read_pressure()


class WiredMemory:
    """Sets the wired limit. wirable: the maximum; 0 if the device cannot wire memory."""

    def __init__(self, device: MemoryDevice, wirable: int) -> None:
        self._device = device
        self._wirable = wirable
        self.limit = 0

    def cover(self, needed: int) -> None:
        """Raises the limit, if necessary, to wire `needed` bytes."""
        target = wired_target(needed, self._wirable)
        if target > self.limit:
            self._set_limit(target)

    def reduce(self, needed: int) -> None:
        """Lowers the limit to `needed` bytes after buffers were freed. If it was 0, it stays 0."""
        target = min(self.limit, wired_target(needed, self._wirable))
        if target > 0:
            # MLX wires the remaining buffers only if the limit changes.
            self._set_limit(target - 1)
            self._set_limit(target)

    def release(self) -> bool:
        """Unwires all memory. Returns whether any was wired."""
        if self.limit == 0:
            return False
        self._set_limit(0)
        return True

    def _set_limit(self, num_bytes: int) -> None:
        self._device.set_wired_limit(num_bytes)
        self.limit = num_bytes


def unwire_memory(timeout: float = 10.0) -> None:
    """Unwires all memory of this process. Call it before an exit that does not end the engine
    thread. Any thread may call it. It waits for up to `timeout` seconds, because the allocator may
    be locked by a hung thread."""
    if mx.metal.is_available():
        thread = threading.Thread(target=mx.set_wired_limit, args=(0,), daemon=True)
        thread.start()
        thread.join(timeout)
