"""A client that says what it likes, byte by byte."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from app.core.server_stats import ConnectionStats
from app.core.settings import Settings
from app.http.uvicorn_server import make_protocol_factory
from tests.api.asgi import Reply, serving
from tests.fakes import FakeGenerate, build_fake_app

PATIENCE = 20.0
CHAT = "/v1/chat/completions"
ASK = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}


def head(method: str, path: str, **fields: Any) -> bytes:
    """A request's head, which asks for JSON as JSON. An underscore stands for a hyphen."""
    lines = {"Host": "localhost", "Content-Type": "application/json"}
    lines |= {name.replace("_", "-"): str(value) for name, value in fields.items()}
    told = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{told}\r\n".encode()


def post(body: Any, path: str = CHAT, **fields: Any) -> bytes:
    content = json.dumps(body).encode()
    return head("POST", path, Content_Length=len(content), **fields) + content


GET = head("GET", "/v1/models")


class Line:
    """A connection."""

    def __init__(self, port: int, **options: Any) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE, **options)
        self._read = bytearray()

    def say(self, content: bytes) -> "Line":
        self.socket.sendall(content)
        return self

    def dribble(self, content: bytes, seconds: float) -> "Line":
        """One byte after the other, until somebody answers."""
        self.socket.settimeout(seconds)
        for byte in content:
            with contextlib.suppress(ConnectionError):
                self.socket.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                self._read += self.socket.recv(65536)
                break
        self.socket.settimeout(PATIENCE)
        return self

    def until(self, whole: Callable[[bytearray], bool]) -> bytearray:
        """What came, once it is whole or the other side has closed."""
        while not whole(self._read):
            with contextlib.suppress(ConnectionError):
                if more := self.socket.recv(65536):
                    self._read += more
                    continue
            break
        return self._read

    def reply(self) -> Reply:
        """The next reply."""
        self.until(lambda read: b"\r\n\r\n" in read)
        top, _, rest = self._read.partition(b"\r\n\r\n")
        first, *lines = top.decode().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        if "content-length" in headers:
            length = int(headers["content-length"])
            rest = self.until(lambda read: len(read) >= len(top) + 4 + length)[len(top) + 4 :]
            self._read = rest[length:]
            rest = rest[:length]
        else:
            rest = self.until(lambda read: read.endswith(b"0\r\n\r\n"))[len(top) + 4 :]
            self._read = bytearray()
        return Reply(status=int(first.split()[1]), headers=headers, body=bytes(rest), complete=True)

    def read_steadily(self, rate: int, seconds: float) -> int:
        """Reads so many bytes per second for so long, or until the other side closes. The bytes
        that came."""
        began, count = time.monotonic(), 0
        while (passed := time.monotonic() - began) < seconds:
            due = int(rate * passed) - count
            if due > 0:
                try:
                    more = self.socket.recv(min(due, 65536))
                except OSError:  # reset, or torn in the middle of a record
                    break
                if not more:
                    break
                self._read += more
                count += len(more)
            time.sleep(0.01)
        return count

    def interim(self) -> int:
        """The status of one that goes before a reply: 100."""
        top, _, rest = self.until(lambda read: b"\r\n\r\n" in read).partition(b"\r\n\r\n")
        self._read = rest
        return int(top.split()[1])

    def closed(self, within: float = PATIENCE) -> bool:
        """Whether the other side closes, without another word, in so many seconds."""
        self.socket.settimeout(within)
        try:
            return self.socket.recv(65536) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        finally:
            self.socket.settimeout(PATIENCE)


@contextlib.contextmanager
def calling(port: int) -> Iterator[Callable[[], Line]]:
    """Yields what opens a connection; all are closed in the end."""
    lines: list[Line] = []

    def opened() -> Line:
        lines.append(Line(port))
        return lines[-1]

    try:
        yield opened
    finally:
        for line in lines:
            line.socket.close()


@contextlib.contextmanager
def door(
    generate: FakeGenerate | None = None, traffic: ConnectionStats | None = None, **settings: Any
) -> Iterator[Callable[[], Line]]:
    """A server with our connections. Yields what opens one."""
    chosen = Settings(**settings)
    app = build_fake_app(generate or FakeGenerate(), chosen, traffic=traffic)
    made = make_protocol_factory(chosen, traffic)
    with serving(app, http=made) as url, calling(int(url.rpartition(":")[2])) as opens:
        yield opens


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
