"""Clients of an ASGI application: message by message, one request at once, or over a socket."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Generator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from app.core.settings import Settings
from tests.fakes import FakeGenerate, build_fake_app
from tests.waiting import LIMIT


@dataclass
class Reply:
    """An HTTP reply as it was on the wire. writes: the parts in which the body was sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    writes: list[bytes] = field(default_factory=list[bytes])
    complete: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


Message = MutableMapping[str, Any]


class Conversation:
    """One request to an ASGI application, message by message, in the role of the server. Without a
    body, the test puts the request's messages into `incoming`."""

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        body: bytes | None = b"",
        headers: dict[str, str] | None = None,
    ) -> None:
        path, _, query = path.partition("?")
        all_headers = {"host": "127.0.0.1", "content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                (name.lower().encode(), value.encode()) for name, value in all_headers.items()
            ],
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 50000),
        }
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.reply = Reply()
        self.stalled = False  # a client that reads the headers and nothing after them
        self._changed = asyncio.Condition()
        if body is not None:
            self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self.reply.complete:  # as uvicorn does
            return {"type": "http.disconnect"}
        return await self.incoming.get()

    async def _send(self, message: Message) -> None:
        if self.stalled and self.reply.status:
            await asyncio.get_running_loop().create_future()
        async with self._changed:
            if message["type"] == "http.response.start":
                assert not self.reply.status, "two replies to one request"
                self.reply.status = message["status"]
                self.reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                self.reply.body += message.get("body", b"")
                self.reply.writes += [message["body"]] if message.get("body") else []
                self.reply.complete = not message.get("more_body", False)
            self._changed.notify_all()
        if self.reply.complete:
            self.incoming.put_nowait({"type": "http.disconnect"})

    async def until(self, condition: Callable[[Reply], bool]) -> Reply:
        """Waits until the reply so far fulfils the condition."""
        async with asyncio.timeout(LIMIT), self._changed:
            await self._changed.wait_for(lambda: condition(self.reply))
        return self.reply

    def disconnect(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def end(self) -> Reply:
        """Waits until the application has returned."""
        async with asyncio.timeout(LIMIT):
            await self.task
        return self.reply


def send_request(
    generate: FakeGenerate,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> Reply:
    """One request to a separate application, which must leave no task behind. The body is sent as
    JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def run() -> Reply:
        app = build_fake_app(generate, Settings(**settings))
        reply = await Conversation(app, method, path, data, headers).end()
        assert not pending_tasks()
        return reply

    return asyncio.run(run())


def pending_tasks() -> set[str]:
    """Names of the tasks that still run. sse-starlette keeps one watcher per event loop."""
    return {
        name
        for task in asyncio.all_tasks()
        if task is not asyncio.current_task()
        and (name := getattr(task.get_coro(), "__qualname__", "")) != "_shutdown_watcher"
    }


@contextlib.contextmanager
def serve_app(app: Any, **options: Any) -> Generator[str]:
    """Run a real server on a free port, in a thread. Yields its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=2, **options)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.01)
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(LIMIT)
        assert not thread.is_alive()
