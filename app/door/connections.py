"""One HTTP connection: how long each part of a request may take, how large its head may be, and who
gives way when too many are open.

Knows: uvicorn's protocol on h11, sockets, timers. Must not know: routes, keys, what is answered.

What a connection waits for, and what ends the wait:

    opened ──head──▶ body ──▶ answer ──▶ idle ──first byte──▶ head …
      └ header_timeout ┘ └ body_timeout ┘  └ uvicorn's keep-alive ┘ └ header_timeout

An answer that came before its request was whole (413, 404) is followed by `rest`: what is left of
the body is thrown away for a while, since closing at once would reset the connection and with it
the answer (RFC 9112, 9.6). So are connections left that were refused here: `leaving`.
"""

import asyncio
import logging
from typing import Any, Literal, cast

import h11
from starlette.responses import Response
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.api.request_id import HEADER, RequestIds, new_id
from app.api.wire import problem_reply
from app.core.errors import AppError, Kind
from app.core.settings import Settings
from app.door.crowd import Crowd
from app.door.strict import StrictConnection

log = logging.getLogger(__name__)

# Bytes that are read in one turn of the event loop: h11 takes 4 microseconds for a chunk of one
# byte, so that asyncio's 256 KiB of them would stop everybody else for 0.2 s.
_READ = 8 * 1024

# What is read and thrown away behind an answer that came early, in bytes and in seconds.
_REST_BYTES = 16 * 1024 * 1024
_REST_SECONDS = 5.0

# Seconds in which a refused client may read why.
_LEAVING_SECONDS = 2.0

# Refused clients that may be reading why, beyond max_connections; more are not even told.
_LEAVING = 64

# Seconds in which a request that was under way when the server began to stop is still answered.
_LAST_LOOK = 0.05

# Bytes that a client must have read of what waits for it to be given more time.
_PROGRESS = 16 * 1024

STOPPING = "the server is stopping: try again in a moment, by then another one may be here"

_CLOSE = {"Connection": "close"}

Waits = Literal["head", "body", "rest", "leaving"]


