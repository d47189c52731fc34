"""Frames, and a channel whose peer is slow, broken or gone."""

import asyncio
import io
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import DecodeError, Struct, ValidationError

from app.runners import channel as channel_module
from app.runners.channel import (
    MAX_MESSAGE_BYTES,
    Channel,
    FrameReader,
    MessageTooLargeError,
    encode_frame,
    make_decoder,
    read_frame,
)

PATIENCE = 30.0


class Note(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    text: str
    path: Path | None = None


NOTE = make_decoder(Note)


def note(text: str) -> Note:
    return Note(text=text, path=Path("/x/\udcff"))


@given(
    sizes=st.lists(st.sampled_from([0, 1, 200, 70_000]), max_size=5),
    cuts=st.lists(st.integers(1, 30_000), max_size=30),
)
def test_messages_do_not_depend_on_how_their_bytes_arrive(sizes: list[int], cuts: list[int]):
    notes = [note("é" * size) for size in sizes]
    data = b"".join(map(encode_frame, notes))
    reader: FrameReader[Note] = FrameReader(NOTE)
    received: list[Note] = []
    for cut in cuts:
        received += reader.feed(data[:cut])
        data = data[cut:]
    assert [*received, *reader.feed(data)] == notes


def test_a_length_beyond_the_limit_is_an_error_before_the_message_arrives():
    reader: FrameReader[Note] = FrameReader(NOTE)
    header = (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big")
    with pytest.raises(MessageTooLargeError, match=r"268435457 bytes exceeds .* 268435456 bytes"):
        list(reader.feed(header))
    with pytest.raises(MessageTooLargeError):
        read_frame(io.BytesIO(header).read)


def test_blocking_reads_return_whole_messages_until_the_stream_ends():
    first, second = encode_frame(note("a")), encode_frame(note("b" * 100_000))
    stream = io.BytesIO(first + second + first[:-1])
    assert read_frame(stream.read) == first[4:]
    assert read_frame(stream.read) == second[4:]
    assert read_frame(stream.read) is None
    assert read_frame(stream.read) is None
    with pytest.raises(MessageTooLargeError):
        read_frame(io.BytesIO(second).read, limit=1000)


class Ends:
    """Two ends of one pair of sockets, and the messages that have arrived at each."""

    def __init__(self) -> None:
        left, self.right_socket = socket.socketpair()
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        self.pauses: list[bool] = []
        self.read: list[Note] = []
        self.read_left: list[Note] = []
        self.left: Channel[Note] = Channel(left, NOTE, self.read_left.append, self.pauses.append)
        self.right: Channel[Note] | None = None

    def open_right(self) -> Channel[Note]:
        self.right = Channel(self.right_socket, NOTE, self.read.append)
        return self.right

    async def wait_for(self, count: int) -> None:
        while len(self.read) < count:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.001)


def run(body: Callable[[Ends], Awaitable[None]]) -> None:
    async def run_body() -> None:
        ends = Ends()
        try:
            async with asyncio.timeout(PATIENCE):
                await body(ends)
        finally:
            ends.left.close()
            ends.right_socket.close()
            if ends.right is not None:
                ends.right.close()

    asyncio.run(run_body())


def test_messages_arrive_in_order_in_both_directions():
    notes = [note("é" * size) for size in (1, 32, 5_000_000, 0, 7)]

    async def body(ends: Ends) -> None:
        right = ends.open_right()
        for one in notes:
            ends.left.send(one)
            right.send(one)
        while len(ends.read) < 5 or len(ends.read_left) < 5:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.001)
        assert ends.read == ends.read_left == notes

    run(body)


def test_a_channel_with_many_unsent_bytes_is_paused_until_all_are_sent():
    async def body(ends: Ends) -> None:
        while not ends.pauses:
            ends.left.send(note("x" * 10_000))
        assert ends.pauses == [True]
        waiting = asyncio.create_task(ends.left.wait_until_sent())
        await asyncio.sleep(0)
        assert not waiting.done()
        ends.open_right()
        await waiting
        assert ends.pauses == [True, False]

    run(body)


def test_closing_a_paused_channel_ends_the_pause_and_all_waits():
    async def body(ends: Ends) -> None:
        ends.left.send(note("x" * 10_000_000))
        waiting = asyncio.create_task(ends.left.wait_until_sent())
        await asyncio.sleep(0)
        ends.left.close()
        await waiting
        assert ends.pauses == [True, False]
        ends.left.send(note("dropped"))
        ends.left.close()
        assert ends.left.closed.result() is None

    run(body)


def test_the_last_messages_of_a_peer_are_read_after_a_failed_write():
    """A process crashes while its parent sends a job: its last events show which jobs it had."""

    async def body(ends: Ends) -> None:
        right = ends.open_right()
        ends.left.send(note("last"))
        ends.left.close()
        right.send(note("too late"))
        await right.closed
        assert ends.read == [note("last")]
        assert right.closed.result() is None

    run(body)


def test_an_incomplete_message_at_the_end_is_ignored():
    async def body(ends: Ends) -> None:
        right = ends.open_right()
        frame = encode_frame(note("whole"))
        ends.left._end.send(frame + frame[:-1])
        ends.left.close()
        assert await right.closed is None
        assert ends.read == [note("whole")]

    run(body)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\0\0\0\6mumble", DecodeError),
        (encode_frame(["Note", 3]), ValidationError),
        (b"\xff\xff\xff\xff", MessageTooLargeError),
    ],
)
def test_a_broken_message_closes_the_channel_with_its_error(data: bytes, error: type[Exception]):
    async def body(ends: Ends) -> None:
        right = ends.open_right()
        ends.left._end.send(encode_frame(note("fine")) + data + encode_frame(note("after")))
        assert isinstance(await right.closed, error)
        assert ends.read == [note("fine")]
        assert await ends.left.closed is None, "the peer sees the end"

    run(body)


def test_an_exception_of_the_receiver_closes_the_channel():
    async def body(ends: Ends) -> None:
        def fail(_: Note) -> None:
            raise MemoryError

        ends.right = Channel(ends.right_socket, NOTE, fail)
        ends.left.send(note("a"))
        assert isinstance(await ends.right.closed, MemoryError)

    run(body)


def test_a_receiver_that_closes_the_channel_gets_no_more_messages():
    async def body(ends: Ends) -> None:
        def take_one(one: Note) -> None:
            ends.read.append(one)
            assert ends.right is not None
            ends.right.close()

        for text in "abc":
            ends.left.send(note(text))
        ends.right = Channel(ends.right_socket, NOTE, take_one)
        await ends.right.closed
        assert ends.read == [note("a")]

    run(body)


def test_a_message_that_is_too_large_is_an_error_and_not_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 100)

    async def body(ends: Ends) -> None:
        ends.open_right()
        with pytest.raises(MessageTooLargeError):
            ends.left.send(note("x" * 1000))
        ends.left.send(note("next"))
        await ends.wait_for(1)
        assert ends.read == [note("next")]

    run(body)
