"""The line between rank 0 and another rank: commands go one way, words about them the other.

Knows: sockets, what is said on them. Must not know: engines, models. A line is also how one notices
that the other is gone: a process that ends closes it, and of a machine that was switched off the
kernel finds out within half a minute.

Why not over the group that the model's sums go over: whoever waits there burns a core, and cannot
be told that rank 0 has nothing to do or is gone.

Whether several engines that were told the same say the same.
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
    """value: of all steps so far (CRC-32)."""

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


# Seconds after which a peer counts as gone that does not answer the kernel's questions, or does not
# take what it was sent.
_PEER_TIMEOUT = 30

# seconds until a silent peer is asked whether it is there, between two questions, and how many
# questions may stay without an answer
_KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}

# TCP_RXT_CONNDROPTIME of macOS's netinet/tcp.h, in seconds, which Python does not name
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
    """Carry these out in this order, then take a step. checksum: a checksum of all that rank 0's
    engine has said in the steps before; that of whoever computes the same is the same."""

    commands: tuple[Command, ...]
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile:
    """Have this grammar ready, for a job that will come."""

    number: int
    grammar: Grammar
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Rank 0 was told to stop, and so everybody is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloReply:
    """refused: why rank 0 will not work with whoever said hello; None for a welcome."""

    refused: str | None = None


LeaderMessage = RunStep | Compile | Stop | HelloReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """secret: what rank 0 told the group, and nobody else. traits: what must be the same on all
    ranks, by name."""

    secret: str
    rank: int
    host: str
    traits: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """This rank can go on no more. reason: a sentence."""

    reason: str


FollowerMessage = Hello | Compiled | RankFailed

_MAX_HELLO_BYTES = 1 << 16

_LEADER_CODEC: Codec[LeaderMessage] = Codec(LeaderMessage)
_FOLLOWER_CODEC: Codec[FollowerMessage] = Codec(FollowerMessage)


class RankConnection:
    """One end of it. May be written to on any thread; read on one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._reader = connection.makefile("rb")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE_OPTIONS.items():
            # each system has some of them
            if (option := getattr(socket, name, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        if sys.platform == "darwin":
            connection.setsockopt(socket.IPPROTO_TCP, _DARWIN_DROP_TIME, _PEER_TIMEOUT)
        elif hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _PEER_TIMEOUT)

    def set_timeout(self, seconds: float | None) -> None:
        """How long reading and writing may take from now on; None for ever."""
        self._socket.settimeout(seconds)

    def send_to_follower(self, message: LeaderMessage) -> None:
        """From rank 0. Of a peer that is gone one hears by reading."""
        self._write(_LEADER_CODEC.encode(message))

    def send_to_leader(self, message: FollowerMessage) -> None:
        """To rank 0."""
        self._write(_FOLLOWER_CODEC.encode(message))

    def read_from_leader(self) -> Iterator[LeaderMessage]:
        """All that rank 0 says, until the line breaks."""
        return map(_LEADER_CODEC.decode, self._read_lines())

    def read_from_follower(self) -> Iterator[FollowerMessage]:
        return map(_FOLLOWER_CODEC.decode, self._read_lines())

    def read_hello(self) -> Hello | None:
        """The first words of whoever connected to rank 0, who may be anybody."""
        try:
            hello = _FOLLOWER_CODEC.decode(self._reader.readline(_MAX_HELLO_BYTES))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return hello if isinstance(hello, Hello) else None

    def shutdown(self) -> None:
        """Whoever reads, on either end, comes to the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """For whoever reads, when there is nothing more to read."""
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
