"""Traces as a collector receives them: OTLP over HTTP with protobuf."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from app.core.errors import AppError, ErrorKind
from app.core.events import Event, ModelLoading, Timings
from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.request_lifecycle import ObservedGenerate
from app.core.requests import (
    Conversation,
    EmbedInput,
    EmbedRequest,
    GenerateRequest,
    Message,
    PromptBatch,
)
from app.core.settings import Settings
from app.observability.otel_tracing import OtelTracing, split_phases
from app.observability.tracing import create_tracing
from tests.batches import flatten
from tests.fakes import CARD, FOREVER, HELLO, FakeGenerate, FakeModel, Script, text
from tests.server_process import ROOT, TIMEOUT, run_server

SECRET = "what nobody may read"
CHAT = GenerateRequest(
    model=CARD.id,
    prompt=Conversation(messages=(Message(role="user", content=SECRET),)),
    sampling={"temperature": 0.5, "top_p": 0.9, "seed": 7},
    max_tokens=20,
    stop=(SECRET,),
    caller="ada",
)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """An OTLP receiver. requests: the path and the body of each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        self.server.requests.append((self.path, request))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Trace:
    """The spans of one request."""

    root: Span
    children: list[Span]

    @property
    def attributes(self) -> dict[str, Any]:
        return {pair.key: to_python(pair.value) for pair in self.root.attributes}


def to_python(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return [to_python(one) for one in value.array_value.values]
    return getattr(value, str(value.WhichOneof("value")))


async def drain(events: Any) -> list[Event]:
    return [event async for event in flatten(events)]


def trace_request(
    collector: Collector,
    script: Script | None = None,
    request: GenerateRequest | EmbedRequest = CHAT,
    *,
    error: Exception | None = None,
    disconnect: bool = False,
    context: RequestContext | None = None,
) -> Trace:
    """The trace of one request, after the exporter has stopped."""
    generate = FakeGenerate(open_error=error) if script is None else FakeGenerate(script)

    async def consume(traced: ObservedGenerate) -> None:
        if isinstance(request, EmbedRequest):
            await traced.embed(request, FakeModel())
            return
        async with traced.open(request, FakeModel()) as events:
            if disconnect:
                await anext(events)
                return
            await drain(events)

    async def run() -> None:
        REQUEST_CONTEXT.set(context)
        settings = Settings(otlp=collector.address, host="127.0.0.1", port=8123)
        spans = OtelTracing(settings)
        try:
            await consume(ObservedGenerate(generate, spans.observe))
        except (AppError, KeyError):
            pass
        finally:
            await spans.stop()

    asyncio.run(run())
    assert {path for path, _ in collector.requests} == {"/v1/traces"}
    [root] = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    children = [span for span in collector.spans if span is not root]
    for child in children:
        assert child.parent_span_id == root.span_id
        assert child.trace_id == root.trace_id
    exported = b"".join(r.SerializeToString() for _, r in collector.requests)
    assert SECRET.encode() not in exported
    return Trace(root, sorted(children, key=lambda span: span.start_time_unix_nano))


def test_a_request_is_a_span_with_the_semantic_conventions(collector: Collector):
    trace = trace_request(collector, HELLO, context=RequestContext(id="mine"))
    assert trace.root.name == f"chat {CARD.id}"
    assert trace.root.status.code == Status.STATUS_CODE_UNSET
    assert not trace.root.parent_span_id
    assert trace.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mlxrunner",
        "gen_ai.request.model": CARD.id,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.response.model": CARD.id,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.reasoning.output_tokens": 0,
        "server.address": "127.0.0.1",
        "server.port": 8123,
        "mlxrunner.request.id": "mine",
        "mlxrunner.caller": "ada",
    }
    [(_, export_request)] = collector.requests
    resource = {
        p.key: to_python(p.value) for p in export_request.resource_spans[0].resource.attributes
    }
    assert resource["service.name"] == "mlxrunner"


