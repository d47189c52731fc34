"""Settings of a process: the interpreter's switch interval, its garbage collector, its handlers of
signals, the memory that the C library retains.

Knows: the GIL, the collector, glibc. Must not know: the threads, which objects are long-lived.

A full collection visits every container of the process while holding the GIL. A cached prompt has
about 40 containers, most of them layer caches, so a full collection with 10,000 cached prompts
would stop all streams for 0.15 seconds. Therefore, an object that has survived a full collection is
never visited again. It is still freed as soon as nothing refers to it, but not if it becomes part
of a cycle. Requests to a model process leave no cycles behind (after 900 requests, the collector
found 5 objects), but requests to the server process do, so only model processes freeze objects.
"""

import ctypes
import gc
import signal
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# Building a decode step, parsing a long request and rendering a slow template hold the GIL for
# milliseconds at a time. With Python's default interval of 5 ms, each token reaches the event loop
# up to 5 ms later (docs/decisions/engine.md).
SWITCH_INTERVAL = 0.0005

# The number of new containers before a young collection, then for each generation the number of
# collections before the next generation is collected. Python's last number is 10, which lets 70,000
# new containers accumulate. A collection of these takes 28 ms. Python 3.13 increased the first to
# 2,000. Newer versions collect in increments instead, and ignore the last number.
_THRESHOLDS = (700, 10, 2)

# The constants of the mallopt(3) parameters and their values. asyncio reads into buffers of 256
# KiB, and mapping each buffer separately would slow down every request.
_MMAP_THRESHOLD, _ARENA_MAX = (-3, 512 * 1024), (-8, 1)


def shorten_switch_interval() -> None:
    """Shortens the switch interval. Call it in every process that runs an event loop and other
    threads."""
    sys.setswitchinterval(SWITCH_INTERVAL)


@contextmanager
def handle_signals(
    numbers: Iterable[int], handle: Callable[[int, FrameType | None], None]
) -> Generator[None]:
    """Handles these signals while the context is active. Call it on the main thread."""
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def freeze_survivors() -> Generator[None]:
    """Excludes all objects from collections that are alive now or after a full collection. When the
    context exits, all objects are included again, so that the next collection finds all cycles."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    gc.callbacks.append(_freeze_after_full_collection)
    gc.freeze()
    try:
        yield
    finally:
        gc.callbacks.remove(_freeze_after_full_collection)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextmanager
def import_without_collections() -> Generator[None]:
    """Suspends the collector while modules are imported, and excludes all objects that exist at the
    end from later collections. While a server was imported, collections took a tenth of the time
    and freed 1,400 of 79,000 objects."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _freeze_after_full_collection(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


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
