"""The memory pressure of the system: whether it is short of memory for all programs.

Knows: macOS's pressure level, the free memory of a Linux machine or container. Must not know:
tensors, the engine, the reaction to pressure.
"""

import ctypes
import sys
from typing import Protocol

from app.engine.device import read_machine_memory
from app.engine.memory_policy import MemoryPressure

# sysctl(3); the values are those of `MemoryPressure`
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
