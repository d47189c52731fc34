"""The number of lines that Python executes: a measure of work that no other program can change.

It shows that work is linear, or that it does not depend on a size. Time does not: another program
may use the machine at the same time.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_lines(work: Callable[[], object]) -> int:
    """Returns the number of lines executed by `work`; those of a loop count once per iteration. C
    code, such as a comparison of two slices, counts nothing. Coverage is not measured during this
    time, so the test should be marked `no_cover`."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return count
