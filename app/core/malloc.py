"""Limits the amount of freed memory that the C library retains.

Knows: glibc. Must not know: the purpose of the memory.
"""

import ctypes
import sys
from contextlib import suppress

# The constants of the mallopt(3) parameters and their values. asyncio reads into buffers of 256
# KiB, and mapping each buffer separately would slow down every request.
_MMAP_THRESHOLD, _ARENA_MAX = (-3, 512 * 1024), (-8, 1)


def limit_malloc_retention() -> None:
    """Configures malloc to map each large buffer separately and to use one arena for all threads.

    Use it in a process that handles large buffers only occasionally. By default, glibc stops
    mapping such buffers after freeing the first one, keeps one arena per thread, and returns little
    of this memory to the system. Do not use it in a process that runs a model, where mapping a
    buffer costs more than the computation on it. Must be called before threads are started.
    """
    _call("mallopt", *_MMAP_THRESHOLD)
    _call("mallopt", *_ARENA_MAX)


def trim_malloc() -> None:
    """Returns free pages to the system. glibc retains most of the memory that threads have freed;
    other allocators return it automatically. The call takes a few milliseconds and releases the
    GIL."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    """Calls a glibc function. Does nothing if the C library does not have it."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), name)(*arguments)
