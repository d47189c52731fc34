"""Too large, malformed or unsupported bodies; the format of errors; event streams."""

import asyncio
import gc
import http.client
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

import orjson
import pytest

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.http.responses import ERROR_FORMATS, encode_long_array, error_response, render_error
from app.http.streaming import (
    KEEP_ALIVE_COMMENT,
    KeepAlive,
    encode_json_line,
    encode_sse_event,
    send_event_stream,
)
from tests.api.asgi import Conversation, send_request, serve_app
from tests.fakes import FakeGenerate, build_fake_app
from tests.rows import rows
from tests.server_process import TIMEOUT

CHAT = "/v1/chat/completions"
BODY = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}
POSTS = (CHAT, "/v1/completions", "/completion", "/v1/detokenize")


@pytest.fixture
def call():
    """call(method, path, body, headers, **settings) → Reply"""
    return partial(send_request, FakeGenerate())


@rows("path", POSTS)
@rows(
    "body",
    [
        b"",
        b'{"model": ',
        b"\xff\xfe",
        b'{"a": "\xff"}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"temperature": 1e400}',
        b'{"a": "\\ud800"}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"{} {}",
        b"7",
        b"null",
        b'"text"',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_must_be_a_json_object(call: Any, path: str, body: bytes):
    reply = call("POST", path, body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


@rows("path", POSTS)
@rows("kind", ["text/plain", "", "application/x-www-form-urlencoded", "json"])
def test_other_content_types_are_rejected(call: Any, path: str, kind: str):
    reply = call("POST", path, BODY, {"content-type": kind})
    assert reply.status == 415
    assert "-H 'Content-Type: application/json'" in reply.error["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_the_content_type_is_case_insensitive(call: Any, kind: str):
    assert call("POST", CHAT, BODY, {"content-type": kind}).status == 200


@pytest.mark.parametrize("path", [*POSTS, "/v1/tokenize"])
def test_a_body_beyond_the_limit_is_rejected(call: Any, path: str):
    assert call("POST", path, b" " * 101, max_body=100).status == 413


def test_the_limit_itself_is_allowed(call: Any):
    body = json.dumps(BODY).encode()
    assert call("POST", CHAT, body, max_body=len(body)).status == 200


@pytest.mark.parametrize("length", ["101", "9" * 5000])
def test_a_content_length_beyond_the_limit_is_rejected_before_reading(length: str):
    async def run() -> None:
        app = build_fake_app(FakeGenerate(), Settings(max_body=100))
        headers = {"content-length": length}
        reply = await Conversation(app, "POST", CHAT, None, headers).end()
        assert reply.status == 413

    asyncio.run(run())


def test_an_endless_body_is_rejected_while_it_arrives():
    async def run() -> None:
        app = build_fake_app(FakeGenerate(), Settings(max_body=100))
        conversation = Conversation(app, "POST", CHAT, None)
        for _ in range(11):
            part = {"type": "http.request", "body": b" " * 10, "more_body": True}
            conversation.incoming.put_nowait(part)
        assert (await conversation.end()).status == 413

    asyncio.run(run())


def test_a_body_may_arrive_in_parts():
    async def run() -> None:
        conversation = Conversation(build_fake_app(FakeGenerate(), Settings()), "POST", CHAT, None)
        body = json.dumps(BODY).encode()
        for n, byte in enumerate(body):
            part = {"type": "http.request", "body": bytes([byte]), "more_body": n < len(body) - 1}
            conversation.incoming.put_nowait(part)
        assert (await conversation.end()).status == 200

    asyncio.run(run())


def test_the_connection_is_kept_after_a_too_large_body():
    """The client reads the 413 while it is still sending, and reuses the connection."""
    with serve_app(build_fake_app(FakeGenerate(), Settings(max_body=1000))) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT)
        headers = {"Content-Type": "application/json"}
        for _ in range(2):
            connection.request("POST", CHAT, b" " * 5_000_000, headers)
            assert connection.getresponse().read().startswith(b'{"error"')
            socket = connection.sock
            connection.request("POST", CHAT, json.dumps(BODY).encode(), headers)
            reply = connection.getresponse()
            assert reply.status == 200
            reply.read()
            assert connection.sock is socket
        connection.close()


@rows("kind", ErrorKind)
def test_every_error_kind_has_a_status(kind: ErrorKind):
    error = AppError(kind, "what", param="where")
    assert set(render_error(error)["error"]) == {"message", "type", "param", "code"}
    reply = error_response(error)
    assert reply.status_code == ERROR_FORMATS[kind].status >= 400
    assert reply.headers.get("retry-after") == {503: "1", 429: "1"}.get(reply.status_code)


def test_retry_after_of_the_error_is_sent():
    assert (
        error_response(AppError(ErrorKind.BUSY, "what", retry_after=17)).headers["retry-after"]
        == "17"
    )


def test_the_code_of_the_error_overrides_that_of_its_kind():
    error = AppError(ErrorKind.CONTEXT_LENGTH, "what", code="prompt_alone_is_too_long")
    assert render_error(error)["error"]["code"] == "prompt_alone_is_too_long"


@pytest.mark.parametrize("frame", [encode_sse_event, encode_json_line])
def test_a_frame_has_no_unicode_line_breaks(frame: Any):
    """A model generated U+0085, and httpx's `iter_lines` split the event into two lines."""
    text = "a\x85b\u2028c\u2029d\x0b\x1ce"
    [line] = frame({"text": text}).decode().rstrip("\n").splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize("count", [0, 1, 512, 513, 2000])
def test_a_long_array_is_encoded_in_pieces(count: int):
    items = [{"token": f"t{n}", "top": [n, None, "\u2028,]"]} for n in range(count)]
    assert orjson.dumps({"a": encode_long_array(items)}) == orjson.dumps({"a": items})
    assert isinstance(encode_long_array(items), list) == (count <= 512)


# Keep-alive comments


class StreamClient:
    """Sends an event stream to a client. messages: the received ones. reading: the client reads
    only while this is set."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.reading = asyncio.Event()
        self.reading.set()

    async def _receive_message(self, message: Any) -> None:
        await self.reading.wait()
        self.messages.append(message)

    async def send(self, frames: AsyncIterator[bytes], keep_alive: float) -> None:
        async with asyncio.timeout(TIMEOUT):
            await send_event_stream(frames, self._receive_message, KeepAlive(seconds=keep_alive))

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message.get("body")]


async def frames_with_pauses(*steps: bytes | float) -> AsyncGenerator[bytes]:
    for step in steps:
        if isinstance(step, bytes):
            yield step
        else:
            await asyncio.sleep(step)


def test_only_silent_streams_get_keep_alives():
    async def run() -> None:
        silent, busy = StreamClient(), StreamClient()
        steps = [step for _ in range(30) for step in (b"data: 1\n\n", 0.1)]
        await asyncio.gather(
            silent.send(frames_with_pauses(b"data: 1\n\n", 0.3, b"data: 2\n\n"), 0.05),
            busy.send(frames_with_pauses(*steps), 5.0),
        )
        assert busy.bodies == [b"data: 1\n\n"] * 30
        end = silent.bodies.index(b"data: 2\n\n")
        first, *comments = silent.bodies[:end]
        assert first == b"data: 1\n\n"
        assert set(comments) == {KEEP_ALIVE_COMMENT}
        # one more may follow the last frame if the machine stalls before the stream ends
        assert silent.bodies[end + 1 :] in ([], [KEEP_ALIVE_COMMENT])

    asyncio.run(run())


def test_keep_alives_do_not_pile_up_for_a_client_that_does_not_read():
    """They would be queued, and delay the answer."""

    class Stalling(StreamClient):
        async def _receive_message(self, message: Any) -> None:
            await super()._receive_message(message)
            if len(self.bodies) == 1:
                self.reading.clear()
                asyncio.get_running_loop().call_later(0.2, self.reading.set)

    async def run() -> None:
        client = Stalling()
        await client.send(frames_with_pauses(b"data: 1\n\n", 0.01, b"data: 2\n\n"), 0.05)
        assert [body for body in client.bodies if body != KEEP_ALIVE_COMMENT] == [
            b"data: 1\n\n",
            b"data: 2\n\n",
        ]
        # one may have been queued before the second frame
        assert len(client.bodies) <= 3

    asyncio.run(run())


def test_nothing_is_sent_after_the_end_of_a_stream():
    async def run() -> None:
        client = StreamClient()
        await client.send(frames_with_pauses(b"data: 1\n\n"), 0.01)
        count = len(client.messages)
        # longer than the interval of keep-alives; a shorter sleep could only miss one
        await asyncio.sleep(0.05)
        assert len(client.messages) == count
        assert not client.messages[-1]["more_body"]

    asyncio.run(run())


def test_a_disconnect_before_a_keep_alive_is_not_logged(
    caplog: pytest.LogCaptureFixture,
):
    class Gone(StreamClient):
        async def _receive_message(self, message: Any) -> None:
            if message.get("body") == KEEP_ALIVE_COMMENT:
                raise OSError("the client disconnected")
            await super()._receive_message(message)

    async def run() -> None:
        client = Gone()
        await client.send(frames_with_pauses(b"data: 1\n\n", 0.1, b"data: 2\n\n"), 0.02)
        assert client.bodies == [b"data: 1\n\n", b"data: 2\n\n"]

    asyncio.run(run())
    gc.collect()
    assert caplog.messages == []


def test_no_timer_and_no_task_is_created_per_frame(monkeypatch: pytest.MonkeyPatch):
    created: Counter[str] = Counter()

    async def count_objects(num_frames: int) -> dict[str, int]:
        created.clear()
        client = StreamClient()
        await client.send(frames_with_pauses(*[b"data: 1\n\n"] * num_frames), 60)
        assert len(client.bodies) == num_frames
        return dict(created)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for name in ("call_later", "call_at", "create_task"):
            original = getattr(loop, name)

            def counting(
                *args: Any, name: str = name, original: Any = original, **kwargs: Any
            ) -> Any:
                created[name] += 1
                return original(*args, **kwargs)

            monkeypatch.setattr(loop, name, counting)
        few, many = await count_objects(1), await count_objects(1000)
        assert few == many
        assert few["call_later"] == 1, "the timer is counted"
        assert "create_task" not in few

    asyncio.run(run())
