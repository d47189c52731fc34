"""Traces, as a collector gets them: over HTTP, as OTLP's protobuf."""

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

from app.core.embeddings import EmbedInput, EmbedRequest
from app.core.errors import AppError, ErrorKind
from app.core.events import Event, ModelLoading, Timings
from app.core.observers import ObservedGenerate
from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.requests import Conversation, GenerateRequest, Message, PromptBatch
from app.core.settings import Settings
from app.serving.otel_tracing import OtelTracing, split_phases
from app.serving.tracing import create_tracing
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
    """An OTLP receiver. requests: as they came, with the path that they came to."""

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
class Told:
    """What a collector got of one request."""

    root: Span
    children: list[Span]

    @property
    def attributes(self) -> dict[str, Any]:
        return {pair.key: plain(pair.value) for pair in self.root.attributes}


def plain(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return [plain(one) for one in value.array_value.values]
    return getattr(value, str(value.WhichOneof("value")))


async def drain(events: Any) -> list[Event]:
    return [event async for event in events]


def after(
    collector: Collector,
    script: Script | None = None,
    request: GenerateRequest | EmbedRequest = CHAT,
    *,
    refusal: Exception | None = None,
    leave: bool = False,
    visit: RequestContext | None = None,
) -> Told:
    """One request, and what the collector knows when the server has stopped."""
    generate = FakeGenerate(open_error=refusal) if script is None else FakeGenerate(script)

    async def one(traced: ObservedGenerate) -> None:
        if isinstance(request, EmbedRequest):
            await traced.embed(request, FakeModel())
            return
        async with traced.open(request, FakeModel()) as events:
            if leave:
                await anext(events)
                return
            await drain(events)

    async def run() -> None:
        REQUEST_CONTEXT.set(visit)
        settings = Settings(otlp=collector.address, host="127.0.0.1", port=8123)
        spans = OtelTracing(settings)
        try:
            await one(ObservedGenerate(generate, spans.observe))
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
    collector_saw = b"".join(r.SerializeToString() for _, r in collector.requests)
    assert SECRET.encode() not in collector_saw
    return Told(root, sorted(children, key=lambda span: span.start_time_unix_nano))


def test_a_request_is_a_span_with_the_words_of_the_conventions(collector: Collector):
    told = after(collector, HELLO, visit=RequestContext(id="mine"))
    assert told.root.name == f"chat {CARD.id}"
    assert told.root.status.code == Status.STATUS_CODE_UNSET
    assert not told.root.parent_span_id
    assert told.attributes == {
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
    [(_, sent)] = collector.requests
    resource = {p.key: plain(p.value) for p in sent.resource_spans[0].resource.attributes}
    assert resource["service.name"] == "mlxrunner"


def test_the_phases_are_spans_behind_each_other(collector: Collector):
    told = after(collector, [ModelLoading(progress=1), *HELLO])
    assert [span.name for span in told.children] == ["load", "queue", "prefill", "decode"]
    durations = {
        span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        for span in told.children
    }
    assert durations["prefill"] == 2
    assert durations["decode"] == 30
    assert durations["queue"] == 3
    for one, next_ in zip(told.children, told.children[1:], strict=False):
        assert one.end_time_unix_nano == next_.start_time_unix_nano
    assert abs(told.root.start_time_unix_nano / 1e9 - time.time()) < 60


def test_stretches_cover_a_choice_from_its_arrival_to_its_end():
    timings = Timings(prefill_ns=20, decode_ns=300, total_ns=1000)
    found = split_phases(5000, timings)
    assert found == [("queue", 5000, 5680), ("prefill", 5680, 5700), ("decode", 5700, 6000)]


@pytest.mark.parametrize("flags", ["01", "00"])
def test_a_trace_of_the_client_goes_on(collector: Collector, flags: str):
    """W3C Trace Context. A client that does not sample its trace does not want ours either."""
    visit = RequestContext(id="x", traceparent=f"00-{TRACE}-{PARENT}-{flags}")
    if flags == "00":
        with pytest.raises(AssertionError):
            after(collector, HELLO, visit=visit)
        assert collector.requests == []
        return
    told = after(collector, HELLO, visit=visit)
    assert told.root.trace_id.hex() == TRACE
    assert told.root.parent_span_id.hex() == PARENT


@pytest.mark.parametrize("header", ["", "x", "00-0-0-01", f"ff-{TRACE}-{PARENT}-01", "\x1b" * 999])
def test_a_broken_traceparent_begins_a_trace(collector: Collector, header: str):
    told = after(collector, HELLO, visit=RequestContext(id="x", traceparent=header))
    assert not told.root.parent_span_id
    assert told.root.trace_id.hex() != TRACE


@pytest.mark.parametrize(
    ("error", "type_", "status"),
    [
        (AppError(ErrorKind.BUSY, SECRET), "server_busy", Status.STATUS_CODE_UNSET),
        (AppError(ErrorKind.INVALID, SECRET), "invalid_request", Status.STATUS_CODE_UNSET),
        (AppError(ErrorKind.ENGINE, SECRET), "engine_error", Status.STATUS_CODE_ERROR),
        (KeyError(SECRET), "KeyError", Status.STATUS_CODE_ERROR),
    ],
)
def test_an_error_is_told_by_its_kind(
    collector: Collector, error: Exception, type_: str, status: int
):
    told = after(collector, refusal=error)
    assert told.attributes["error.type"] == type_
    assert told.root.status.code == status
    assert "gen_ai.usage.input_tokens" not in told.attributes


def test_an_answer_that_breaks_off_is_an_error(collector: Collector):
    told = after(collector, [text("a"), AppError(ErrorKind.ENGINE, SECRET)])
    assert told.attributes["error.type"] == "engine_error"


def test_a_client_that_left_is_no_fault_of_the_server(collector: Collector):
    told = after(collector, [text("a"), FOREVER], leave=True)
    assert told.attributes["error.type"] == "cancelled"
    assert told.root.status.code == Status.STATUS_CODE_UNSET


def test_each_choice_has_its_phases_and_a_prompt_counts_once(collector: Collector):
    request = replace(CHAT, n=2, prompt=PromptBatch(prompts=(SECRET, SECRET)))
    generate = FakeGenerate()
    script = generate.script(request) if callable(generate.script) else ()
    told = after(collector, script, request)
    assert told.root.name == f"text_completion {CARD.id}"
    assert told.attributes["gen_ai.request.choice.count"] == 2
    assert told.attributes["gen_ai.usage.input_tokens"] == 14
    assert told.attributes["gen_ai.usage.output_tokens"] == 8
    assert told.attributes["gen_ai.response.finish_reasons"] == ["stop"] * 4
    choices = {plain(span.attributes[0].value) for span in told.children}
    assert choices == {0, 1, 2, 3}


def test_vectors_are_an_operation_of_their_own(collector: Collector):
    inputs = (EmbedInput(content=SECRET, param="input"),)
    request = EmbedRequest(model=CARD.id, inputs=inputs, dimensions=2)
    told = after(collector, HELLO, request)
    assert told.root.name == f"embeddings {CARD.id}"
    assert told.attributes["gen_ai.embeddings.dimension.count"] == 2
    assert told.attributes["gen_ai.usage.input_tokens"] == len(SECRET)


MANY = """
import asyncio, sys, time
import app.serving.otel_tracing
from app.core.settings import Settings
from app.core.observers import ObservedGenerate
from app.serving.tracing import create_tracing
from tests.fakes import FakeGenerate, FakeModel, finish
from tests.serving.test_tracing import CHAT, drain

app.serving.otel_tracing._SHUTDOWN_TIMEOUT = 0.5  # so that this test is not long

async def main():
    tracing = create_tracing(Settings(otlp=sys.argv[1]))
    observed = ObservedGenerate(FakeGenerate([finish()]), tracing.observe)
    began = time.monotonic()
    for _ in range(1000):  # more spans than fit into the queue
        async with observed.open(CHAT, FakeModel()) as events:
            await drain(events)
    print(time.monotonic() - began)
    await tracing.stop()

asyncio.run(main())
"""


def test_a_collector_that_does_not_answer_costs_no_request_anything():
    """Nor one that is not there; and the server ends all the same."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (silent.getsockname()[1], 1):
            began = time.monotonic()
            command = [sys.executable, "-c", MANY, f"http://127.0.0.1:{port}"]
            ended = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
            # a tenth of a millisecond each, on a quiet machine
            assert float(ended.stdout) < 5
            assert time.monotonic() - began < 20


@pytest.mark.parametrize("address", ["", "127.0.0.1:4318", "grpc://x:4317", "http://"])
def test_an_address_that_is_none_is_refused(address: str):
    with pytest.raises(AppError, match="--otlp must be the URL of a collector") as refused:
        create_tracing(Settings(otlp=address))
    assert refused.value.param == "otlp"


def test_a_collector_may_say_the_path_itself(collector: Collector):
    async def run() -> None:
        spans = OtelTracing(Settings(otlp=f"{collector.address}/here"))
        observed = ObservedGenerate(FakeGenerate(HELLO), spans.observe)
        async with observed.open(CHAT, FakeModel()) as events:
            await drain(events)
        await spans.stop()

    asyncio.run(run())
    assert [path for path, _ in collector.requests] == ["/here"]


def test_without_the_option_nothing_of_it_is_imported():
    assert create_tracing(Settings()) is None
    program = (
        "import sys, app.server, app.serving.tracing; sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_what_is_not_installed_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "app.serving.otel_tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(AppError, match="pip install opentelemetry-sdk") as refused:
        create_tracing(Settings(otlp="http://127.0.0.1:4318"))
    assert refused.value.param == "otlp"


def test_a_real_server_goes_on_with_its_clients_trace(collector: Collector, tiny_model: Path):
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
    attributes = {pair.key: plain(pair.value) for pair in root.attributes}
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["mlxrunner.request.id"] == "mine"
    children = {span.name for span in collector.spans if span.parent_span_id == root.span_id}
    assert children == {"queue", "prefill", "decode"}
    assert SECRET.encode() not in b"".join(r.SerializeToString() for _, r in collector.requests)
