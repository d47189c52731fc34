"""An HTTP connection: timeouts for each phase, rejections, and closing without losing a response.

Knows: uvicorn's protocol on h11, the limits on headers and chunks, transports, timers. Must not
know: routes, keys, responses, TLS.

The phases of a connection and their timeouts:

    accepted ──▶ head ──▶ body ──▶ response ──▶ idle ──first byte──▶ head …
    header_timeout ┘ body_timeout ┘   uvicorn's keep-alive ┘

If a response is sent before its request is complete (401, 404, 413), the connection enters the
phase `rest`. The remaining body is read and discarded, because closing immediately would reset the
connection and lose the response (RFC 9112, 9.6). If no further response may be sent, or if this
module rejected the request, the connection enters the phase `leaving`. Its sending side is then
closed, and incoming data is discarded. Many clients read the response only after they have sent
everything, so both phases last as long as the client keeps sending, up to body_timeout and a limit
on the bytes.

Write stalls: when a client reads its response slowly, the data waits in the kernel's send buffer,
which grows to 4 MB on Linux. asyncio is notified only when a third of this buffer is free, which
takes longer than 20 s at 57 kB/s. Bytes in this buffer therefore count as unsent. The count
decreases whenever the client acknowledges data, so progress is visible as soon as the client reads.
"""

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal, NamedTuple, cast

import h11
from starlette.responses import Response
from uvicorn import Config

from app.core.errors import AppError, ErrorKind
from app.core.usage import CloseReason
from app.http.body import EXTEND_BODY
from app.http.connection_limits import UNSCHEDULED_BYTES, ConnectionLimiter, ScheduledFlowControl
from app.http.request_id import RequestIdMiddleware, build_id_headers, new_request_id
from app.http.responses import error_response
from app.http.uvicorn_internals import (
    CLOSE_HEADER,
    HookedH11Protocol,
    RequestResponseCycle,
    ServerState,
    get_buffer_size_below_tls,
)

# The limits on the total size of the request line and header fields, and on the number of fields.
# Nginx allows 32 KiB and Node 16 KiB. h11 does not limit the number of fields.
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADER_FIELDS = 128

# Up to this number of chunks, chunks may have any size. Beyond it, their average size must be at
# least this many bytes. h11 takes 4 microseconds for each: without this limit, six clients that
# send chunks of one byte delay every other request by 0.7 s.
_MAX_SMALL_CHUNKS, _MIN_MEAN_CHUNK_BYTES = 1024, 128

# The field that h11 adds to the head of a response whose body is sent in chunks, in lower case.
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"

# The maximum number of characters of a parse error in a message.
_MAX_ERROR_CHARS = 200

# The minimum progress, in bytes read by the client, that restarts the stall timer; and in discarded
# bytes, that restarts the timer of their phase.
_MIN_PROGRESS_BYTES = 16 * 1024

# the getsockopt option for the number of bytes in a send buffer on macOS, from <sys/socket.h>;
# Python's socket module does not have it
_SO_NWRITE = 0x1024

# The maximum number of bytes read in one iteration of the event loop. h11 takes 4 microseconds for
# a chunk of one byte, so asyncio's buffer of 256 KiB could block the loop for 0.2 s.
_READ_BYTES = 8 * 1024

# How long the rest of a request is discarded after an early response, and how long a client may
# take to read a rejection, in seconds, if the client sends nothing.
_DISCARD_SECONDS, _LINGER_SECONDS = 5.0, 2.0

# How long after the start of a shutdown requests in transit are still handled, in seconds.
_SHUTDOWN_GRACE_SECONDS = 0.05
SHUTDOWN_MESSAGE = "the server is shutting down: try again in a moment"
_CLOSE_HEADERS = {"Connection": "close"}

ConnectionPhase = Literal["head", "body", "rest", "leaving"]

_TIMEOUT_REASONS: Mapping[ConnectionPhase | None, CloseReason] = {
    "head": "head_timeout",
    "body": "body_timeout",
}


