"""What the C library keeps of the memory that was freed.

Knows: glibc. Must not know: what the memory was used for.
"""

import ctypes
import sys
from contextlib import suppress


def release_free_memory() -> None:
    """Give free pages back to the system. glibc keeps most of what threads have freed; other
    allocators return it by themselves. Takes some milliseconds, without the interpreter."""
    if sys.platform == "linux":
        # musl has no such function
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
