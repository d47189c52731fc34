"""Simulates a process without free file descriptors."""

import contextlib
import os
import resource
from collections.abc import Iterator

# The limit: only standard input, output and error are below it.
_LIMIT = 3


@contextlib.contextmanager
def exhaust_descriptors() -> Iterator[None]:
    """All file descriptors of this process are in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    try:
        # use all numbers below the limit, so that a file closed by another thread frees none of
        # them
        while not opened or opened[-1] < _LIMIT:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (_LIMIT, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in opened:
            os.close(file)
