"""Waiting for a state that has no event: one that another thread, process or task changes.

limit: the number of seconds after which the state counts as never reached. interval: the number of
seconds between two checks, some of which are requests to a server.
"""

import asyncio
import time
from collections.abc import Callable

LIMIT = 30.0
INTERVAL = 0.01


def wait_until(
    condition: Callable[[], object],
    explain: Callable[[], str] = lambda: "the condition never held",
    *,
    limit: float = LIMIT,
    interval: float = INTERVAL,
) -> None:
    """Returns when the condition is true. Raises AssertionError with the explanation if it never
    is."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(interval)


async def wait_until_async(condition: Callable[[], object], *, limit: float = LIMIT) -> None:
    """Like `wait_until`, while the tasks of the event loop run."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(INTERVAL / 5)  # a check is no request
