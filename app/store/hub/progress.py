"""Progress display of a download.

Knows: bytes, time, whether the output is a terminal. Must not know: where the bytes come from.

On a terminal one line is overwritten; elsewhere a line is written at intervals.
"""

import sys
import threading
import time
from typing import Self, TextIO

from app.core.units import format_bytes, format_duration

# seconds between two lines, on a terminal and in a log
_TERMINAL_INTERVAL, _LOG_INTERVAL = 0.2, 15.0


class DownloadStopped(Exception):
    """Raised when data arrives after the download was stopped."""


class DownloadProgress:
    """Counts the bytes fetched by all threads. `stop` ends each thread when it next receives data.

    out: where lines are written; None is stderr.
    """

    def __init__(self, total: int, initial: int = 0, out: TextIO | None = None) -> None:
        self._total, self._done, self._initial = total, initial, initial
        self._out = out or sys.stderr
        self._is_terminal = self._out.isatty()
        self._started_at = self._printed_at = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def add(self, count: int) -> None:
        """Adds bytes. count: negative if bytes are fetched again. Raises DownloadStopped."""
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
        """Writes the final line, if any data was received."""
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
        # padded to overwrite a longer line
        self._out.write(f"\r{line:<70}" if self._is_terminal else f"{line}\n")
        self._out.flush()


class ProgressBarAdapter:
    """Takes the place of a progress bar in huggingface_hub and updates a `DownloadProgress`.

    Accepts all arguments of a progress bar and ignores them.
    """

    def __init__(self, progress: DownloadProgress) -> None:
        self._progress = progress

    def __call__(self, *_: object, **__: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: float | None = 1) -> None:
        self._progress.add(int(count or 0))

    def close(self) -> None:
        pass
