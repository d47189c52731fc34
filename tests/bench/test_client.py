"""One streamed request: the parser, the recorded times and tokens, every kind of failure."""

import asyncio
import json
import ssl
import threading
from collections.abc import Sequence
from itertools import pairwise

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from app.bench.client import (
    ConnectionPool,
    EventStreamParser,
    HttpExchange,
    RequestFailure,
    RequestRecord,
    ServerAddress,
    StreamedRequest,
    StreamRecorder,
    make_stream_body,
)
from app.core.errors import AppError
from tests.bench.scripted_server import (
    DONE,
    Script,
    ScriptedExchange,
    ScriptedServer,
    event,
    finish_event,
    text_event,
    usage_event,
)

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1", 8080, ""),
        ("http://127.0.0.1:8080/", "127.0.0.1", 8080, ""),
        ("http://127.0.0.1:8080/v1", "127.0.0.1", 8080, ""),
        ("http://[::1]:9/v1/", "::1", 9, ""),
        ("http://example", "example", 80, ""),
        ("https://example/openai/v1", "example", 443, "/openai"),
    ],
)
def test_a_url_with_or_without_v1_is_an_address(
    url: str, host: str, port: int, prefix: str
) -> None:
    address = ServerAddress.parse(url)
    assert (address.host, address.port, address.prefix) == (host, port, prefix)
    assert (address.ssl_context is not None) is url.startswith("https")


def test_the_host_header_has_brackets_around_an_ipv6_address() -> None:
    assert ServerAddress.parse("http://[::1]:9").authority == "[::1]:9"


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8080", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://a?b"],
)
def test_another_url_is_rejected(url: str) -> None:
    with pytest.raises(AppError, match="is not the URL of a server"):
        ServerAddress.parse(url)


