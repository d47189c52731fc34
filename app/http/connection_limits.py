"""Connection limits: the maximum number of open connections and eviction, and turns for reading
long request bodies, which limit their share of the event loop's time.

Knows: the state of each connection (without a complete request, active, idle, closing), file
descriptor limits, uvicorn's flow control, time. Must not know: HTTP, the way a connection closes,
the content of bodies.

Log lines that clients can trigger without limit are throttled.

Each byte of a body costs time on the event loop before the request can be authenticated or parsed,
and the loop reads every ready socket in each iteration. Without a limit, a few clients with long
bodies could make each iteration arbitrarily long.
"""

import asyncio
import logging
import math
import resource
import time
from collections import deque
from itertools import chain
from typing import Generic, Protocol, TypeVar

from app.core.settings import MEBIBYTE, Settings
from app.core.usage import CloseReason, ConnectionStats
from app.http.uvicorn_internals import HookedFlowControl

log = logging.getLogger(__name__)

# The limit on bytes discarded after an early response is at least this. A body of up to twice the
# body size limit, which may have been rejected for its size, can always be discarded.
_MIN_DISCARD_BYTES = 32 * MEBIBYTE

# The number of seconds between two log lines about the same event.
_LOG_INTERVAL = 60.0

# File descriptors reserved for other uses: models, child processes, logs.
_RESERVED_FDS = 256

# The number of closing connections allowed beyond the limit, so that their clients can still read
# the error response.
_MAX_CLOSING = 64

# The burst allowance after a pause, in seconds of work. Event loop timers fire up to a millisecond
# late, so short work items would otherwise get less than their share.
_BURST_SECONDS = 0.002

# The number of bytes of each body that are read without scheduling. Most bodies are shorter.
UNSCHEDULED_BYTES = 16 * 1024

# Reading 8 KiB takes 0.03 ms here, and another 0.03 ms outside of the measured code. This limits
# reading to 50 MB/s.
_LOOP_SHARE = 0.2


class LoopTimeBudget:
    """Limits one type of work to `share` of the time, except for short bursts. Before each work
    item, wait for `delay_seconds`; after it, call `consume`."""

    def __init__(self, share: float) -> None:
        assert 0 < share <= 1
        self._share = share
        self._available_at = 0.0

    @property
    def delay_seconds(self) -> float:
        """Returns the number of seconds until more work is allowed; 0 means now."""
        return max(0.0, self._available_at - time.monotonic())

    def consume(self, seconds: float) -> None:
        """Counts work that took this many seconds."""
        earliest = time.monotonic() - seconds - _BURST_SECONDS / self._share
        self._available_at = max(self._available_at, earliest) + seconds / self._share


