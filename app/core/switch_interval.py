"""The interpreter's thread switch interval.

Knows: the GIL. Must not know: which threads run.
"""

import sys

# Building a decode step, parsing a long request and rendering a slow template hold the GIL for
# milliseconds at a time. With Python's default interval of 5 ms, each token reaches the event loop
# up to 5 ms later (docs/decisions/engine.md).
SWITCH_INTERVAL = 0.0005


def shorten_switch_interval() -> None:
    """Shortens the switch interval. Call it in every process that runs an event loop and other
    threads."""
    sys.setswitchinterval(SWITCH_INTERVAL)