@pytest.mark.parametrize(("insecure", "kind"), [(False, "connection_failed"), (True, "http_500")])
def test_a_certificate_is_verified_unless_insecure(insecure: bool, kind: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def send() -> str:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        address = ServerAddress.parse(f"https://localhost:{port}", insecure=insecure)
        async with server:
            measured = await StreamedRequest(
                ConnectionPool(address), "/v1/x", make_stream_body({})
            ).run(30)
        assert measured.error is not None
        return measured.error.kind

    assert asyncio.run(send()) == kind


class KeepAliveServer:
    """A server that keeps connections open. connections: the number of connections so far.
    close_after: the number of responses after which a connection is closed without notice."""

    def __init__(self, close_after: int) -> None:
        self._close_after = close_after
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            for _ in range(self._close_after):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            # one more request, which is not answered
            await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.transport.abort()


async def fetch(script: KeepAliveServer, count: int, max_idle: int) -> list[bytes]:
    server = await asyncio.start_server(script.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = ConnectionPool(ServerAddress.parse(f"http://127.0.0.1:{port}"), max_idle)
    try:
        return [await HttpExchange(pool, "/x", method="GET").read_body() for _ in range(count)]
    finally:
        pool.close()
        server.close()


@pytest.mark.parametrize(("max_idle", "connections"), [(1, 1), (0, 5)])
def test_connections_are_reused(max_idle: int, connections: int) -> None:
    script = KeepAliveServer(close_after=9)
    assert asyncio.run(fetch(script, 5, max_idle)) == [b"ok"] * 5
    assert script.connections == connections


def test_a_connection_that_the_server_closes_while_idle_is_replaced() -> None:
    script = KeepAliveServer(close_after=2)
    assert asyncio.run(fetch(script, 5, 1)) == [b"ok"] * 5
    assert script.connections == 3


def test_a_new_connection_that_the_server_closes_is_a_failure() -> None:
    script = KeepAliveServer(close_after=0)
    with pytest.raises(RequestFailure) as raised:
        asyncio.run(fetch(script, 1, 1))
    assert raised.value.kind == "disconnected"
    assert script.connections == 1


def record(
    pieces: Sequence[tuple[float, bytes]], *, sent: float = 0.0, max_tokens: int | None = None
) -> RequestRecord:
    recorder = StreamRecorder()
    for now, piece in pieces:
        recorder.feed(now, piece)
    return recorder.make_record(sent, max_tokens=max_tokens)


def make_pool(url: str, api_key: str | None = None) -> ConnectionPool:
    return ConnectionPool(ServerAddress.parse(url, api_key))


def find_failure(pieces: Sequence[tuple[float, bytes]]) -> RequestFailure:
    with pytest.raises(RequestFailure) as raised:
        record(pieces)
    return raised.value


def send(script: Script, *, max_tokens: int = 3, time_limit: float | None = 30.0) -> RequestRecord:
    body = make_stream_body({"model": "m", "prompt": "p", "max_tokens": max_tokens})
    with ScriptedServer(script).run() as server:
        request = StreamedRequest(make_pool(server.url), PATH, body)
        return asyncio.run(request.run(time_limit))


EVENTS = b"data: a\n\ndata:b\ndata: c\r\n\r\n: comment 1/2\n\nevent: x\ndata: [DONE]\n\ndata: cut"


@given(st.lists(st.integers(0, len(EVENTS))))
def test_events_do_not_depend_on_the_pieces_in_which_they_arrive(cuts: list[int]) -> None:
    parser = EventStreamParser()
    places = [0, *sorted(cuts), len(EVENTS)]
    events = [data for start, end in pairwise(places) for data in parser.feed(EVENTS[start:end])]
    assert events == [b"a", b"b\nc", b"[DONE]"]
    assert parser.comments == [b": comment 1/2"]


def test_times_are_those_of_chunks_with_output_and_latency_ends_with_the_last_choice() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    measured = record(
        [
            (10.5, role),
            (11.0, text_event("a")),
            (11.25, b": keep-alive\n\n"),
            (11.5, text_event("b")),
            (12.0, finish_event("stop")),
            (12.5, usage_event(3, prompt=7, cached=4) + DONE),
        ],
        sent=10.0,
    )
    assert measured.ttft == 1.0
    assert measured.itl == (0.5,)
    assert measured.latency == 2.0
    assert measured.tpot == 0.5
    assert (measured.prompt_tokens, measured.output_tokens, measured.cached_tokens) == (7, 3, 4)
    assert measured.finish_reason == "stop"


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning_content": "x"},
        {"reasoning": "x"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_each_kind_of_output_is_a_token(delta: dict[str, object]) -> None:
    chunk = event({"choices": [{"index": 0, "delta": delta}]})
    assert record([(1.0, chunk), (2.0, finish_event() + usage_event(1) + DONE)]).ttft == 1.0


def test_tokens_are_counted_by_the_server_and_not_by_chunks() -> None:
    measured = record([(1.0, text_event("three tokens")), (4.0, finish_event() + usage_event(4))])
    assert (len(measured.arrivals), measured.output_tokens, measured.tpot) == (1, 4, 1.0)


def test_usage_in_each_chunk_counts_once() -> None:
    """vLLM's continuous_usage_stats."""
    chunks = [
        event({"choices": [{"text": "x"}], "usage": {"completion_tokens": n, "prompt_tokens": 5}})
        for n in (1, 2, 3)
    ]
    measured = record([*enumerate(chunks, 1), (4.0, finish_event("stop") + DONE)])
    assert measured.output_tokens == 3


def test_without_usage_the_finish_reason_length_tells_the_count() -> None:
    pieces = [(1.0, text_event("x")), (2.0, finish_event("length") + DONE)]
    assert record(pieces, max_tokens=64).output_tokens == 64


def test_one_token_has_no_tpot() -> None:
    measured = record([(1.0, text_event("x") + finish_event() + usage_event(1) + DONE)])
    assert (measured.ttft, measured.latency, measured.itl, measured.tpot) == (1.0, 1.0, (), None)


def test_tokens_without_text_are_output_and_have_no_tpot() -> None:
    """With `ignore_eos`, a model may generate only end-of-sequence tokens."""
    measured = record([(1.0, text_event("")), (2.0, finish_event() + usage_event(12) + DONE)])
    assert (measured.output_tokens, measured.ttft, measured.tpot) == (12, 2.0, None)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (finish_event("stop") + usage_event(0) + DONE, "empty"),
        (usage_event(12) + DONE, "empty"),
        (text_event("x"), "disconnected"),
        (text_event("x") + finish_event("stop") + DONE, "no_usage"),
        (b"data: nonsense\n\n", "invalid_response"),
        (b"data: [1]\n\n", "invalid_response"),
        (event({"choices": ["x"]}), "invalid_response"),
        (event({"error": {"code": "engine_error", "message": "m"}}), "stream_error engine_error"),
        (event({"error": "m"}), "stream_error"),
    ],
)
def test_an_incomplete_stream_is_a_failure(data: bytes, kind: str) -> None:
    assert find_failure([(1.0, data)]).kind == kind


def test_a_request_over_a_connection() -> None:
    sent: list[ScriptedExchange] = []

    def script(exchange: ScriptedExchange) -> None:
        sent.append(exchange)
        events = [text_event("a"), text_event("b"), finish_event(), usage_event(3), DONE]
        exchange.send_stream(events)

    measured = send(script)
    assert measured.error is None
    assert measured.output_tokens == 3
    assert measured.sent > 0
    assert 0 < measured.ttft <= measured.latency
    [exchange] = sent
    assert exchange.body["stream_options"] == {"include_usage": True}
    assert "authorization" not in exchange.headers


def test_the_api_key_is_sent_but_not_shown() -> None:
    address = ServerAddress.parse("http://127.0.0.1:1", "a-secret")
    assert "a-secret" not in repr(address)
    keys: list[str] = []

    def script(exchange: ScriptedExchange) -> None:
        keys.append(exchange.headers["authorization"])
        exchange.send_json({}, status=500)

    with ScriptedServer(script).run() as server:
        pool = make_pool(server.url, "a-secret")
        asyncio.run(StreamedRequest(pool, PATH, make_stream_body({})).run())
    assert keys == ["Bearer a-secret"]


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (
            429,
            {"error": {"code": "server_busy", "message": "full"}},
            "http_429 server_busy",
            "full",
        ),
        (400, {"error": {"code": None, "message": "no"}}, "http_400", "no"),
        (422, {"detail": "vLLM"}, "http_422", "{'detail': 'vLLM'}"),
        (503, {"error": "loading"}, "http_503", "loading"),
    ],
)
def test_a_rejection_has_its_status_code_and_message(
    status: int, body: dict[str, object], kind: str, message: str
) -> None:
    measured = send(lambda exchange: exchange.send_json(body, status=status))
    assert measured.error is not None
    assert (measured.error.kind, measured.error.message) == (kind, message)


