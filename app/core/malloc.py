"""What the C library keeps of the memory that was freed.

Knows: glibc. Must not know: what the memory was used for.
"""

import ctypes
import sys
from contextlib import suppress

# mallopt(3): its numbers of these parameters, and values for them. asyncio reads into buffers of
# 256 KiB: mapping each of those would slow every request down.
_MMAP_THRESHOLD, _ARENA_MAX = (-3, 512 * 1024), (-8, 1)


def limit_malloc_retention() -> None:
    """For a process that handles large buffers now and then and is idle in between: each of them is
    mapped on its own, and threads share one arena. By itself glibc stops mapping them after the
    first one, keeps an arena for each thread, and returns little of either. Not for a process that
    computes: mapping costs it more than what it maps for. Call it before there are threads."""
    _call("mallopt", *_MMAP_THRESHOLD)
    _call("mallopt", *_ARENA_MAX)


def trim_malloc() -> None:
    """Give free pages back to the system. glibc keeps most of what threads have freed; other
    allocators return it by themselves. Takes some milliseconds, without the interpreter."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    """A function of glibc, which other C libraries do not have."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), name)(*arguments)
