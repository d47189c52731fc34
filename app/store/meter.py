"""How far a download is, told to a person.

Knows: bytes, time, whether there is a terminal. Must not know: where the bytes come from. One line
that is written over and over on a terminal, a line now and then elsewhere.
"""

import sys
import threading
import time
from typing import Self, TextIO

from app.core.amounts import in_bytes, in_time

# seconds between two lines, on a terminal and in a log
_TERMINAL, _LOG = 0.2, 15.0


class Stopped(Exception):
    """Raised where bytes arrive that nobody wants any more."""


class Meter:
    """Counts what many threads have fetched. `stop` ends them all at their next bytes.

    out: where lines go; None is stderr."""

    def __init__(self, total: int, done: int = 0, out: TextIO | None = None) -> None:
        self._total, self._done, self._before = total, done, done
        self._out = out or sys.stderr
        self._live = self._out.isatty()
        self._began = self._told = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def add(self, count: int) -> None:
        """count: bytes, below zero where some are fetched anew. Raises Stopped."""
        if self._stopped.is_set():
            raise Stopped
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._told >= (_TERMINAL if self._live else _LOG):
                self._told = now
                self._tell(now)

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        """The last line, whatever the last one said. None where nothing came."""
        if self._done == self._before:
            return
        with self._lock:
            self._tell(time.monotonic())
            if self._live:
                self._out.write("\n")
                self._out.flush()

    def _tell(self, now: float) -> None:
        speed = max(0, self._done - self._before) / max(now - self._began, 1e-3)
        share = 100 * self._done // max(self._total, 1)
        line = f"{in_bytes(self._done)} of {in_bytes(self._total)} ({share} %), "
        line += f"{in_bytes(speed)}/s"
        left = self._total - self._done
        if left > 0 and speed > 0:
            line += f", {in_time(left / speed)} left"
        # padded, so that nothing of a longer line stays behind
        self._out.write(f"\r{line:<70}" if self._live else f"{line}\n")
        self._out.flush()


class Bar:
    """What huggingface_hub takes for one of its progress bars: it feeds a meter.

    Called with whatever a bar would be made with, of which it needs nothing."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __call__(self, *_: object, **__: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: float | None = 1) -> None:
        self._meter.add(int(count or 0))

    def close(self) -> None:
        pass
