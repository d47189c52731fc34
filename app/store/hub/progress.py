"""Displays the progress of a download.

Knows: bytes, time, the terminal. Must not know: the source of the bytes.

On a terminal, one line is overwritten repeatedly. Otherwise a line is written at intervals.
"""

import sys
import threading
import time
from collections.abc import Mapping
from typing import Protocol, Self, TextIO

from app.core.units import format_bytes, format_duration

# the number of seconds between two updates, on a terminal and in a log
_TERMINAL_INTERVAL, _LOG_INTERVAL = 0.2, 15.0


class DownloadStopped(Exception):
    """Raised when data arrives after the download was stopped."""


class ProgressListener(Protocol):
    """Counts the bytes of a download. Called by all download threads."""

    def add(self, count: int, sha256: str) -> None:
        """Adds bytes of a file. count: negative if bytes must be downloaded again. sha256: the
        digest of the file. Raises DownloadStopped after `stop`."""
        ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


class FileProgress:
    """Counts the bytes of each file, for another thread to read. `begin` sets the sizes and the
    downloaded bytes when the download starts."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._totals: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._shown: dict[str, int] = {}

    def begin(self, files: Mapping[str, tuple[int, int]]) -> None:
        """Starts counting. files: maps digests to total and downloaded bytes."""
        with self._lock:
            self._totals = {sha256: total for sha256, (total, _) in files.items()}
            self._done = {sha256: done for sha256, (_, done) in files.items()}

    def snapshot(self) -> list[tuple[str, int, int]]:
        """Returns the digest, the total bytes and the completed bytes of each file. The completed
        bytes never decrease, even if bytes are downloaded again."""
        with self._lock:
            for sha256, total in self._totals.items():
                done = min(max(self._done[sha256], 0), total)
                self._shown[sha256] = max(self._shown.get(sha256, 0), done)
            return [(sha256, total, self._shown[sha256]) for sha256, total in self._totals.items()]

    def add(self, count: int, sha256: str) -> None:
        if self._stopped.is_set():
            raise DownloadStopped
        with self._lock:
            self._done[sha256] = self._done.get(sha256, 0) + count

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        pass


class DownloadProgress:
    """Counts and displays the bytes received by all threads. After `stop`, each thread ends when it
    next receives data.

    out: the stream for the progress lines; None is stderr.
    """

    def __init__(self, total: int, initial: int = 0, out: TextIO | None = None) -> None:
        self._total, self._done, self._initial = total, initial, initial
        self._out = out or sys.stderr
        self._is_terminal = self._out.isatty()
        self._started_at = self._printed_at = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def add(self, count: int, sha256: str = "") -> None:
        """Adds received bytes. count: the number of bytes; it is negative if bytes must be
        downloaded again. Raises DownloadStopped."""
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
        # the line is padded to overwrite a longer one
        self._out.write(f"\r{line:<70}" if self._is_terminal else f"{line}\n")
        self._out.flush()


class ProgressBarAdapter:
    """Replaces a progress bar of huggingface_hub and updates a listener.

    It accepts all arguments of a progress bar and ignores them. sha256: the digest of the
    file.
    """

    def __init__(self, progress: ProgressListener, sha256: str = "") -> None:
        self._progress = progress
        self._sha256 = sha256

    def __call__(self, *_: object, **__: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: float | None = 1) -> None:
        self._progress.add(int(count or 0), self._sha256)

    def close(self) -> None:
        pass
