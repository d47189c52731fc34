"""The thread that writes the log.

Knows: logging's queues, file descriptors. Must not know: formats, what anybody logs.

Lines are made where they arise and written here: a pipe that nobody reads, or a terminal in which
somebody pressed Ctrl-S, would stop the event loop otherwise, and with it everybody.
"""

import logging
import os
import select
import threading
from contextvars import Context
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue

# Lines that wait for somebody to read those before them; more are lost, and counted.
_MAX_QUEUED_RECORDS = 4096

# Seconds that lines may take to be written when a process ends.
_FLUSH_TIMEOUT = 1.0


class QueuedLogHandler(QueueHandler):
    """Hands lines to a thread that writes them to a file descriptor. Nobody who logs ever waits."""

    def __init__(self, descriptor: int) -> None:
        # no lock of its own in Python: a signal's handler may come in between, and may flush
        self._records: SimpleQueue[logging.LogRecord] = SimpleQueue()
        super().__init__(self._records)
        self._dropped = 0
        self._listener = _LogWriter(self._records, descriptor)
        self._listener.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        if self._records.qsize() >= _MAX_QUEUED_RECORDS:
            self._dropped += 1
            return
        if self._dropped:
            lost, self._dropped = self._dropped, 0
            # of no request: a formatter asks whose line it is
            self._records.put(Context().run(self.prepare, _make_dropped_record(lost)))
        self._records.put(record)

    def flush(self) -> None:
        self._wait_until_written()

    def close(self) -> None:
        if self._wait_until_written():
            self._listener.stop()
        # else its thread is left where it is: a process that ends does not wait for it
        super().close()

    def _wait_until_written(self) -> bool:
        """Whether all lines until now are, after a while."""
        mark = _FlushMarker()
        self._records.put(mark)
        return mark.reached.wait(_FLUSH_TIMEOUT)


def _make_dropped_record(count: int) -> logging.LogRecord:
    message = "%d log lines were dropped because the output of the log was not read in time"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (count,), None)


class _FlushMarker(logging.LogRecord):
    """No line, but where all lines before it are written."""

    def __init__(self) -> None:
        super().__init__(__name__, logging.DEBUG, __file__, 0, "", None, None)
        self.reached = threading.Event()


class _LogWriter(QueueListener):
    """Writes records to a file descriptor, on the listener's own thread.

    It takes the place of the listener's handlers: `logging` locks every handler while it emits, and
    waits for all these locks when the process ends, which a thread that is blocked on a full pipe
    would never release. For the same reason it does not write to sys.stderr: Python waits for that
    object's lock when the process ends, and aborts.
    """

    def __init__(self, queue: SimpleQueue[logging.LogRecord], descriptor: int) -> None:
        super().__init__(queue)
        self._descriptor = descriptor

    def handle(self, record: logging.LogRecord) -> None:
        if isinstance(record, _FlushMarker):
            record.reached.set()
            return
        left = memoryview(f"{record.getMessage()}\n".encode(errors="backslashreplace"))
        try:
            while left:
                left = left[self._write(left) :]
        except OSError:
            return  # nobody will ever read it, and there is nobody to tell

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # another process that has this file does not want to wait
            select.select([], [self._descriptor], [])
            return 0