class ParseFailure(NamedTuple):
    """The reason why a request could not be parsed, and the HTTP status code."""

    error: AppError
    status: int


class LimitedH11Connection(h11.Connection):
    """The server side of a connection, with limits. h11 itself limits the size of the headers only
    while they are incomplete, and does not limit the number of fields or chunks.

    method: the method of the last request. failure: the reason why parsing has stopped. It is
    stored here because uvicorn logs a warning for every h11 error.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.method = b""
        self.failure: ParseFailure | None = None
        self._chunks = self._body_bytes = 0
        self._sends_chunks = False  # whether the body of the current response is sent in chunks

    def send(self, event: h11.Event) -> bytes | None:  # pyright: ignore[reportIncompatibleMethodOverride]  # without h11's overloads
        """Serializes an event. A chunk of a response body changes no state, so h11's state machine,
        which takes as long as writing to the socket, is skipped."""
        if (
            self._sends_chunks
            and isinstance(event, h11.Data)
            and event.data  # an empty chunk would end the body
            and self.our_state is h11.SEND_BODY
        ):
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        serialized = super().send(event)
        if isinstance(event, h11.Response) and serialized is not None:
            self._sends_chunks = self.method != b"HEAD" and _CHUNKED in serialized.lower()
        return serialized

    def next_event(
        self,
    ) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check_head(event)
            if isinstance(event, h11.Data):
                self._check_chunk(event)
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
            code = "request_header_fields_too_large" if status == 431 else "invalid_http"
            # h11 repeats the client's input without a length limit, in Python's notation
            reason, _, _ = str(error).partition(": bytearray(")
            why = f"invalid HTTP request: {reason[:_MAX_ERROR_CHARS]}"
            self.failure = ParseFailure(AppError(ErrorKind.INVALID, why, code=code), status)
            return h11.NEED_DATA
        return event

    def serialize_response(
        self, response: Response, extra_headers: Sequence[tuple[bytes, bytes]]
    ) -> bytes:
        """Serializes a complete response, if no response has started. extra_headers: additional
        header fields."""
        status = response.status_code
        reason = HTTPStatus(status).phrase.encode()
        headers = [*extra_headers, *response.raw_headers]
        head = h11.Response(status_code=status, headers=headers, reason=reason)
        body = b"" if self.method == b"HEAD" else bytes(response.body)
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        return b"".join(self.send(event) or b"" for event in events)

    def _check_head(self, head: h11.Request) -> None:
        self.method = head.method
        self._chunks = self._body_bytes = 0
        fields = head.headers.raw_items()
        # includes the colon, the space and the line ending of each field
        size = len(head.target) + sum(len(name) + len(value) + 4 for name, value in fields)
        if len(fields) > MAX_HEADER_FIELDS or size > MAX_HEAD_BYTES:
            raise h11.RemoteProtocolError(
                f"the request has {len(fields)} header fields and {size} bytes of headers, but the "
                f"limits are {MAX_HEADER_FIELDS} and {MAX_HEAD_BYTES}",
                error_status_hint=431,
            )

        if not head.http_version.startswith(b"1."):
            raise h11.RemoteProtocolError(
                f"HTTP/{head.http_version.decode()} is not supported: use HTTP/1.1",
                error_status_hint=505,
            )
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in head.headers}:
            # a proxy may have used the other header (RFC 9112, 6.1)
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding are present")

    def _check_chunk(self, data: h11.Data) -> None:
        self._chunks += data.chunk_start
        self._body_bytes += len(data.data)
        small = self._body_bytes < self._chunks * _MIN_MEAN_CHUNK_BYTES
        if self._chunks > _MAX_SMALL_CHUNKS and small:
            raise h11.RemoteProtocolError(
                f"the body has {self._chunks} chunks of less than {_MIN_MEAN_CHUNK_BYTES} bytes on "
                "average: send larger chunks"
            )


def get_unacked_bytes(transport: asyncio.BaseTransport) -> int:
    """Returns the number of bytes in the kernel's send buffer that the peer has not acknowledged.
    Returns 0 if the number is unknown or the socket is closed."""
    below: socket.socket | None = transport.get_extra_info("socket")
    if below is None:
        return 0
    with contextlib.suppress(OSError, ValueError):
        if sys.platform == "darwin":
            return below.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        (count,) = struct.unpack("i", fcntl.ioctl(below.fileno(), termios.TIOCOUTQ, bytes(4)))
        return int(count)
    return 0


class WriteStallTimer:
    """Detects clients that do not read their response. Such clients hold memory and a connection.

    seconds: the time without progress after which `on_stall` is called, once. get_unsent: returns
    the number of unsent bytes in this process and in the kernel.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        get_unsent: Callable[[], int],
        on_stall: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._get_unsent = get_unsent
        self._on_stall = on_stall
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts the timer. Call this when data could not be sent immediately."""
        self.stop()
        self._timer = self._loop.call_later(self._seconds, self._check_progress, self._get_unsent())

    def stop(self) -> None:
        """Stops the timer. Call this when all data was sent or no more data will be sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_progress(self, before: int) -> None:
        if self._get_unsent() <= before - _MIN_PROGRESS_BYTES:
            self.start()
        else:
            self._timer = None
            self._on_stall()


