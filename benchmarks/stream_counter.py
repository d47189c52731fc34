"""Counts the events of concurrent streams, and the CPU time of a server's processes (Linux).

The client parses nothing, so that it takes as little as possible of the two cores on which the
server runs. Nothing is measured before every stream has sent its first event.
"""

import json
import random
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.server_process import ServerProcess

TIMEOUT = 120.0
_READ_BYTES = 1 << 16
_EVENT, _END = b"data: {", b"data: [DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCpu:
    """CPU seconds of the server process and of its model process."""

    front: float
    runner: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsResult:
    """tokens_per_second: the sum of all streams, from the first request to the last event.
    decode_rate: the same from the moment at which all streams have begun. front, runner: CPU
    seconds per token from that moment."""

    tokens_per_second: float
    decode_rate: float
    front: float
    runner: float


@dataclass(slots=True)
class _Stream:
    connection: socket.socket
    events: int = 0
    tail: bytes = b""

    def feed(self, data: bytes) -> None:
        # an event that two reads share is counted with the second one
        joined = self.tail[-len(_EVENT) + 1 :] + data
        self.events += joined.count(_EVENT)
        self.tail = (self.tail + data)[-64:]


def read_server_cpu(server: ServerProcess) -> ServerCpu:
    front = server.process.pid
    tasks = Path(f"/proc/{front}/task").iterdir()
    children = [pid for task in tasks for pid in _read(task / "children").split()]
    return ServerCpu(front=_cpu_seconds(front), runner=sum(_cpu_seconds(int(p)) for p in children))


def _cpu_seconds(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((_read(task / "schedstat") or "0").split()[0]) for task in tasks) / 1e9


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the thread or process has ended
        return ""


def count_streams(
    server: ServerProcess, model: str, clients: int, tokens: int, seed: int
) -> StreamsResult:
    """Runs `clients` greedy streams of `tokens` tokens with short prompts that differ."""
    waiting = selectors.DefaultSelector()
    requests = [_build_request(model, tokens, f"{seed}/{n}") for n in range(clients)]
    streams = [_Stream(_connect(server.port)) for _ in requests]
    began = time.perf_counter()
    for stream, request in zip(streams, requests, strict=True):
        stream.connection.sendall(request)
        stream.connection.setblocking(False)
        waiting.register(stream.connection, selectors.EVENT_READ, stream)
    _read_streams(waiting, lambda: not all(stream.events for stream in streams))
    all_begun, before, cpu = time.perf_counter(), _count(streams), read_server_cpu(server)
    _read_streams(waiting, lambda: bool(waiting.get_map()))
    ended, after = time.perf_counter(), read_server_cpu(server)
    for stream in streams:
        assert _END in stream.tail, stream.tail
        # some tokens are half a character, and the finish reason has a separate event
        assert 0.8 * tokens <= stream.events <= tokens + 1, stream.events
    left = (_count(streams) - before) * clients * tokens / _count(streams)
    return StreamsResult(
        tokens_per_second=clients * tokens / (ended - began),
        decode_rate=left / (ended - all_begun),
        front=(after.front - cpu.front) / left,
        runner=(after.runner - cpu.runner) / left,
    )


def _count(streams: list[_Stream]) -> int:
    return sum(stream.events for stream in streams)


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)


def _build_request(model: str, tokens: int, seed: str) -> bytes:
    fields: Mapping[str, object] = {
        "model": model,
        "prompt": "".join(random.Random(seed).choices("abcdefghijklmnop", k=8)),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _read_streams(waiting: selectors.BaseSelector, go_on: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while go_on():
        assert time.monotonic() < deadline, "the server does not answer"
        for key, _ in waiting.select(1.0):
            stream: _Stream = key.data
            if data := stream.connection.recv(_READ_BYTES):
                stream.feed(data)
            else:
                waiting.unregister(stream.connection)
                stream.connection.close()