def test_the_phases_are_consecutive_spans(collector: Collector):
    trace = trace_request(collector, [ModelLoading(progress=1), *HELLO])
    assert [span.name for span in trace.children] == ["load", "queue", "prefill", "decode"]
    durations = {
        span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        for span in trace.children
    }
    assert durations["prefill"] == 2
    assert durations["decode"] == 30
    assert durations["queue"] == 3
    for one, following in zip(trace.children, trace.children[1:], strict=False):
        assert one.end_time_unix_nano == following.start_time_unix_nano
    assert abs(trace.root.start_time_unix_nano / 1e9 - time.time()) < 60


def test_phases_cover_a_choice_from_arrival_to_end():
    timings = Timings(prefill_ns=20, decode_ns=300, total_ns=1000)
    phases = split_phases(5000, timings)
    assert phases == [("queue", 5000, 5680), ("prefill", 5680, 5700), ("decode", 5700, 6000)]


@pytest.mark.parametrize("flags", ["01", "00"])
def test_the_trace_of_the_client_is_continued(collector: Collector, flags: str):
    """W3C Trace Context. If the client does not sample its trace, nothing is exported."""
    context = RequestContext(id="x", traceparent=f"00-{TRACE}-{PARENT}-{flags}")
    if flags == "00":
        with pytest.raises(AssertionError):
            trace_request(collector, HELLO, context=context)
        assert collector.requests == []
        return
    trace = trace_request(collector, HELLO, context=context)
    assert trace.root.trace_id.hex() == TRACE
    assert trace.root.parent_span_id.hex() == PARENT


@pytest.mark.parametrize("header", ["", "x", "00-0-0-01", f"ff-{TRACE}-{PARENT}-01", "\x1b" * 999])
def test_an_invalid_traceparent_starts_a_new_trace(collector: Collector, header: str):
    trace = trace_request(collector, HELLO, context=RequestContext(id="x", traceparent=header))
    assert not trace.root.parent_span_id
    assert trace.root.trace_id.hex() != TRACE


@pytest.mark.parametrize(
    ("error", "type_", "status"),
    [
        (AppError(ErrorKind.BUSY, SECRET), "server_busy", Status.STATUS_CODE_UNSET),
        (AppError(ErrorKind.INVALID, SECRET), "invalid_request", Status.STATUS_CODE_UNSET),
        (AppError(ErrorKind.ENGINE, SECRET), "engine_error", Status.STATUS_CODE_ERROR),
        (KeyError(SECRET), "KeyError", Status.STATUS_CODE_ERROR),
    ],
)
def test_an_error_is_recorded_by_its_type(
    collector: Collector, error: Exception, type_: str, status: int
):
    trace = trace_request(collector, error=error)
    assert trace.attributes["error.type"] == type_
    assert trace.root.status.code == status
    assert "gen_ai.usage.input_tokens" not in trace.attributes


def test_a_failed_stream_is_an_error(collector: Collector):
    trace = trace_request(collector, [text("a"), AppError(ErrorKind.ENGINE, SECRET)])
    assert trace.attributes["error.type"] == "engine_error"


def test_a_disconnect_is_not_a_server_error(collector: Collector):
    trace = trace_request(collector, [text("a"), FOREVER], disconnect=True)
    assert trace.attributes["error.type"] == "cancelled"
    assert trace.root.status.code == Status.STATUS_CODE_UNSET


def test_each_choice_has_its_phases_and_a_prompt_is_counted_once(collector: Collector):
    request = replace(CHAT, n=2, prompt=PromptBatch(prompts=(SECRET, SECRET)))
    generate = FakeGenerate()
    script = generate.script(request) if callable(generate.script) else ()
    trace = trace_request(collector, script, request)
    assert trace.root.name == f"text_completion {CARD.id}"
    assert trace.attributes["gen_ai.request.choice.count"] == 2
    assert trace.attributes["gen_ai.usage.input_tokens"] == 14
    assert trace.attributes["gen_ai.usage.output_tokens"] == 8
    assert trace.attributes["gen_ai.response.finish_reasons"] == ["stop"] * 4
    choices = {to_python(span.attributes[0].value) for span in trace.children}
    assert choices == {0, 1, 2, 3}


