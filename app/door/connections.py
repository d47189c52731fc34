"""One HTTP connection: how long each part of a request may take, and how a client is left.

Knows: uvicorn's protocol on h11, transports, timers. Must not know: routes, keys, what is answered.

What a connection waits for, and what ends the wait:

    accepted ─handshake─▶ head ─▶ body ─▶ answer ─▶ idle ─first byte─▶ head …
       header_timeout ┘      ┘       ┘ body_timeout    ┘ uvicorn's keep-alive

An answer that came before its request was whole (401, 404, 413) is followed by `rest`: what is left
of the body is thrown away for a while, since closing at once would reset the connection and with it
the answer (RFC 9112, 9.6). Where nothing may follow it, or where the refusal is our own, the
connection is `leaving`: it is closed in one direction, and thrown away is what comes in the other.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Literal, cast

import h11
from starlette.responses import Response
from uvicorn import Config
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.api.request_id import HEADER, RequestIds, new_id
from app.api.wire import problem_reply
from app.core.errors import AppError, Kind
from app.core.traffic import Reason
from app.door.body_reads import FREE, ReadingFlow
from app.door.hall import Hall
from app.door.outlet import Outlet
from app.door.pieces import Pieces
from app.door.strict import StrictConnection
from app.door.unread import Unread, queued
from app.door.waiting import Waiting

# Seconds in which the rest of a request that was answered is read and thrown away, and in which a
# client that was refused here may read why.
_REST_SECONDS, _LEAVING_SECONDS = 5.0, 2.0

# Seconds in which a request that was under way when the server began to stop is still answered.
_LAST_LOOK = 0.05
STOPPING = "the server is shutting down: try again in a moment"
_CLOSE = {"Connection": "close"}

Waits = Literal["handshake", "head", "body", "rest", "leaving"]

_TOO_LATE: Mapping[Waits | None, Reason] = {
    "handshake": "handshake_timeout",
    "head": "head_timeout",
    "body": "body_timeout",
}


class Connection(H11Protocol, Pieces):
    """One client's. Everything here runs on the event loop."""

    conn: StrictConnection

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        hall: Hall,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self.conn = StrictConnection()
        self._hall = hall
        self._out = Outlet(self)
        self._unread = Unread(
            loop,
            hall.body_timeout,
            lambda: self._unsent() + queued(self.transport),
            self._give_up_reader,
        )
        self._below: asyncio.Transport | None = None
        self._waiting = Waiting[Waits](loop, self._expire)
        self._reading: ReadingFlow | None = None  # while it reads HTTP
        self._thrown_away = 0
        self._body_read = 0  # bytes that came since the last request was whole
        # left: nothing more is answered here. closes: as soon as all is out
        self._stops = self._left = self._closes = False

    # What asyncio calls, or `Handshake` in its place

    def begin(self, transport: asyncio.Transport) -> None:
        self.transport = self._below = transport
        self._waiting.begin("handshake", self._hall.header_timeout)
        self._hall.enter(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as uvicorn narrows it
        super().connection_made(transport)
        self.flow = self._reading = ReadingFlow(transport)
        # `pause_writing` as soon as one byte does not go out. TLS takes 0 to mean always.
        transport.set_write_buffer_limits(high=0 if self._below is None else 1)
        self._waiting.begin("head", self._hall.header_timeout)
        if self._below is None:
            self._hall.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone()
        super().connection_lost(exc)

    def gone(self) -> None:
        self._hall.leave(self)
        if self._reading is not None:
            self._hall.body_reads.remove(self._reading)
        self._waiting.end()
        self._unread.stop()

    def data_received(self, data: bytes) -> None:
        began = time.monotonic()
        self._read(data)
        self._body_read = self._body_read + len(data) if self._reads_body else 0
        if self._body_read > FREE and self._reading is not None and not self.parted:
            self._hall.body_reads.queue(self._reading, time.monotonic() - began)

    def _read(self, data: bytes) -> None:
        unwanted = self._left or self._waiting.what == "rest"
        self._thrown_away = self._thrown_away + len(data) if unwanted else 0
        if self._thrown_away > self._hall.rest:
            self.cut()
        elif not self._left:
            super().data_received(data)
            self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._below is None:
            self.stuck()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._below is None:
            self.flows()

    def stuck(self) -> None:
        self._unread.watch()

    def flows(self) -> None:
        self._unread.stop()
        if self._closes:
            self.transport.close()

    # What uvicorn calls

    def handle_events(self) -> None:
        super().handle_events()
        if self._answering:
            self.cycle.transport = self._out
        if self.conn.fault is not None:
            error, status = self.conn.fault
            self._hall.invalid(self.client, error.message)
            self._hall.turned_away("head_too_large" if status == 431 else "invalid_http")
            self._refuse(problem_reply(error, status=status))

    def on_response_complete(self) -> None:
        if not self._left:
            super().on_response_complete()
            self._look()

    def timeout_keep_alive_handler(self) -> None:
        if not self.parted:
            self._close()

    def _unsupported_upgrade_warning(self) -> None:
        """Java's client asks for HTTP/2 with each first request, and gets its answer by HTTP/1.1:
        nothing that would be worth two lines in the log."""

    def shutdown(self) -> None:
        """Finish what is being answered, answer nothing else, and close. May be called again."""
        if self._stops or self._left:
            return
        self._stops = True
        stopping = problem_reply(AppError(Kind.STOPPING, STOPPING), headers=_CLOSE)
        self.app = RequestIds(stopping, self._hall.traffic)
        if self._answering:
            self.cycle.keep_alive = False
            if not self.cycle.response_started:
                self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]
        else:
            # a request may lie in the socket already
            self.loop.call_later(_LAST_LOOK, self._hang_up)

    # What the server, other connections and `Outlet` call

    def give_way(self, *, tell: bool) -> None:
        if self._waiting.what == "handshake":
            self.cut()
        elif not tell and not self._begun:
            self._close()
        else:
            message = "too many connections are open: try again in a moment"
            told = AppError(Kind.BUSY, message, code="too_many_connections")
            self._refuse(problem_reply(told, status=503))

    def cut(self) -> None:
        self._take_leave()
        self.transport.abort()

    def part(self) -> None:
        """An answer is out, or broke off, after which there is none."""
        if self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self._leave(_REST_SECONDS)
        else:
            self._close()

    @property
    def parted(self) -> bool:
        return self._left or self.transport.is_closing()

    # Ours

    @property
    def _answering(self) -> bool:
        """Whether a request is with the application."""
        cycle = cast(RequestResponseCycle | None, self.cycle)  # uvicorn's own type says less
        return cycle is not None and not cycle.response_complete

    @property
    def _reads_body(self) -> bool:
        return self._left or self.conn.their_state is h11.SEND_BODY

    @property
    def _begun(self) -> bool:
        """Whether some of a request came, but not all of it."""
        return self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])

    def _look(self) -> None:
        """What does it wait for now?"""
        if self.parted:
            return
        theirs = self.conn.their_state
        if theirs is h11.IDLE:
            self._hall.crowd.wait(self)
            if self._stops and not self._begun:
                self._close()
                return
            # before the first byte uvicorn's keep-alive counts, unless something stopped it
            if self._begun or self.timeout_keep_alive_task is None:
                self._waiting.begin("head", self._hall.header_timeout)
            else:
                self._waiting.end()
        elif theirs is not h11.SEND_BODY:
            self._hall.crowd.heard(self)
            self._waiting.end()
        elif self._answering:
            self._waiting.begin("body", self._hall.body_timeout)
        else:
            self._waiting.begin("rest", _REST_SECONDS)

    def _expire(self) -> None:
        waited = self._waiting.what
        if waited in _TOO_LATE:
            self._hall.turned_away(_TOO_LATE[waited])
        if waited in ("head", "body") and self._begun:
            seconds = self._hall.header_timeout if waited == "head" else self._hall.body_timeout
            message = f"timed out reading the request {waited} ({seconds:g} s)"
            self._refuse(problem_reply(AppError(Kind.TIMEOUT, message)))
        elif waited == "head":
            self._close()
        else:
            self.cut()

    def _hang_up(self) -> None:
        if self.parted or self._answering or self._waiting.what == "rest":
            return
        if self._begun:
            self._refuse(problem_reply(AppError(Kind.STOPPING, STOPPING)))
        else:
            self._close()

    def _refuse(self, reply: Response) -> None:
        """Answer in the application's place, if there is anything left to answer, and leave."""
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state is h11.SEND_BODY:
            self.cut()
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reply.headers.update({HEADER: new_id(), **_CLOSE})
            self.transport.write(self.conn.whole(reply, self.server_state.default_headers))
        self._leave(_LEAVING_SECONDS)

    def _leave(self, seconds: float) -> None:
        """Close for sending, and throw away what comes while the client reads what it was told."""
        self._take_leave()
        self._waiting.begin("leaving", seconds)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            try:
                self.transport.write_eof()
            except OSError:  # it is gone, and nobody has noticed yet
                self.cut()

    def _close(self) -> None:
        self._take_leave()
        # TLS, once it closes, gives all that is unsent one time, and not one for each piece
        if self._below is not None and self._unsent():
            self._closes = True
        else:
            self.transport.close()

    def _take_leave(self) -> None:
        self._left = True
        self._hall.crowd.part(self)
        self._unset_keepalive_if_required()
        self._waiting.end()

    def _unsent(self) -> int:
        """Bytes that the system has not taken yet."""
        below = 0 if self._below is None else self._below.get_write_buffer_size()
        return below + self.transport.get_write_buffer_size()

    def _give_up_reader(self) -> None:
        self._hall.turned_away("unread_answer")
        self.cut()
