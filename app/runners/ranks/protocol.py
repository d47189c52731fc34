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
from dataclasses import dataclass

from app.core.embeddings import EmbedJob
from app.core.jobs import (
    Ended,
    Job,
    JobUpdate,
    Prefilled,
    PromptLogprobs,
    Started,
    StepOutput,
    Token,
)
from app.core.requests import Grammar
from app.runners.codec import Codec


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed:
    job: EmbedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    job: str
    keep: int | None


Command = Submit | Embed | Cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Requests one step. The follower executes the commands in order and then runs the step.
    `checksum` covers the output of rank 0's engine in all previous steps, and must match the
    follower's own checksum."""

    commands: tuple[Command, ...]
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile:
    """Requests the compilation of a grammar for a job that will follow. `number` identifies the
    reply."""

    number: int
    grammar: Grammar
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Requests the exit of the follower, because rank 0 is stopping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloReply:
    """The reply to `Hello`. `refused` is the reason why rank 0 rejected the follower; None if it
    was accepted."""

    refused: str | None = None


LeaderMessage = RunStep | Compile | Stop | HelloReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a follower.

    secret: the secret that rank 0 sent to the group.
    traits: the values that must be equal on all ranks, by name.
    """

    secret: str
    rank: int
    host: str
    traits: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """Reports that this rank has failed. `reason` is one sentence."""

    reason: str


FollowerMessage = Hello | Compiled | RankFailed

_MAX_HELLO_BYTES = 1 << 16

_LEADER_CODEC: Codec[LeaderMessage] = Codec(LeaderMessage)
_FOLLOWER_CODEC: Codec[FollowerMessage] = Codec(FollowerMessage)


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

    def send_to_follower(self, message: LeaderMessage) -> None:
        """Sends a message from rank 0. Errors are ignored, because the reader detects a lost
        peer."""
        self._write(_LEADER_CODEC.encode(message))

    def send_to_leader(self, message: FollowerMessage) -> None:
        """Sends a message to rank 0. Errors are ignored, as in `send_to_follower`."""
        self._write(_FOLLOWER_CODEC.encode(message))

    def read_from_leader(self) -> Iterator[LeaderMessage]:
        """Yields the messages of rank 0 until the connection ends."""
        return map(_LEADER_CODEC.decode, self._read_lines())

    def read_from_follower(self) -> Iterator[FollowerMessage]:
        return map(_FOLLOWER_CODEC.decode, self._read_lines())

    def read_hello(self) -> Hello | None:
        """Reads the first message on a connection to rank 0. Returns None if the message is not a
        `Hello`, because any program can connect."""
        try:
            hello = _FOLLOWER_CODEC.decode(self._reader.readline(_MAX_HELLO_BYTES))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
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

    def _write(self, line: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(line + b"\n")

    def _read_lines(self) -> Iterator[bytes]:
        while True:
            try:
                line = self._reader.readline()
            except OSError:
                return
            if not line.endswith(b"\n"):
                return
            yield line