def test_embeddings_are_a_separate_operation(collector: Collector):
    inputs = (EmbedInput(content=SECRET, param="input"),)
    request = EmbedRequest(model=CARD.id, inputs=inputs, dimensions=2)
    trace = trace_request(collector, HELLO, request)
    assert trace.root.name == f"embeddings {CARD.id}"
    assert trace.attributes["gen_ai.embeddings.dimension.count"] == 2
    assert trace.attributes["gen_ai.usage.input_tokens"] == len(SECRET)


PROGRAM = """
import asyncio, sys
import app.observability.otel_tracing
from app.core.settings import Settings
from app.core.request_lifecycle import ObservedGenerate
from app.observability.tracing import create_tracing
from tests.fakes import FakeGenerate, FakeModel, finish
from tests.observability.test_tracing import CHAT, drain

app.observability.otel_tracing._SHUTDOWN_TIMEOUT = 0.5  # to keep this test short
app.observability.otel_tracing._EXPORT_TIMEOUT = 3600.0  # what waits for an export never ends

async def main():
    tracing = create_tracing(Settings(otlp=sys.argv[1]))
    observed = ObservedGenerate(FakeGenerate([finish()]), tracing.observe)
    for _ in range(1000):  # more spans than fit into the queue
        async with observed.open(CHAT, FakeModel()) as events:
            await drain(events)
    await tracing.stop()

asyncio.run(main())
"""


def test_an_unreachable_collector_does_not_delay_requests():
    """Neither a silent nor a missing collector delays requests or the shutdown."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for port in (listener.getsockname()[1], 1):
            command = [sys.executable, "-c", PROGRAM, f"http://127.0.0.1:{port}"]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=TIMEOUT)


@pytest.mark.parametrize("address", ["", "127.0.0.1:4318", "grpc://x:4317", "http://"])
def test_an_invalid_collector_address_is_rejected(address: str):
    with pytest.raises(AppError, match="--otlp must be the URL of a collector") as caught:
        create_tracing(Settings(otlp=address))
    assert caught.value.param == "otlp"


def test_the_address_may_contain_a_path(collector: Collector):
    async def run() -> None:
        spans = OtelTracing(Settings(otlp=f"{collector.address}/here"))
        observed = ObservedGenerate(FakeGenerate(HELLO), spans.observe)
        async with observed.open(CHAT, FakeModel()) as events:
            await drain(events)
        await spans.stop()

    asyncio.run(run())
    assert [path for path, _ in collector.requests] == ["/here"]


def test_opentelemetry_is_imported_only_with_the_option():
    assert create_tracing(Settings()) is None
    program = (
        "import sys, app.server, app.observability.tracing; "
        "sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_the_error_of_a_missing_package_names_the_install_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "app.observability.otel_tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(AppError, match="pip install opentelemetry-sdk") as caught:
        create_tracing(Settings(otlp="http://127.0.0.1:4318"))
    assert caught.value.param == "otlp"


def test_a_real_server_continues_the_trace_of_the_client(collector: Collector, tiny_model: Path):
    with run_server(str(tiny_model), "--otlp", collector.address) as server:
        reply = httpx.post(
            f"{server.url}/v1/completions?{SECRET}",
            json={"model": "tiny", "prompt": SECRET, "max_tokens": 3, "stop": [SECRET]},
            headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"},
            timeout=TIMEOUT,
        )
        assert reply.status_code == 200
        server.stop()
    roots = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    [root] = [span for span in roots if span.trace_id.hex() == TRACE]
    assert root.parent_span_id.hex() == PARENT
    attributes = {pair.key: to_python(pair.value) for pair in root.attributes}
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["mlxrunner.request.id"] == "mine"
    children = {span.name for span in collector.spans if span.parent_span_id == root.span_id}
    assert children == {"queue", "prefill", "decode"}
    assert SECRET.encode() not in b"".join(r.SerializeToString() for _, r in collector.requests)
