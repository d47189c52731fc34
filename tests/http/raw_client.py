"""A client that sends arbitrary bytes."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from app.core.settings import Settings
from app.core.usage import ConnectionStats
from app.http.uvicorn_server import make_protocol_factory
from tests.api.asgi import Reply, serve_app
from tests.fakes import FakeGenerate, build_fake_app

PATIENCE = 30.0
CHAT = "/v1/chat/completions"
CHAT_BODY = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}


def head(method: str, path: str, **fields: Any) -> bytes:
    """The head of a request with a JSON body. Underscores in field names become hyphens."""
    all_fields = {"Host": "localhost", "Content-Type": "application/json"}
    all_fields |= {name.replace("_", "-"): str(value) for name, value in fields.items()}
    fields_text = "".join(f"{name}: {value}\r\n" for name, value in all_fields.items())
    return f"{method} {path} HTTP/1.1\r\n{fields_text}\r\n".encode()


def post(body: Any, path: str = CHAT, **fields: Any) -> bytes:
    content = json.dumps(body).encode()
    return head("POST", path, Content_Length=len(content), **fields) + content


GET = head("GET", "/v1/models")


class RawClient:
    """A client with one connection."""

    def __init__(self, port: int, **options: Any) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE, **options)
        self._read = bytearray()

    def send(self, content: bytes) -> "RawClient":
        self.socket.sendall(content)
        return self

    def send_slowly(self, content: bytes, seconds: float) -> "RawClient":
        """Sends one byte at a time, until the server responds."""
        self.socket.settimeout(seconds)
        for byte in content:
            with contextlib.suppress(ConnectionError):
                self.socket.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                self._read += self.socket.recv(65536)
                break
        self.socket.settimeout(PATIENCE)
        return self

    def read_until(self, complete: Callable[[bytearray], bool]) -> bytearray:
        """The bytes received, once they are complete or the server has closed the connection."""
        while not complete(self._read):
            with contextlib.suppress(ConnectionError):
                if more := self.socket.recv(65536):
                    self._read += more
                    continue
            break
        return self._read

    def read_reply(self) -> Reply:
        """The next reply."""
        self.read_until(lambda read: b"\r\n\r\n" in read)
        top, _, rest = self._read.partition(b"\r\n\r\n")
        first, *lines = top.decode().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        if "content-length" in headers:
            length = int(headers["content-length"])
            rest = self.read_until(lambda read: len(read) >= len(top) + 4 + length)[len(top) + 4 :]
            self._read = rest[length:]
            rest = rest[:length]
        else:
            rest = self.read_until(lambda read: read.endswith(b"0\r\n\r\n"))[len(top) + 4 :]
            self._read = bytearray()
        return Reply(status=int(first.split()[1]), headers=headers, body=bytes(rest), complete=True)

    def read_steadily(self, rate: int, seconds: float) -> int:
        """Reads `rate` bytes per second for `seconds`, or until the server closes. Returns the
        number of bytes read."""
        start, count = time.monotonic(), 0
        while (elapsed := time.monotonic() - start) < seconds:
            due = int(rate * elapsed) - count
            if due > 0:
                try:
                    more = self.socket.recv(min(due, 65536))
                except OSError:  # reset, or closed in the middle of a TLS record
                    break
                if not more:
                    break
                self._read += more
                count += len(more)
            time.sleep(0.01)
        return count

    def read_interim_status(self) -> int:
        """The status of an interim response: 100."""
        top, _, rest = self.read_until(lambda read: b"\r\n\r\n" in read).partition(b"\r\n\r\n")
        self._read = rest
        return int(top.split()[1])

    def is_closed(self, within: float = PATIENCE) -> bool:
        """Whether the server closes the connection within this many seconds, without sending
        more."""
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
def open_connections(port: int) -> Iterator[Callable[[], RawClient]]:
    """Yields a function that opens a connection; all are closed at the end."""
    clients: list[RawClient] = []

    def connect() -> RawClient:
        clients.append(RawClient(port))
        return clients[-1]

    try:
        yield connect
    finally:
        for client in clients:
            client.socket.close()


@contextlib.contextmanager
def run_server(
    generate: FakeGenerate | None = None, traffic: ConnectionStats | None = None, **settings: Any
) -> Iterator[Callable[[], RawClient]]:
    """Run a server with our connection class. Yields a function that opens a connection."""
    server_settings = Settings(**settings)
    app = build_fake_app(generate or FakeGenerate(), server_settings, traffic=traffic)
    protocol_factory = make_protocol_factory(server_settings, traffic)
    with (
        serve_app(
            app,
            http=protocol_factory,
            ssl_certfile=server_settings.tls_cert,
            ssl_keyfile=server_settings.tls_key,
        ) as url,
        open_connections(int(url.rpartition(":")[2])) as connect,
    ):
        yield connect
