"""Limits the freed memory that the C library keeps.

Knows: glibc. Must not know: what the memory was used for.
"""

import ctypes
import sys
from contextlib import suppress

# (number, value) of these parameters of mallopt(3). asyncio reads into buffers of 256 KiB: mapping
# each of those would slow down every request.
_MMAP_THRESHOLD, _ARENA_MAX = (-3, 512 * 1024), (-8, 1)


def limit_malloc_retention() -> None:
    """Configures malloc to map each large buffer separately and to use one arena for all threads.

    For a process that handles large buffers occasionally and is idle in between. By default glibc
    stops mapping such buffers after the first one, keeps an arena per thread, and returns little of
    either to the system. Not for a process that computes: there, mapping costs more than the work
    on the buffer. Must be called before threads are started."""
    _call("mallopt", *_MMAP_THRESHOLD)
    _call("mallopt", *_ARENA_MAX)


def trim_malloc() -> None:
    """Returns free pages to the system. glibc keeps most of what threads have freed; other
    allocators return it on their own. Takes a few milliseconds, with the GIL released."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    """Calls a glibc function; does nothing with C libraries that do not have it."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), name)(*arguments)
