"""The interpreter's thread switch interval.

Knows: the GIL. Must not know: which threads run.
"""

import sys

# Building a decode step holds the GIL for milliseconds at a time, and so does parsing a long
# request, or a template that never ends; at Python's default of 5 ms the event loop gets each token
# that much later (docs/decisions/engine.md).
SWITCH_INTERVAL = 0.0005


def shorten_switch_interval() -> None:
    """For every process with an event loop beside other threads."""
    sys.setswitchinterval(SWITCH_INTERVAL)
