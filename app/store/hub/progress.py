"""How far a download is, told to a person.

Knows: bytes, time, whether there is a terminal. Must not know: where the bytes come from. One line
that is written over and over on a terminal, a line now and then elsewhere.
"""

import sys
import threading
import time
from typing import Self, TextIO

from app.core.units import format_bytes, format_duration

# seconds between two lines, on a terminal and in a log
_TERMINAL_INTERVAL, _LOG_INTERVAL = 0.2, 15.0


class DownloadStopped(Exception):
    """Raised where bytes arrive that nobody wants any more."""


class DownloadProgress:
    """Counts what many threads have fetched. `stop` ends them all at their next bytes.

    out: where lines go; None is stderr."""

    def __init__(self, total: int, initial: int = 0, out: TextIO | None = None) -> None:
        self._total, self._done, self._initial = total, initial, initial
        self._out = out or sys.stderr
        self._is_terminal = self._out.isatty()
        self._started_at = self._printed_at = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def add(self, count: int) -> None:
        """count: bytes, below zero where some are fetched anew. Raises Stopped."""
        if self._stopped.is_set():
            raise DownloadStopped
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._printed_at >= (
                _TERMINAL_INTERVAL if self._is_terminal else _LOG_INTERVAL
            ):
                self._printed_at = now
                self._print(now)

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        """The last line, whatever the last one said. None where nothing came."""
        if self._done == self._initial:
            return
        with self._lock:
            self._print(time.monotonic())
            if self._is_terminal:
                self._out.write("\n")
                self._out.flush()

    def _print(self, now: float) -> None:
        speed = max(0, self._done - self._initial) / max(now - self._started_at, 1e-3)
        share = 100 * self._done // max(self._total, 1)
        line = f"{format_bytes(self._done)} of {format_bytes(self._total)} ({share} %), "
        line += f"{format_bytes(speed)}/s"
        left = self._total - self._done
        if left > 0 and speed > 0:
            line += f", {format_duration(left / speed)} left"
        # padded, so that nothing of a longer line stays behind
        self._out.write(f"\r{line:<70}" if self._is_terminal else f"{line}\n")
        self._out.flush()


class ProgressBarAdapter:
    """What huggingface_hub takes for one of its progress bars: it feeds a meter.

    Called with whatever a bar would be made with, of which it needs nothing."""

    def __init__(self, meter: DownloadProgress) -> None:
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
