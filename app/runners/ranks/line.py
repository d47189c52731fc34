"""The line between rank 0 and another rank: commands go one way, words about them the other.

Knows: sockets, what is said on them. Must not know: engines, models. A line is also how one notices
that the other is gone: a process that ends closes it, and of a machine that was switched off the
kernel finds out within half a minute.

Why not over the group that the model's sums go over: whoever waits there burns a core, and cannot
be told that rank 0 has nothing to do or is gone.
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from app.core.embeddings import EmbedJob
from app.core.jobs import Job
from app.core.requests import Grammar
from app.runners.codec import Codec

# Seconds after which a peer counts as gone that does not answer the kernel's questions, or does not
# take what it was sent.
_SILENCE = 30

# seconds until a silent peer is asked whether it is there, between two questions, and how many
# questions may stay without an answer
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}

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
class Turn:
    """Carry these out in this order, then take a step. said: a checksum of all that rank 0's engine
    has said in the steps before; that of whoever computes the same is the same."""

    commands: tuple[Command, ...]
    said: int


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
class Welcome:
    """refused: why rank 0 will not work with whoever said hello; None for a welcome."""

    refused: str | None = None


Down = Turn | Compile | Stop | Welcome


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
class Lost:
    """This rank can go on no more. why: a sentence."""

    why: str


Up = Hello | Compiled | Lost

_LONGEST_HELLO = 1 << 16

_DOWN: Codec[Down] = Codec(Down)
_UP: Codec[Up] = Codec(Up)


class Line:
    """One end of it. May be written to on any thread; read on one."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self._reader = connected.makefile("rb")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            # each system has some of them
            if (option := getattr(socket, name, None)) is not None:
                connected.setsockopt(socket.IPPROTO_TCP, option, value)
        if sys.platform == "darwin":
            connected.setsockopt(socket.IPPROTO_TCP, _DARWIN_DROP_TIME, _SILENCE)
        elif hasattr(socket, "TCP_USER_TIMEOUT"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE)

    def patient(self, seconds: float | None) -> None:
        """How long reading and writing may take from now on; None for ever."""
        self._socket.settimeout(seconds)

    def tell(self, words: Down) -> None:
        """From rank 0. Of a peer that is gone one hears by reading."""
        self._write(_DOWN.encode(words))

    def answer(self, words: Up) -> None:
        """To rank 0."""
        self._write(_UP.encode(words))

    def told(self) -> Iterator[Down]:
        """All that rank 0 says, until the line breaks."""
        return map(_DOWN.decode, self._lines())

    def answers(self) -> Iterator[Up]:
        return map(_UP.decode, self._lines())

    def greeting(self) -> Hello | None:
        """The first words of whoever connected to rank 0, who may be anybody."""
        try:
            hello = _UP.decode(self._reader.readline(_LONGEST_HELLO))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return hello if isinstance(hello, Hello) else None

    def hang_up(self) -> None:
        """Whoever reads, on either end, comes to the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """For whoever reads, when there is nothing more to read."""
        self.hang_up()
        self._reader.close()
        self._socket.close()

    def _write(self, line: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(line + b"\n")

    def _lines(self) -> Iterator[bytes]:
        while True:
            try:
                line = self._reader.readline()
            except OSError:
                return
            if not line.endswith(b"\n"):
                return
            yield line
