"""An h11 connection with limits on headers and chunks.

Knows: HTTP/1.1 as h11 parses it. Must not know: sockets, time, the code that reads requests.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import NamedTuple

import h11
from starlette.responses import Response

from app.core.errors import AppError, ErrorKind

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
