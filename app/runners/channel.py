"""The channel between the server and one of its processes: frames with one message each.

    [ length: 4 bytes, big-endian | message in MessagePack ]

Knows: bytes, message types, one end of a pair of connected sockets. Must not know: the meaning of
messages, processes.

Messages are frozen msgspec structs (https://jcristharif.com/msgspec), or dataclasses inside them. A
decoder checks the types of all fields. A `Channel` never blocks the event loop: unsent bytes wait
in memory, and `on_paused` reports when there are too many.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec.msgpack import Decoder, Encoder

T = TypeVar("T")

# The maximum size of a message in bytes. A prompt of ten million tokens takes 50 MB. A larger
# length means that the peer is broken.
MAX_MESSAGE_BYTES = 1 << 28

_HEADER_BYTES = 4
_READ_BYTES = 1 << 16

# The number of unsent bytes above which a channel is paused.
_MAX_UNSENT_BYTES = 1 << 20


class MessageTooLargeError(ValueError):
    def __init__(self, size: int, limit: int = MAX_MESSAGE_BYTES) -> None:
        super().__init__(f"a message of {size} bytes exceeds the limit of {limit} bytes")


def _encode_path(value: object) -> bytes:
    """Encodes a path as bytes, because it may not be valid UTF-8."""
    if isinstance(value, Path):
        return os.fsencode(value)
    raise NotImplementedError


def _decode_path(kind: type, value: Any) -> Path:
    if kind is Path and isinstance(value, bytes):
        return Path(os.fsdecode(value))
    raise NotImplementedError


_ENCODER = Encoder(enc_hook=_encode_path)


def make_decoder(kind: Any) -> Decoder[Any]:
    """Returns a decoder of messages of one type, or of a union of tagged structs. It raises
    msgspec.DecodeError, which is a ValueError."""
    return Decoder(kind, dec_hook=_decode_path)


def encode(message: object) -> bytes:
    """Returns the message without a header."""
    return _ENCODER.encode(message)


def encode_frame(message: object) -> bytes:
    """Raises MessageTooLargeError."""
    payload = _ENCODER.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MessageTooLargeError(len(payload))
    return len(payload).to_bytes(_HEADER_BYTES, "big") + payload


class FrameReader(Generic[T]):
    """Decodes the messages in a stream of bytes."""

    def __init__(self, decoder: Decoder[T]) -> None:
        self._decoder = decoder
        self._partial = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """Yields the messages completed by `data`. Raises MessageTooLargeError before the message
        has arrived, and msgspec.DecodeError."""
        buffer, start = self._partial, 0
        buffer += data
        try:
            while len(buffer) - start >= _HEADER_BYTES:
                body = start + _HEADER_BYTES
                end = body + _read_size(buffer[start:body])
                if end > len(buffer):
                    break
                with memoryview(buffer)[body:end] as payload:
                    message = self._decoder.decode(payload)
                start = end
                yield message
        finally:
            del buffer[:start]


def _read_size(header: bytes | bytearray, limit: int = MAX_MESSAGE_BYTES) -> int:
    size = int.from_bytes(header, "big")
    if size > limit:
        raise MessageTooLargeError(size, limit)
    return size


def read_frame(read: Callable[[int], bytes], limit: int = MAX_MESSAGE_BYTES) -> bytes | None:
    """Reads one frame and returns its message. Blocks until it is complete. Returns None if the
    stream ends before that. Raises MessageTooLargeError.

    read: reads up to a number of bytes.
    limit: the maximum size of the message in bytes.
    """
    header = _read_exactly(read, _HEADER_BYTES)
    return None if header is None else _read_exactly(read, _read_size(header, limit))


def _read_exactly(read: Callable[[int], bytes], size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        more = read(min(size - len(data), _READ_BYTES))
        if not more:
            return None
        data += more
    return bytes(data)


class Channel(Generic[T]):
    """One end of a pair of connected sockets, on the running event loop. It owns the socket.

    decoder: decodes the peer's messages.
    receive: called with each message, in order. An exception closes the channel.
    on_paused: called with True when too many bytes are unsent, because the peer does not read fast
        enough, and with False when all were sent or the channel is closed.
    closed: done when the channel is closed. The result is the exception that closed it, or None
        after `close`, or if the peer has closed its end.
    """

    def __init__(
        self,
        end: socket.socket,
        decoder: Decoder[T],
        receive: Callable[[T], None],
        on_paused: Callable[[bool], None] | None = None,
    ) -> None:
        end.setblocking(False)
        self._end = end
        self._reader = FrameReader(decoder)
        self._receive = receive
        self._on_paused = on_paused
        self._unsent = bytearray()
        self._paused = False
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        self._peer_reads = True
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[Exception | None] = self._loop.create_future()
        self._loop.add_reader(end, self._read)

    def send(self, *messages: object) -> None:
        """Sends messages with one write, or drops them if the peer has closed its end. Never waits.
        Raises MessageTooLargeError."""
        frame = b"".join(map(encode_frame, messages))
        if self.closed.done() or not self._peer_reads:
            return
        if self._unsent:
            self._unsent += frame
        elif (sent := self._write(frame)) < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self._all_sent.clear()
            self._loop.add_writer(self._end, self._write_unsent)
        if len(self._unsent) > _MAX_UNSENT_BYTES and not self._paused:
            self._set_paused(paused=True)

    async def wait_until_sent(self) -> None:
        """Waits until all messages were passed to the kernel, or until the channel is closed."""
        await self._all_sent.wait()

    def close(self, error: Exception | None = None) -> None:
        """Closes the channel at once and drops unsent messages. Only the first call has an
        effect."""
        if self.closed.done():
            return
        self._drop_unsent()
        self._loop.remove_reader(self._end)
        self._end.close()
        self.closed.set_result(error)

    def _read(self) -> None:
        try:
            data = self._end.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:
            data = b""
        if not data:
            self.close()
            return
        try:
            for message in self._reader.feed(data):
                self._receive(message)
                if self.closed.done():
                    return
        except Exception as error:
            self.close(error)

    def _write(self, data: bytes | bytearray) -> int:
        """Returns the number of bytes that the kernel has taken."""
        try:
            return self._end.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # The peer's last messages can still be read, so the channel stays open until their end.
            self._peer_reads = False
            return len(data)

    def _write_unsent(self) -> None:
        del self._unsent[: self._write(self._unsent)]
        if not self._unsent:
            self._drop_unsent()

    def _drop_unsent(self) -> None:
        self._unsent.clear()
        self._loop.remove_writer(self._end)
        self._all_sent.set()
        if self._paused:
            self._set_paused(paused=False)

    def _set_paused(self, *, paused: bool) -> None:
        self._paused = paused
        if self._on_paused is not None:
            self._on_paused(paused)
