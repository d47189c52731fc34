"""The connection between rank 0 and a follower: its messages, and a checksum of the steps.

Knows: sockets, messages. Must not know: engines, models.

The connection also detects a lost rank: a process that exits closes its connection, and the kernel
detects an unreachable machine within half a minute. The messages are not sent through MLX's
distributed group, because waiting in that group busy-waits on a core, and cannot be interrupted
when rank 0 is idle or has exited.
"""

import contextlib
import socket
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.msgpack import Decoder

from app.core.jobs import (
    Ended,
    JobUpdate,
    PixelsNeeded,
    Prefilled,
    PromptLogprobs,
    Started,
    StepOutput,
    Token,
)
from app.core.requests import Grammar
from app.runners.channel import encode_frame, make_decoder, read_frame
from app.runners.worker_protocol import Cancel, Embed, ProvideImages, Submit


class StepChecksum:
    """A checksum of an engine's output, to verify that all ranks compute the same results. `value`
    is the CRC-32 of all steps so far."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, step: StepOutput) -> None:
        words = [_compared_fields(update) for update in step.updates]
        words += [(embedded.job_id, embedded.error) for embedded in step.embed_results]
        if words:
            self.value = zlib.crc32(repr(words).encode(), self.value)


def _compared_fields(update: JobUpdate) -> tuple[object, ...]:
    match update:
        case Started():
            return update.job_id, update.cached_tokens
        case PixelsNeeded():
            return update.job_id, update.keys
        case Prefilled():
            return update.job_id, update.computed_tokens
        case PromptLogprobs():
            return update.job_id, len(update.logprobs)
        case Token():
            return update.job_id, update.id
        case Ended():
            return update.job_id, update.reason, update.error


# The number of seconds after which a peer is considered lost if it does not respond to TCP
# keepalive probes or does not acknowledge data.
_PEER_TIMEOUT = 30

# The TCP keepalive options: the idle time in seconds before the first probe (under its Linux and
# macOS names), the interval in seconds between probes, and the number of unanswered probes.
_KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}

# TCP_RXT_CONNDROPTIME from macOS's netinet/tcp.h, in seconds, which Python does not define.
_DARWIN_DROP_TIME = 0x80


# The commands of the server. Each rank runs the whole vision tower.
Command = Submit | Embed | ProvideImages | Cancel


class RunStep(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Requests one step. The follower executes the commands in order and then runs the step.
    `checksum` covers the output of rank 0's engine in all previous steps, and must match the
    follower's own checksum."""

    commands: tuple[Command, ...]
    checksum: int


class Compile(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Requests the compilation of a grammar for a job that will follow. `number` identifies the
    reply."""

    number: int
    grammar: Grammar
    stop_ids: frozenset[int]


class Stop(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Requests the exit of the follower, because rank 0 is stopping."""


class HelloReply(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The reply to `Hello`. `refused` is the reason why rank 0 rejected the follower; None if it
    was accepted."""

    refused: str | None = None


LeaderMessage = RunStep | Compile | Stop | HelloReply


class Hello(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The first message of a follower.

    secret: the secret that rank 0 sent to the group.
    traits: the values that must be equal on all ranks, by name.
    """

    secret: str
    rank: int
    host: str
    traits: Mapping[str, str]


class Compiled(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    number: int


class RankFailed(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Reports that this rank has failed. `reason` is one sentence."""

    reason: str


FollowerMessage = Hello | Compiled | RankFailed

_MAX_HELLO_BYTES = 1 << 16

_LEADER_MESSAGE: Decoder[LeaderMessage] = make_decoder(LeaderMessage)
_FOLLOWER_MESSAGE: Decoder[FollowerMessage] = make_decoder(FollowerMessage)


class RankConnection:
    """One end of the connection. Any thread may write, but only one thread may read."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._reader = connection.makefile("rb")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE_OPTIONS.items():
            # Each operating system supports only some of these options.
            if (option := getattr(socket, name, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        if sys.platform == "darwin":
            connection.setsockopt(socket.IPPROTO_TCP, _DARWIN_DROP_TIME, _PEER_TIMEOUT)
        elif hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _PEER_TIMEOUT)

    def set_timeout(self, seconds: float | None) -> None:
        """Sets the timeout for reads and writes in seconds. None means no timeout."""
        self._socket.settimeout(seconds)

    def send(self, message: LeaderMessage | FollowerMessage) -> None:
        """Sends a message. Errors are ignored, because the reader detects a lost peer."""
        frame = encode_frame(message)
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(frame)

    def read_from_leader(self) -> Iterator[LeaderMessage]:
        """Yields the messages of rank 0 until the connection ends."""
        return map(_LEADER_MESSAGE.decode, self._read_frames())

    def read_from_follower(self) -> Iterator[FollowerMessage]:
        return map(_FOLLOWER_MESSAGE.decode, self._read_frames())

    def read_hello(self) -> Hello | None:
        """Reads the first message on a connection to rank 0. Returns None if the message is not a
        `Hello`, because any program can connect."""
        try:
            frame = read_frame(self._reader.read, _MAX_HELLO_BYTES)
            hello = None if frame is None else _FOLLOWER_MESSAGE.decode(frame)
        except (OSError, ValueError):
            return None
        return hello if isinstance(hello, Hello) else None

    def shutdown(self) -> None:
        """Ends the reads on both ends of the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection. Called by the reading thread."""
        self.shutdown()
        self._reader.close()
        self._socket.close()

    def _read_frames(self) -> Iterator[bytes]:
        with contextlib.suppress(OSError):
            while (frame := read_frame(self._reader.read)) is not None:
                yield frame
