"""A process that can open no more files."""

import contextlib
import os
import resource
from collections.abc import Iterator

# The limit: standard input, output and error are below it, and nothing that a test closes.
_LIMIT = 3


@contextlib.contextmanager
def exhaust_descriptors() -> Iterator[None]:
    """This process has as many files open as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    try:
        # numbers below the limit are taken for good: no file that another thread closes is one
        while not opened or opened[-1] < _LIMIT:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (_LIMIT, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in opened:
            os.close(file)