class ResponseTransport(asyncio.Transport):
    """The transport given to uvicorn. uvicorn closes it after the last response. If the request was
    not fully read, closing the socket would reset the connection and lose the response. The
    connection therefore decides how to close it."""

    def __init__(self, connection: "Connection") -> None:
        super().__init__()
        self._connection = connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.closing

    def close(self) -> None:
        self._connection.close_after_response()


class PhaseTimer:
    """A timer for the current phase. phase: the current phase. on_expire: called when the phase
    times out, while `phase` is still set."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expire: Callable[[], None]) -> None:
        self._loop = loop
        self._on_expire = on_expire
        self._timer: asyncio.TimerHandle | None = None
        self.phase: ConnectionPhase | None = None

    def start(self, phase: ConnectionPhase, seconds: float) -> None:
        """Starts a phase. Starting the current phase again does not extend its timeout."""
        if phase != self.phase:
            self.stop()
            self.phase = phase
            self._timer = self._loop.call_later(seconds, self._on_expire)

    def stop(self) -> None:
        self.phase = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Connection(HookedH11Protocol, asyncio.BufferedProtocol):
    """A client connection. All methods run on the event loop."""

    conn: LimitedH11Connection
    flow: ScheduledFlowControl

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        limiter: ConnectionLimiter,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self.conn = LimitedH11Connection()
        self._limiter = limiter
        self._response_transport = ResponseTransport(self)
        self._write_stall = WriteStallTimer(
            loop,
            limiter.body_timeout,
            self._count_unsent,
            self._on_write_stall,
        )
        self._phase_timer = PhaseTimer(loop, self._on_phase_timeout)
        self._buffer = bytearray()
        self._body_bytes = 0  # number of bytes received since the last complete request
        self._discarded_bytes = self._discarded_before = 0
        self._discard_deadline = 0.0
        # finished: no further response is sent. close_when_drained: close after all data is sent
        self._shutting_down = self._finished = self._close_when_drained = False

    # Called by asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as uvicorn narrows it
        super().connection_made(transport)
        self.flow = ScheduledFlowControl(transport)  # pyright: ignore[reportIncompatibleVariableOverride]  # narrower
        # Call `pause_writing` as soon as data is unsent. 0 would mean always on a TLS transport.
        transport.set_write_buffer_limits(high=1)
        self._phase_timer.start("head", self._limiter.header_timeout)
        self._limiter.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.remove(self)
        self._limiter.body_reads.remove(self.flow)
        self._phase_timer.stop()
        self._write_stall.stop()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        self._buffer = bytearray(_READ_BYTES)
        # TLS fills the buffer through slices, and slicing a bytearray would copy it
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        data, self._buffer = bytes(memoryview(self._buffer)[:nbytes]), bytearray()
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        began = time.monotonic()
        self._feed(data)
        reading = self._finished or self.conn.their_state is h11.SEND_BODY
        self._body_bytes = self._body_bytes + len(data) if reading else 0
        if self._body_bytes > UNSCHEDULED_BYTES and not self.closing:
            self._limiter.body_reads.enqueue(self.flow, time.monotonic() - began)

    def _feed(self, data: bytes) -> None:
        unwanted = self._finished or self._phase_timer.phase == "rest"
        self._discarded_bytes = self._discarded_bytes + len(data) if unwanted else 0
        if self._discarded_bytes > self._limiter.max_discard_bytes:
            self.abort()
        elif not self._finished:
            super().data_received(data)
            self._update_phase()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_stall.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_stall.stop()
        if self._close_when_drained:
            self.transport.close()

    # Called by uvicorn

    def handle_events(self) -> None:
        super().handle_events()
        if self._handling_request:
            self.cycle.transport = self._response_transport
            extensions = cast(dict[str, Any], self.scope).setdefault("extensions", {})
            extensions[EXTEND_BODY] = self._extend_body
        if self.conn.failure is not None:
            error, status = self.conn.failure
            self._limiter.log_invalid_request(self.client, error.message)
            self._limiter.count_rejected("head_too_large" if status == 431 else "invalid_http")
            self._reject(error_response(error, status=status))

    def on_response_complete(self) -> None:
        if not self._finished:
            super().on_response_complete()
            self._update_phase()

    def timeout_keep_alive_handler(self) -> None:
        if not self.closing:
            self._close()

    def shutdown(self) -> None:
        """Closes the connection after the current response, without accepting another request. May
        be called again."""
        if self._shutting_down:
            return
        self._shutting_down = True
        if self._finished:
            return
        stopping = error_response(
            AppError(ErrorKind.STOPPING, SHUTDOWN_MESSAGE), headers=_CLOSE_HEADERS
        )
        self.app = RequestIdMiddleware(stopping, self._limiter.traffic)
        if self._handling_request:
            self.cycle.keep_alive = False
            if not self.cycle.response_started:
                self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]
        else:
            # the socket may already hold a request
            self.loop.call_later(_SHUTDOWN_GRACE_SECONDS, self._close_for_shutdown)

    # Called by the server, other connections and `ResponseTransport`

    def evict(self, *, notify: bool) -> None:
        if not notify and not self._request_begun:
            self._close()
        else:
            message = "too many connections are open: try again in a moment"
            error = AppError(ErrorKind.BUSY, message, code="too_many_connections")
            self._reject(error_response(error, status=503))

    def abort(self) -> None:
        self._mark_finished()
        self.transport.abort()

    def close_after_response(self) -> None:
        """Closes the connection after the last response was sent or aborted."""
        if self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self._linger_close(_DISCARD_SECONDS)
        else:
            self._close()

    @property
    def closing(self) -> bool:
        return self._finished or self.transport.is_closing()

    # Internal

    @property
    def _handling_request(self) -> bool:
        """Whether the application is handling a request."""
        cycle = cast(RequestResponseCycle | None, self.cycle)  # uvicorn's annotation omits None
        return cycle is not None and not cycle.response_complete

    @property
    def _request_begun(self) -> bool:
        """Whether a request has been received in part, but not completely."""
        return self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])

    def _update_phase(self) -> None:
        """Determines the current phase and starts its timer."""
        if self.closing:
            return
        client_state = self.conn.their_state
        if client_state is h11.IDLE:
            self._limiter.table.mark_waiting(self)
            if self._shutting_down and not self._request_begun:
                self._close()
                return
            # before the first byte, uvicorn's keep-alive timer applies, unless it was stopped
            if self._request_begun or self.timeout_keep_alive_task is None:
                self._phase_timer.start("head", self._limiter.header_timeout)
            else:
                self._phase_timer.stop()
        elif client_state is not h11.SEND_BODY:
            self._limiter.table.mark_active(self)
            self._phase_timer.stop()
        elif self._handling_request:
            self._phase_timer.start("body", self._limiter.body_timeout)
        else:
            self._start_discarding("rest", _DISCARD_SECONDS)

    def _start_discarding(self, phase: Literal["rest", "leaving"], seconds: float) -> None:
        if self._phase_timer.phase != phase:
            self._discarded_before = self._discarded_bytes
            self._discard_deadline = self.loop.time() + self._limiter.body_timeout
        self._phase_timer.start(phase, seconds)

    def _keeps_sending(self) -> bool:
        """Returns whether the client has sent enough since the last call, or since the start of the
        phase, to continue discarding."""
        received = self._discarded_bytes - self._discarded_before
        self._discarded_before = self._discarded_bytes
        in_time = self.loop.time() < self._discard_deadline and not self._shutting_down
        return in_time and received >= _MIN_PROGRESS_BYTES

    def _extend_body(self) -> None:
        """Restarts the body timeout, because an administrator's upload may take longer."""
        if self._phase_timer.phase == "body":
            self._phase_timer.stop()
            self._phase_timer.start("body", self._limiter.body_timeout)

    def _on_phase_timeout(self) -> None:
        phase = self._phase_timer.phase
        if phase in _TIMEOUT_REASONS:
            self._limiter.count_rejected(_TIMEOUT_REASONS[phase])
        if phase in ("head", "body") and self._request_begun:
            seconds = (
                self._limiter.header_timeout if phase == "head" else self._limiter.body_timeout
            )
            message = f"timed out reading the request {phase} ({seconds:g} s)"
            self._reject(error_response(AppError(ErrorKind.REQUEST_TIMEOUT, message)))
        elif phase == "head":
            self._close()
        elif phase in ("rest", "leaving") and self._keeps_sending():
            self._phase_timer.stop()
            self._phase_timer.start(phase, _DISCARD_SECONDS)
        else:
            self.abort()

    def _close_for_shutdown(self) -> None:
        if self.closing or self._handling_request or self._phase_timer.phase == "rest":
            return
        if self._request_begun:
            self._reject(error_response(AppError(ErrorKind.STOPPING, SHUTDOWN_MESSAGE)))
        else:
            self._close()

    def _reject(self, response: Response) -> None:
        """Sends a response in place of the application if none has started, and closes the
        connection."""
        if self._handling_request:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state is h11.SEND_BODY:
            self.abort()
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response.headers.update({**build_id_headers(new_request_id()), **_CLOSE_HEADERS})
            self.transport.write(
                self.conn.serialize_response(response, self.server_state.default_headers)
            )
        self._linger_close(_LINGER_SECONDS)

    def _linger_close(self, seconds: float) -> None:
        """Closes the sending side, and discards incoming data while the client reads."""
        self._mark_finished()
        self._start_discarding("leaving", seconds)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            try:
                self.transport.write_eof()
            except OSError:  # the socket is already closed, but this was not reported yet
                self.abort()

    def _close(self) -> None:
        self._mark_finished()
        # closing TLS applies a single timeout to all unsent data, so drain the data first
        if self.flow.write_paused:
            self._close_when_drained = True
        else:
            self.transport.close()

    def _mark_finished(self) -> None:
        self._finished = True
        self._limiter.table.mark_closing(self)
        if self.timeout_keep_alive_task is not None:
            self.stop_keep_alive_timer()
        self._phase_timer.stop()

    def _count_unsent(self) -> int:
        """Returns the number of bytes that the client has not acknowledged."""
        buffered = self.transport.get_write_buffer_size()
        below = get_buffer_size_below_tls(self.transport)
        return buffered + below + get_unacked_bytes(self.transport)

    def _on_write_stall(self) -> None:
        self._limiter.count_rejected("unread_answer")
        self.abort()