class ScheduledFlowControl(HookedFlowControl):
    """uvicorn's flow control, extended to pause reading while it is another connection's turn."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._held = self._transport_paused = False

    def pause_reading(self) -> None:
        self.read_paused = True
        self._update_transport()

    def resume_reading(self) -> None:
        self.read_paused = False
        self._update_transport()

    def hold_reading(self) -> None:
        self._held = True
        self._update_transport()

    def release_reading(self) -> None:
        self._held = False
        self._update_transport()

    def _update_transport(self) -> None:
        stop = self._held or self.read_paused
        if stop != self._transport_paused:
            self._transport_paused = stop
            if stop:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()


class BodyReadScheduler:
    """The connections of one server that read long bodies, in FIFO order."""

    def __init__(self) -> None:
        self._share = LoopTimeBudget(_LOOP_SHARE)
        self._queue: deque[ScheduledFlowControl] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def enqueue(self, flow: ScheduledFlowControl, seconds: float) -> None:
        """Queues a connection for its next read. seconds: the duration of the last read."""
        self._share.consume(seconds)
        flow.hold_reading()
        self._queue.append(flow)
        self._schedule()

    def remove(self, flow: ScheduledFlowControl) -> None:
        """Removes a connection that is closed or has finished its body."""
        if flow in self._queue:
            self._queue.remove(flow)
            flow.release_reading()

    def _schedule(self) -> None:
        if self._timer is None and self._queue:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._share.delay_seconds, self._release_next)

    def _release_next(self) -> None:
        """Resumes the next connection. The loop reads from it in its next iteration, before it
        checks timers again."""
        self._timer = None
        if not self._share.delay_seconds and self._queue:
            self._queue.popleft().release_reading()
        self._schedule()


class EvictableConnection(Protocol):
    """The interface of a connection that can be evicted."""

    def evict(self, *, notify: bool) -> None:
        """Closes the connection gracefully. notify: whether to send an error response, even if
        there is no request."""
        ...

    def abort(self) -> None: ...


class ConnectionLimiter:
    """Enforces the connection limits of one server. settings: the limits."""

    def __init__(self, settings: Settings, traffic: ConnectionStats) -> None:
        self.table = ConnectionTable[EvictableConnection](settings.max_connections)
        self._set_limits(settings)
        self.body_reads = BodyReadScheduler()
        self.traffic = traffic
        self._invalid_requests = LogThrottle()

    def apply(self, settings: Settings) -> None:
        """Applies new limits, to phases of connections that begin from now on."""
        self.table.max_connections = settings.max_connections
        self.raise_fd_limit()
        self._set_limits(settings)

    def raise_fd_limit(self) -> None:
        """Raises the file descriptor limit of the process for the connections, or else lowers the
        number of connections."""
        fewer = raise_fd_limit(self.table.max_connections)
        if fewer is not None:
            self.table.max_connections = fewer

    def _set_limits(self, settings: Settings) -> None:
        self.header_timeout = settings.header_timeout
        self.body_timeout = settings.body_timeout
        self.max_discard_bytes = max(_MIN_DISCARD_BYTES, 2 * settings.max_body)

    def add(self, connection: EvictableConnection) -> None:
        """Adds a connection. May evict another connection, or the new one."""
        self.traffic.accepted_connections += 1
        evicted = self.table.add(connection)
        if evicted is not None:
            self.count_rejected("too_many_connections")
            evicted.evict(notify=evicted is connection)
        late = self.table.pop_overdue()
        if late is not None:
            late.abort()
        self.traffic.open_connections = len(self.table)

    def remove(self, connection: EvictableConnection) -> None:
        """Removes a connection whose socket is closed. May be called again."""
        self.table.remove(connection)
        self.traffic.open_connections = len(self.table)

    def count_rejected(self, reason: CloseReason) -> None:
        self.traffic.closed_by_reason[reason] += 1

    def log_invalid_request(self, client: tuple[str, int] | None, reason: str) -> None:
        """Logs a request that could not be parsed. client: the address and port. reason: the parse
        error, which may contain data from the client."""
        times = self._invalid_requests.record(time.monotonic())
        address = "an unknown address" if client is None else client[0]
        if times == 1:
            log.warning("rejected a request from %s: %s", address, reason)
        elif times:
            log.warning("rejected %d requests; the last one, from %s: %s", times, address, reason)


class LogThrottle:
    """Throttles a log message: logs the first occurrence and then at most one line per interval."""

    def __init__(self) -> None:
        self._logged_at = -math.inf
        self._occurrences = 0

    def record(self, now: float) -> int:
        """Returns the number of occurrences since the last log line, including this one. Returns 0
        if nothing must be logged now. now: the monotonic time in seconds."""
        self._occurrences += 1
        if now - self._logged_at < _LOG_INTERVAL:
            return 0
        times, self._occurrences, self._logged_at = self._occurrences, 0, now
        return times


Member = TypeVar("Member")


def raise_fd_limit(connections: int) -> int | None:
    """Raises the process's file descriptor limit for this many connections. The default limit on
    macOS is 256. Returns None if the new limit is sufficient. Otherwise, returns the number of
    client sockets that may be open at the same time. At least half of the descriptors are reserved
    for other uses: each accepted request needs one more descriptor to reach its model, and modules,
    templates and pipes need some as well."""
    required = connections + _RESERVED_FDS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= required:
        return None
    allowed = required if hard == resource.RLIM_INFINITY else min(required, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    if allowed >= required:
        return None
    fewer = max(1, allowed - min(_RESERVED_FDS, allowed // 2))
    log.warning(
        "%d connections need up to %d file descriptors, but the limit is %d: accepting at most %d "
        "connections; raise the limit (ulimit -n) or lower --max-connections",
        connections,
        required,
        allowed,
        fewer,
    )
    return fewer


class ConnectionTable(Generic[Member]):
    """The connections of one server in three queues, oldest first: connections that have not sent a
    complete request yet, idle connections, and closing connections whose socket is still open.
    Connections with an active request are in none of them."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._open: set[Member] = set()
        self._awaiting_request: dict[Member, None] = {}
        self._idle: dict[Member, None] = {}
        self._closing: dict[Member, None] = {}
        self._limit_warnings = LogThrottle()

    def __len__(self) -> int:
        return len(self._open) + len(self._closing)

    def add(self, connection: Member) -> Member | None:
        """Adds a connection. Returns the connection to evict, which may be the new one, or None."""
        evicted = None
        if len(self._open) >= self.max_connections:
            self._warn_limit_reached()
            evicted = next(chain(self._awaiting_request, self._idle), connection)
        self._open.add(connection)
        self._awaiting_request[connection] = None
        return evicted

    def pop_overdue(self) -> Member | None:
        """Removes and returns the oldest closing connection if too many are open, otherwise None.
        The caller must abort the returned connection. This method is called after each `add`, so
        the number of open connections never exceeds `max_connections` by more than a few."""
        if len(self) <= self.max_connections + _MAX_CLOSING or not self._closing:
            return None
        first = next(iter(self._closing))
        del self._closing[first]
        return first

    def mark_waiting(self, connection: Member) -> None:
        """Marks a connection as waiting for a request, if it is not waiting already."""
        if connection in self._open and connection not in self._awaiting_request:
            self._idle.setdefault(connection)

    def mark_active(self, connection: Member) -> None:
        """Marks a connection as having sent a complete request."""
        self._awaiting_request.pop(connection, None)
        self._idle.pop(connection, None)

    def mark_closing(self, connection: Member) -> None:
        """Marks a connection as closing, because it was evicted or is closing on its own."""
        if connection in self._open:
            self._remove_open(connection)
            self._closing[connection] = None

    def remove(self, connection: Member) -> None:
        """Removes a connection whose socket is closed."""
        self._remove_open(connection)
        self._closing.pop(connection, None)

    def _remove_open(self, connection: Member) -> None:
        self._open.discard(connection)
        self.mark_active(connection)

    def _warn_limit_reached(self) -> None:
        if self._limit_warnings.record(time.monotonic()):
            log.warning(
                "connection limit reached (%d, --max-connections): each new connection closes an "
                "existing one without a request in flight, if there is one",
                len(self._open),
            )
