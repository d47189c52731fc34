"""Displays the progress of a download.

Knows: bytes, time, the terminal. Must not know: the source of the bytes.

On a terminal, one line is overwritten repeatedly, even while no data arrives. Otherwise a line is
written at intervals.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol, Self, TextIO

from app.core.terminal import detect_terminal, draw_bar, erase_line, get_width
from app.core.units import format_bytes, format_duration

# the number of seconds between two updates, on a terminal and in a log
_TERMINAL_INTERVAL, _LOG_INTERVAL = 0.2, 15.0

# the number of seconds over which the displayed rate is averaged
_RATE_WINDOW = 10.0


class DownloadStopped(Exception):
    """Raised when data arrives after the download was stopped."""


class ProgressListener(Protocol):
    """Counts the bytes of a download. Called by all download threads."""

    def add(self, count: int, sha256: str) -> None:
        """Adds bytes of a file. count: negative if bytes must be downloaded again. sha256: the
        digest of the file. Raises DownloadStopped after `stop`."""
        ...

    def add_verified(self, count: int) -> None:
        """Adds bytes whose digest was computed. Raises DownloadStopped after `stop`."""
        ...

    def restart(self, size: int, sha256: str) -> None:
        """Removes the bytes of a file that was received and hashed, but is damaged."""
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

    def add_verified(self, count: int) -> None:
        if self._stopped.is_set():
            raise DownloadStopped

    def restart(self, size: int, sha256: str) -> None:
        self.add(-size, sha256)

    def is_received(self) -> bool:
        """Returns whether the download has begun and all bytes were received, so that only their
        digests are computed."""
        with self._lock:
            return bool(self._totals) and self._done == self._totals

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        pass


class DownloadProgress:
    """Counts and displays the bytes received by all threads, and then the bytes whose digests were
    computed. After `stop`, each thread ends when it next receives or hashes data.

    out: the stream for the progress lines; None is stderr.
    """

    def __init__(self, total: int, initial: int = 0, out: TextIO | None = None) -> None:
        self._total, self._done, self._initial = total, initial, initial
        self._verified = 0
        self._out = out or sys.stderr
        self._can_rewrite = detect_terminal(self._out, os.environ).can_rewrite
        self._printed_at = self._received_at = time.monotonic()
        # (time, bytes), one for each update of the terminal, oldest first
        self._samples = deque([(self._printed_at, initial)])
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._closed = threading.Event()
        if self._can_rewrite:
            threading.Thread(target=self._redraw, name="progress", daemon=True).start()

    def add(self, count: int, sha256: str = "") -> None:
        """Adds received bytes. count: the number of bytes; it is negative if bytes must be
        downloaded again. Raises DownloadStopped."""
        if self._stopped.is_set():
            raise DownloadStopped
        with self._lock:
            self._done += count
            now = self._received_at = time.monotonic()
            if not self._can_rewrite and now - self._printed_at >= _LOG_INTERVAL:
                self._print(now)

    def add_verified(self, count: int) -> None:
        if self._stopped.is_set():
            raise DownloadStopped
        with self._lock:
            self._verified += count

    def restart(self, size: int, sha256: str) -> None:
        self.add(-size, sha256)
        with self._lock:
            self._verified -= size

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        """Writes the final line, if any data was received."""
        self._closed.set()
        with self._lock:
            if self._done != self._initial:
                self._print(self._received_at)
            if self._can_rewrite:
                self._out.write(
                    "\n" if self._done != self._initial else erase_line(self._get_width())
                )
                self._out.flush()

    def _redraw(self) -> None:
        """Updates the terminal until the download ends. Without data, the rate falls to 0."""
        while not self._closed.wait(_TERMINAL_INTERVAL):
            with self._lock:
                if self._closed.is_set():
                    continue
                if 0 < self._total <= self._done:
                    self._print_verified()
                else:
                    self._print(time.monotonic())

    def _print_verified(self) -> None:
        """Shows the share of the hashed bytes, on a terminal. The files were received."""
        share = 100 * self._verified // self._total
        done = f"{format_bytes(self._verified)} of {format_bytes(self._total)} ({share} %)"
        self._rewrite(f"{draw_bar(self._verified, self._total)} verifying {done}")

    def _print(self, now: float) -> None:
        self._printed_at = now
        speed = self._measure_rate(now)
        share = 100 * self._done // max(self._total, 1)
        line = f"{format_bytes(self._done)} of {format_bytes(self._total)} ({share} %), "
        line += f"{format_bytes(speed)}/s"
        remaining = self._total - self._done
        if remaining > 0 and speed > 0:
            line += f", {format_duration(remaining / speed)} left"
        if self._can_rewrite:
            self._rewrite(f"{draw_bar(self._done, self._total)} {line}")
        else:
            self._out.write(f"{line}\n")
            self._out.flush()

    def _rewrite(self, line: str) -> None:
        # a line that fills the terminal would wrap, and could not be erased
        self._out.write(erase_line(self._get_width()) + line[: self._get_width() - 1])
        self._out.flush()

    def _measure_rate(self, now: float) -> float:
        """Returns the bytes per second in the last seconds."""
        while len(self._samples) > 1 and now - self._samples[1][0] >= _RATE_WINDOW:
            self._samples.popleft()
        began, done = self._samples[0]
        self._samples.append((now, self._done))
        return max(0, self._done - done) / max(now - began, 1e-3)

    def _get_width(self) -> int:
        try:
            return get_width(self._out.fileno())
        except OSError:  # a stream without a file descriptor
            return get_width(-1)


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
