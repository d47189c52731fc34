"""Serialized responses: the bytes match h11's, however a body is split."""

from collections.abc import Sequence

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.connection import LimitedH11Connection

Headers = list[tuple[bytes, bytes]]


def exchange(
    connection: h11.Connection, request: bytes, headers: Headers, chunks: Sequence[bytes]
) -> tuple[bytes, object]:
    """The bytes of a response, and the state of the connection after it."""
    connection.receive_data(request)
    while not isinstance(connection.next_event(), h11.EndOfMessage):
        pass
    events = (
        h11.Response(status_code=200, headers=headers, reason=b"OK"),
        *(h11.Data(data=chunk) for chunk in chunks),
        h11.EndOfMessage(),
    )
    sent = b"".join(connection.send(event) or b"" for event in events)
    return sent, connection.our_state


def make_request(method: bytes, version: bytes) -> bytes:
    return b"%b / HTTP/%b\r\nHost: x\r\n\r\n" % (method, version)


@given(
    method=st.sampled_from([b"POST", b"HEAD"]),
    version=st.sampled_from([b"1.1", b"1.0"]),
    chunks=st.lists(st.binary(max_size=40), max_size=6),
    announced=st.booleans(),
)
def test_the_bytes_are_those_of_h11(
    method: bytes, version: bytes, chunks: list[bytes], announced: bool
):
    size = sum(map(len, chunks))
    headers: Headers = [(b"Content-Length", b"%d" % size)] if announced else []
    body = [] if method == b"HEAD" else chunks
    expected = h11.Connection(h11.SERVER)
    ours = LimitedH11Connection()
    request = make_request(method, version)
    assert exchange(ours, request, headers, body) == exchange(expected, request, headers, body)
    if ours.our_state is h11.DONE:  # the next response is not affected
        for connection in (ours, expected):
            connection.start_next_cycle()
        again = make_request(b"POST", b"1.1")
        assert exchange(ours, again, [(b"Content-Length", b"2")], [b"ab"]) == exchange(
            expected, again, [(b"Content-Length", b"2")], [b"ab"]
        )


def test_a_chunk_after_the_end_of_a_response_is_an_error():
    connection = LimitedH11Connection()
    exchange(connection, make_request(b"POST", b"1.1"), [], [b"a"])
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"b"))


def test_a_chunk_skips_the_state_machine(monkeypatch: pytest.MonkeyPatch):
    """It takes as long as writing to the socket."""
    connection = LimitedH11Connection()
    connection.receive_data(make_request(b"POST", b"1.1"))
    connection.next_event()
    connection.next_event()
    connection.send(h11.Response(status_code=200, headers=[], reason=b"OK"))
    monkeypatch.delattr(h11.Connection, "_process_event")
    assert connection.send(h11.Data(data=b"x" * 20)) == b"14\r\n" + b"x" * 20 + b"\r\n"
    with pytest.raises(AttributeError):
        connection.send(h11.EndOfMessage())
