"""A process that attacks a server until its standard input ends: `python attacker.py FILE`. The
file has a pickled `Attack`.

Uses sockets and the standard library only, to use little of the machine: it sends prepared bytes,
and sleeps whenever it has used more than its share of a core. Prints one line when every thread has
gone through its connections once or for a second, and one with the statuses at the end.
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

# Timeout of one socket operation in seconds, and seconds after which a thread that has gone through
# one connection counts as started.
PATIENCE = 30.0
STARTUP_SECONDS = 1.0

# Bytes after which a flood ends.
MAX_FLOOD_BYTES = 1 << 30


@dataclass(frozen=True)
class Send:
    """Send these bytes, or as many as the server accepts."""

    data: bytes


@dataclass(frozen=True)
class Flood:
    """Send these bytes repeatedly until the server accepts no more."""

    data: bytes


@dataclass(frozen=True)
class Read:
    """Read one reply to its end, and count its status."""


@dataclass(frozen=True)
class Wait:
    """Wait; the next step may disconnect without reading."""

    seconds: float


Step = Send | Flood | Read | Wait


@dataclass(frozen=True)
class Attack:
    """connections: the steps of each thread on one connection after the other. share: the share of
    a core for this process. port: 0 for the server's port. tls: whether to use TLS. hold: how many
    of its latest connections a thread keeps open."""

    connections: Sequence[Sequence[Step]]
    threads: int = 1
    share: float = 0.16
    port: int = 0
    tls: bool = False
    hold: int = 0
    startup: float = PATIENCE


@dataclass
class _State:
    statuses: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    num_started: int = 0
    done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


def main(path: str) -> None:
    with open(path, "rb") as file:
        attack: Attack = pickle.load(file)
    state, start = _State(), time.monotonic()
    for number in range(attack.threads):
        thread = threading.Thread(target=_run, args=(attack, state, number, start), daemon=True)
        thread.start()
    while state.num_started < attack.threads and time.monotonic() - start < attack.startup:
        time.sleep(0.01)
    print("under way", flush=True)
    sys.stdin.read()
    state.done = True
    print(json.dumps({"statuses": state.statuses, "sent": state.sent}), flush=True)


def _run(attack: Attack, state: _State, number: int, start: float) -> None:
    started = False
    connections: list[socket.socket] = []
    index = number
    while not state.done:
        steps = attack.connections[index % len(attack.connections)]
        index += 1
        with contextlib.suppress(OSError):
            connections.append(_connect(attack))
            _play(steps, connections[-1], state, attack, start)
        while len(connections) > attack.hold:
            connections.pop(0).close()
        if not started and (index - number >= len(attack.connections) or _startup_is_over(start)):
            started = True
            with state.lock:
                state.num_started += 1
        _throttle(attack.share, start)


def _startup_is_over(start: float) -> bool:
    return time.monotonic() - start > STARTUP_SECONDS


def _connect(attack: Attack) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", attack.port), timeout=PATIENCE)
    if not attack.tls:
        return connection
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(connection)


def _play(
    steps: Sequence[Step], connection: socket.socket, state: _State, attack: Attack, start: float
) -> None:
    for step in steps:
        if state.done:
            return
        match step:
            case Send(data=data):
                state.sent += _send(connection, data, attack, start)
            case Flood(data=data):
                total = 0
                while (
                    total < MAX_FLOOD_BYTES
                    and not state.done
                    and (sent := _send_once(connection, data))
                ):
                    total += sent
                    _throttle(attack.share, start)
                state.sent += total
            case Wait(seconds=seconds):
                time.sleep(seconds)
            case Read():
                status = _read_status(connection)
                with state.lock:
                    state.statuses[status] += 1


def _send(connection: socket.socket, data: bytes, attack: Attack, start: float) -> int:
    sent = 0
    with contextlib.suppress(OSError):  # rejected before all of it is sent
        while sent < len(data):
            sent += connection.send(data[sent : sent + (1 << 18)])
            _throttle(attack.share, start)
    return sent


def _send_once(connection: socket.socket, data: bytes) -> int:
    with contextlib.suppress(OSError):
        return connection.send(data)
    return 0


def _read_status(connection: socket.socket) -> str:
    """The status of a reply, which is read to its end: by its length, its chunks, or until
    close."""
    read = bytearray()
    while b"\r\n\r\n" not in read:
        data = _receive(connection)
        if not data:
            return "none"
        read += data
    head, _, body = bytes(read).partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next(
        (int(field[15:]) for field in lines if field.startswith(b"content-length:")), None
    )
    last_bytes, num_bytes = body[-5:], len(body)
    while (num_bytes < length) if length is not None else last_bytes != b"0\r\n\r\n":
        data = _receive(connection)
        if not data:
            return "torn"
        num_bytes += len(data)
        last_bytes = (last_bytes + data)[-5:]
    return lines[0].split()[1].decode()


def _receive(connection: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return connection.recv(1 << 18)
    return b""


def _throttle(share: float, start: float) -> None:
    """Sleep until this process has used no more than its share of a core."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    excess = (used.ru_utime + used.ru_stime) / share - (time.monotonic() - start)
    if excess > 0:
        time.sleep(min(excess, 1.0))


if __name__ == "__main__":
    main(sys.argv[1])
