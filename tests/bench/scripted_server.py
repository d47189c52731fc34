"""An OpenAI-compatible server that follows a script, for tests of the load test."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


class ScriptedExchange:
    """One request, and the answer of the script. headers: by lower-case name."""

    def __init__(self, handler: BaseHTTPRequestHandler, body: Json) -> None:
        self._handler = handler
        self.method = handler.command
        self.path = handler.path
        self.headers = {name.lower(): value for name, value in handler.headers.items()}
        self.body = body

    def send_json(self, body: Json, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self._handler.send_response(status)
        self._handler.send_header("Content-Type", "application/json")
        self._handler.send_header("Content-Length", str(len(data)))
        self._handler.end_headers()
        self._handler.wfile.write(data)

    def start_stream(self) -> None:
        """The connection delimits the body, as in mlx-lm's server."""
        self._handler.send_response(200)
        self._handler.send_header("Content-Type", "text/event-stream")
        self._handler.end_headers()

    def write(self, data: bytes) -> None:
        self._handler.wfile.write(data)
        self._handler.wfile.flush()

    def send_stream(self, events: Sequence[bytes]) -> None:
        self.start_stream()
        for event in events:
            self.write(event)


Script = Callable[[ScriptedExchange], None]


class ScriptedServer:
    """requests: those that have arrived, in order."""

    def __init__(self, script: Script) -> None:
        self.requests: list[ScriptedExchange] = []
        lock = threading.Lock()
        arrived = self.requests

        class Handler(BaseHTTPRequestHandler):
            def _handle(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                exchange = ScriptedExchange(self, body)
                with lock:
                    arrived.append(exchange)
                with contextlib.suppress(ConnectionError):
                    script(exchange)

            do_GET = do_POST = _handle  # the names of the standard library

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def list_prompts(self) -> list[str]:
        """The texts of the streamed requests, in order of arrival."""
        bodies = [request.body for request in self.requests if request.body.get("stream")]
        return [body.get("prompt") or body["messages"][-1]["content"] for body in bodies]

    @contextlib.contextmanager
    def run(self) -> "Iterator[ScriptedServer]":
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def event(chunk: Json) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def text_event(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "delta": {"content": text}}]})


def finish_event(reason: str = "length") -> bytes:
    return event({"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": reason}]})


def usage_event(completion: int, prompt: int = 10, cached: int | None = None) -> bytes:
    usage: Json = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": usage})


DONE = b"data: [DONE]\n\n"


def answer(exchange: ScriptedExchange) -> None:
    """A server whose tokens are words, and whose chat template adds two. It completes every request
    with as many tokens as requested."""
    if exchange.path.endswith("/models"):
        exchange.send_json({"data": [{"id": "scripted"}, {"id": "other"}]})
        return
    body = exchange.body
    text = body.get("prompt") or body["messages"][-1]["content"]
    prompt = len(text.split()) + (2 if "messages" in body else 0)
    count = body["max_tokens"]
    if body.get("stream"):
        words = [text_event("w ")] * count
        exchange.send_stream([*words, finish_event(), usage_event(count, prompt, 0), DONE])
    else:
        usage = {"prompt_tokens": prompt, "completion_tokens": count}
        exchange.send_json({"choices": [], "usage": usage})