def protocol(settings: Settings) -> type["Connection"]:
    """What `uvicorn.Config(http=…)` takes: the connections of one server, bounded together."""
    crowd = Crowd["Connection"](settings.max_connections)

    class Bounded(Connection):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop, crowd, settings)

    return Bounded


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """One client's. Everything here runs on the event loop."""

    conn: StrictConnection

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None,
        crowd: Crowd["Connection"],
        settings: Settings,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self.conn = StrictConnection()
        self._crowd = crowd
        self._most = settings.max_connections
        self._header_timeout = settings.header_timeout
        self._body_timeout = settings.body_timeout
        self._buffer = bytearray()
        self._waits: Waits | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._thrown_away = 0
        self._stops = False

    # What asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as uvicorn narrows it
        super().connection_made(transport)
        # `pause_writing` as soon as one byte does not go out. TLS takes 0 to mean always.
        transport.set_write_buffer_limits(high=1 if self.scheme == "https" else 0)
        self._wait_for("head", self._header_timeout)
        leaver = self._crowd.join(self)
        if leaver is self and len(self.connections) > self._most + _LEAVING:
            transport.abort()
        elif leaver is not None:
            leaver.give_way(tell=leaver is self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        self._wait_for(None)
        self._stop_watching()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        self._buffer = bytearray(_READ)
        # TLS fills it piece by piece through slices, and a slice of a bytearray is a copy
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        data, self._buffer = bytes(memoryview(self._buffer)[:nbytes]), bytearray()
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self._waits in ("rest", "leaving"):
            self._thrown_away += len(data)
            if self._thrown_away > _REST_BYTES:
                self.transport.abort()
                return
        if self._waits == "leaving":
            return
        super().data_received(data)
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    # What uvicorn calls

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _unsupported_upgrade_warning(self) -> None:
        """Java's client asks for HTTP/2 with each first request, and gets its answer by HTTP/1.1:
        nothing that would be worth two lines in the log."""

    def send_400_response(self, msg: str) -> None:
        assert self.conn.fault is not None, "called where an event could not be read"
        self._refuse(self.conn.fault)

    def shutdown(self) -> None:
        """Finish what is being answered, answer nothing else, and close. May be called again."""
        if self._stops or self._waits == "leaving":
            return
        self._stops = True
        self.app = RequestIds(problem_reply(AppError(Kind.STOPPING, STOPPING), headers=_CLOSE))
        if self._answering:
            self.cycle.keep_alive = False
            if not self.cycle.response_started:
                told = [(name.encode(), value.encode()) for name, value in _CLOSE.items()]
                self.cycle.default_headers = [*self.cycle.default_headers, *told]
        else:
            # a request may lie in the socket already
            self.loop.call_later(_LAST_LOOK, self._hang_up)

    # What the server and other connections call

    def give_way(self, *, tell: bool) -> None:
        """Too many are open, and this one has to go. tell: also if nothing of a request came."""
        if not tell and not self._begun:
            self._close()
            return
        message = "too many connections are open: try again in a moment"
        told = AppError(Kind.BUSY, message, code="too_many_connections")
        self._refuse(problem_reply(told, status=503))

    # Ours

    @property
    def _answering(self) -> bool:
        """Whether a request is with the application."""
        cycle = cast(RequestResponseCycle | None, self.cycle)  # uvicorn's own type says less
        return cycle is not None and not cycle.response_complete

    @property
    def _begun(self) -> bool:
        """Whether some of a request came, but not all of it."""
        return self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])

    def _look(self) -> None:
        """What does it wait for now?"""
        if self._waits == "leaving" or self.transport.is_closing():
            return
        theirs = self.conn.their_state
        if theirs is h11.IDLE:
            self._crowd.wait(self)
            if self._stops and not self._begun:
                self._close()
                return
            # before the first byte uvicorn's keep-alive counts, unless something stopped it
            if self._begun or self.timeout_keep_alive_task is None:
                self._wait_for("head", self._header_timeout)
            else:
                self._wait_for(None)
        elif theirs is not h11.SEND_BODY:
            self._crowd.heard(self)
            self._wait_for(None)
        elif self._answering:
            self._wait_for("body", self._body_timeout)
        else:
            self._wait_for("rest", _REST_SECONDS)

    def _wait_for(self, what: Waits | None, seconds: float = 0.0) -> None:
        """Waiting longer for the same thing gives no more time."""
        if what == self._waits:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._waits, self._thrown_away = what, 0
        self._timer = None if what is None else self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        match self._waits:
            case "head" | "body" if self._begun:
                seconds = self._header_timeout if self._waits == "head" else self._body_timeout
                message = f"the request's {self._waits} took longer than {seconds:g} s to come"
                self._refuse(problem_reply(AppError(Kind.TIMEOUT, message)))
            case "head":
                self._close()
            case _:
                self.transport.abort()

    def _hang_up(self) -> None:
        if self.transport.is_closing() or self._answering or self._waits in ("rest", "leaving"):
            return
        if self._begun:
            self._refuse(problem_reply(AppError(Kind.STOPPING, STOPPING)))
        else:
            self._close()

    def _close(self) -> None:
        self._crowd.leave(self)
        self.transport.close()

    def _refuse(self, reply: Response) -> None:
        """Answer in the application's place, if there is anything left to answer, and leave."""
        self._crowd.leave(self)
        self._unset_keepalive_if_required()
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        log.debug("a connection was refused: %d", reply.status_code)
        reply.headers.update({HEADER: new_id(), **_CLOSE})
        head = h11.Response(
            status_code=reply.status_code,
            headers=[*self.server_state.default_headers, *reply.raw_headers],
        )
        body = b"" if self.conn.method == b"HEAD" else bytes(reply.body)
        self._wait_for("leaving", _LEAVING_SECONDS)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    def _watch(self, unread: int) -> None:
        self._writing = self.loop.call_later(self._body_timeout, self._press, unread)

    def _press(self, before: int) -> None:
        """A client that reads nothing holds memory, and a place for as long as it likes."""
        unread = self.transport.get_write_buffer_size()
        if unread <= before - _PROGRESS:
            self._watch(unread)
            return
        log.debug("a client did not read its answer for %g s", self._body_timeout)
        self.transport.abort()

    def _stop_watching(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