def test_a_server_that_closes_the_connection_is_a_failure() -> None:
    measured = send(lambda exchange: None)
    assert measured.error is not None
    assert measured.error.kind == "disconnected"


def test_a_server_of_another_protocol_is_a_failure() -> None:
    measured = send(lambda exchange: exchange.write(b"220 mail.example ESMTP\r\n\r\n"))
    assert measured.error is not None
    assert measured.error.kind == "invalid_response"


def test_a_missing_server_is_a_failure() -> None:
    with ScriptedServer(lambda exchange: None).run() as server:
        pool = make_pool(server.url)
    measured = asyncio.run(StreamedRequest(pool, PATH, make_stream_body({})).run())
    assert measured.error is not None
    assert measured.error.kind == "connection_failed"


def test_a_request_without_an_end_fails_after_its_time_limit() -> None:
    release = threading.Event()

    def script(exchange: ScriptedExchange) -> None:
        exchange.send_stream([text_event("a")])
        release.wait(30)

    try:
        measured = send(script, time_limit=0.2)
    finally:
        release.set()
    assert measured.error is not None
    assert (measured.error.kind, measured.latency >= 0.2) == ("timeout", True)


def test_a_chunked_response_is_decoded() -> None:
    body = text_event("a") + finish_event() + usage_event(1) + DONE

    def script(exchange: ScriptedExchange) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        pieces = [body[:9], body[9:10], body[10:]]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        exchange.write(head + chunks + b"0\r\n\r\n")

    assert send(script).output_tokens == 1


def test_comments_are_recorded_with_their_times() -> None:
    recorder = StreamRecorder()
    recorder.feed(1.0, b": prefill 1/4\n\n")
    recorder.feed(2.0, b": prefill 4/4\n\n" + text_event("x"))
    assert recorder.comments == [(1.0, b": prefill 1/4"), (2.0, b": prefill 4/4")]


def test_a_body_asks_for_usage() -> None:
    assert json.loads(json.dumps(make_stream_body({"model": "m"}))) == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
