"""A process that attacks a server until it is told to end: `python attacker.py FILE`, an `Attack`.

Uses sockets and the standard library only, so that it takes little of the machine: what it sends is
ready bytes, and it rests whenever it has used more than its share of a core. Prints one line when
every thread has gone through its connections once or for a second, and one with what was answered
when its standard input ends.
"""

import contextlib
import json
import pickle
import resource
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# Seconds that one wait for the server may take, and in which a thread counts as under way.
PATIENCE = 30.0
UNDER_WAY = 1.0

# Of a flood: bytes after which it is enough.
MOST = 1 << 30


@dataclass(frozen=True)
class Send:
    """Send these bytes, or as many as the server takes."""

    data: bytes


@dataclass(frozen=True)
class Flood:
    """Send these bytes again and again until the server takes no more."""

    data: bytes


@dataclass(frozen=True)
class Read:
    """Read one reply to its end, and count its status."""


@dataclass(frozen=True)
class Wait:
    """Wait; then perhaps leave without reading."""

    seconds: float


Step = Send | Flood | Read | Wait


@dataclass(frozen=True)
class Attack:
    """connections: what each thread does on one connection after the other. share: of a core, for
    this process. port: the victim's, where it is not the server's. tls: whether TLS is spoken.
    hold: how many of its latest connections a thread keeps open."""

    connections: Sequence[Sequence[Step]]
    threads: int = 1
    share: float = 0.16
    port: int = 0
    tls: bool = False
    hold: int = 0


@dataclass
class _State:
    statuses: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    under_way: int = 0
    over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


def main(path: str) -> None:
    with open(path, "rb") as file:
        attack: Attack = pickle.load(file)
    state, began = _State(), time.monotonic()
    for number in range(attack.threads):
        thread = threading.Thread(target=_run, args=(attack, state, number, began), daemon=True)
        thread.start()
    while state.under_way < attack.threads:
        time.sleep(0.01)
    print("under way", flush=True)
    sys.stdin.read()
    state.over = True
    print(json.dumps({"statuses": state.statuses, "sent": state.sent}), flush=True)


def _run(attack: Attack, state: _State, number: int, began: float) -> None:
    counted = False
    held: list[socket.socket] = []
    turn = number
    while not state.over:
        steps = attack.connections[turn % len(attack.connections)]
        turn += 1
        with contextlib.suppress(OSError):
            held.append(_connected(attack))
            _play(steps, held[-1], state, attack, began)
        while len(held) > attack.hold:
            held.pop(0).close()
        if not counted and (turn - number >= len(attack.connections) or _late(began)):
            counted = True
            with state.lock:
                state.under_way += 1
        _rest(attack.share, began)


def _late(began: float) -> bool:
    return time.monotonic() - began > UNDER_WAY


def _connected(attack: Attack) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", attack.port), timeout=PATIENCE)
    if not attack.tls:
        return plain
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(plain)


def _play(
    steps: Sequence[Step], line: socket.socket, state: _State, attack: Attack, began: float
) -> None:
    for step in steps:
        if state.over:
            return
        match step:
            case Send(data=data):
                state.sent += _send(line, data, attack, began)
            case Flood(data=data):
                total = 0
                while total < MOST and not state.over and (sent := _once(line, data)):
                    total += sent
                    _rest(attack.share, began)
                state.sent += total
            case Wait(seconds=seconds):
                time.sleep(seconds)
            case Read():
                status = _status(line)
                with state.lock:
                    state.statuses[status] += 1


def _send(line: socket.socket, data: bytes, attack: Attack, began: float) -> int:
    sent = 0
    with contextlib.suppress(OSError):  # refused before it is whole
        while sent < len(data):
            sent += line.send(data[sent : sent + (1 << 18)])
            _rest(attack.share, began)
    return sent


def _once(line: socket.socket, data: bytes) -> int:
    with contextlib.suppress(OSError):
        return line.send(data)
    return 0


def _status(line: socket.socket) -> str:
    """Of a reply that is read to its end: of its length, of its chunks, or to the connection's."""
    read = bytearray()
    while b"\r\n\r\n" not in read:
        more = _received(line)
        if not more:
            return "none"
        read += more
    head, _, body = bytes(read).partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next(
        (int(field[15:]) for field in lines if field.startswith(b"content-length:")), None
    )
    tail, got = body[-5:], len(body)
    while (got < length) if length is not None else tail != b"0\r\n\r\n":
        more = _received(line)
        if not more:
            return "torn"
        got += len(more)
        tail = (tail + more)[-5:]
    return lines[0].split()[1].decode()


def _received(line: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return line.recv(1 << 18)
    return b""


def _rest(share: float, began: float) -> None:
    """Until this process has used no more than its share of a core."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    ahead = (used.ru_utime + used.ru_stime) / share - (time.monotonic() - began)
    if ahead > 0:
        time.sleep(min(ahead, 1.0))


if __name__ == "__main__":
    main(sys.argv[1])
