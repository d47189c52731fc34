"""Waiting for a state that has no event: one that another thread, process or task changes.

The limit only ends a test that would never pass; nothing may depend on its length.
"""

import asyncio
import time
from collections.abc import Callable

LIMIT = 60.0  # seconds
_INTERVAL = 0.002  # seconds


def wait_until(
    condition: Callable[[], object], explain: Callable[[], str] = lambda: "the condition never held"
) -> None:
    """Returns when the condition is true. Raises AssertionError with the explanation if it never
    is."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(_INTERVAL)


async def wait_until_async(condition: Callable[[], object]) -> None:
    """Like `wait_until`, while the tasks of the event loop run."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(_INTERVAL)
