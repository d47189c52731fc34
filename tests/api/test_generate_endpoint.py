"""The generate endpoint: order of its output, errors, and that every exit closes the generation."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

import app.api.generate_endpoint
from app.api.generate_endpoint import GenerateEndpoint, JsonBody, ParsedRequest
from app.core.errors import AppError, ErrorKind
from app.core.events import ModelLoading, PrefillProgress
from app.core.requests import GenerateRequest
from app.core.settings import Settings
from app.core.thread_pools import ThreadPools
from app.http.api_keys import ApiKey, Keyring, hash_key
from app.http.body import RequestBodies
from tests.api.asgi import Conversation, Reply, pending_tasks, send_request
from tests.fakes import (
    CARD,
    FOREVER,
    HELLO,
    FakeGenerate,
    Pause,
    Script,
    build_fake_app,
    finish,
    text,
)
from tests.rows import rows

CHAT = "/v1/chat/completions"
LINES = "/completion"
CHAT_BODY: dict[str, Any] = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}
BROKEN = AppError(ErrorKind.ENGINE, "out of memory")

# Every kind of response: path and body.
BODY = (CHAT, CHAT_BODY)
STREAM = (CHAT, {**CHAT_BODY, "stream": True})
JSONL = (LINES, {"prompt": "hi", "options": {}})
REQUESTS = [BODY, STREAM, JSONL, ("/v1/completions", {"model": "fake/model", "prompt": "x"})]


# the behavior of a client
Act = Callable[[Conversation, FakeGenerate], Coroutine[Any, Any, None]]


def converse(
    script: Script,
    path: str,
    body: Any,
    act: Act | None = None,
    **settings: Any,
) -> tuple[Reply, FakeGenerate]:
    """One request, with `act` as the client; no task may remain afterwards."""
    generate = FakeGenerate(script)

    async def run() -> Reply:
        app = build_fake_app(generate, Settings(**settings))
        conversation = Conversation(app, "POST", path, json.dumps(body).encode())
        if act is not None:
            await act(conversation, generate)
        reply = await conversation.end()
        assert not pending_tasks()
        return reply

    return asyncio.run(run()), generate


async def wait_until_opened(generate: FakeGenerate) -> None:
    """Returns when generation has begun; threads parse the request before that."""
    async with asyncio.timeout(20):
        while not generate.opened:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0.001)


async def disconnect_when_opened(conversation: Conversation, generate: FakeGenerate) -> None:
    await wait_until_opened(generate)
    conversation.disconnect()


def disconnect_after(content: bytes) -> Act:
    async def act(conversation: Conversation, _: FakeGenerate) -> None:
        await conversation.until(lambda reply: content in reply.body)
        conversation.disconnect()

    return act


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_generation_is_closed_once(path: str, body: Any):
    reply, generate = converse(HELLO, path, body)
    assert reply.status == 200
    assert reply.complete
    assert len(generate.opened) == generate.num_closed == 1


@pytest.mark.parametrize(("path", "body"), [STREAM, JSONL])
def test_events_that_are_available_together_are_sent_with_one_write(path: str, body: Any):
    pieces = [text(f"t{number} ") for number in range(5)]
    apart, _ = converse([*pieces, text("z"), finish(tokens=6)], path, body)
    together, _ = converse([pieces, [text("z"), finish(tokens=6)]], path, body)
    for number in range(5):
        assert apart.body.count(b"t%d " % number) == together.body.count(b"t%d " % number) == 1
    [written] = [part for part in together.writes if b"t0 " in part]
    assert b"t4 " in written
    assert len(together.writes) == len(apart.writes) - 5


def test_a_json_body_is_built_outside_the_event_loop():
    """Sixty echoed prompts with their log-probabilities took two seconds, and blocked all other
    requests during this time. The response is stored on the event loop, though."""
    loop_thread, stored = threading.get_ident(), list[tuple[int, Any]]()
    request = GenerateRequest(model="fake/model", prompt="hi")
    reply = JsonBody(
        lambda events: {
            "events": len(events),
            "other_thread": threading.get_ident() != loop_thread,
        },
        lambda body: stored.append((threading.get_ident(), body)),
    )
    generate = FakeGenerate(HELLO)
    parsed, settings = ParsedRequest(request=request, reply=reply), Settings()
    bodies = RequestBodies(settings, ThreadPools())
    endpoint = GenerateEndpoint(
        lambda _body, _caller, _card: parsed, generate, generate, settings, bodies
    )

    async def run() -> Reply:
        return await Conversation(endpoint, "POST", "/", b"{}").end()

    body = asyncio.run(run()).json
    assert body["other_thread"]
    assert body["events"] > 1
    assert stored == [(loop_thread, body)]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_disconnect_before_the_first_token_cancels(path: str, body: Any):
    reply, generate = converse([FOREVER], path, body, disconnect_when_opened)
    assert reply.status == 0
    assert len(generate.opened) == generate.num_closed == 1


@pytest.mark.parametrize(("path", "body"), [STREAM, JSONL])
def test_a_disconnect_during_a_stream_cancels(path: str, body: Any):
    reply, generate = converse([text("Hel"), FOREVER], path, body, disconnect_after(b"Hel"))
    assert reply.status == 200
    assert not reply.complete
    assert len(generate.opened) == generate.num_closed == 1


def test_a_disconnect_during_an_unstreamed_answer_cancels():
    script = [text("Hel"), text("lo"), FOREVER, finish()]
    reply, generate = converse(script, *BODY, disconnect_when_opened)
    assert reply.status == 0
    assert len(generate.opened) == generate.num_closed == 1


@pytest.mark.parametrize(("path", "body"), [STREAM, JSONL])
def test_a_disconnect_without_reading_cancels(path: str, body: Any):
    """Sending blocks while the client does not read, so a frame is pending at that moment."""

    async def act(conversation: Conversation, _: FakeGenerate) -> None:
        conversation.stalled = True
        await conversation.until(lambda reply: bool(reply.status))
        conversation.disconnect()

    reply, generate = converse([text("Hel"), FOREVER], path, body, act)
    assert reply.body == b""
    assert generate.num_closed == 1


def test_a_disconnect_between_keep_alives_cancels():
    act = disconnect_after(b"keep-alive\n\n: keep-alive")
    _, generate = converse([FOREVER], *STREAM, act, ping=0.02)
    assert generate.num_closed == 1


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_disconnect_before_the_end_of_the_body_starts_nothing(path: str, body: Any):
    generate = FakeGenerate()

    async def run() -> None:
        conversation = Conversation(build_fake_app(generate, Settings()), "POST", path, None)
        half = json.dumps(body).encode()[:10]
        conversation.incoming.put_nowait({"type": "http.request", "body": half, "more_body": True})
        conversation.disconnect()
        assert (await conversation.end()).status == 499  # for the log only
        assert not pending_tasks()

    asyncio.run(run())
    assert generate.opened == []


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_server_shutdown_cancels(path: str, body: Any):
    generate = FakeGenerate([FOREVER])

    async def run() -> None:
        app = build_fake_app(generate, Settings())
        conversation = Conversation(app, "POST", path, json.dumps(body).encode())
        await wait_until_opened(generate)
        conversation.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await conversation.end()
        assert not pending_tasks()

    asyncio.run(run())
    assert len(generate.opened) == generate.num_closed == 1


def test_a_slow_close_is_not_cancelled_at_the_end_of_the_reply():
    """A server reports a disconnect right after a complete reply. Leaving the context may take
    longer than that, and must not be cancelled."""

    class Slow(FakeGenerate):
        async def settle(self) -> None:
            await asyncio.sleep(0.05)
            self.settled = True

        def open(self, request: Any, model: Any) -> Any:
            outer = self

            class Context:
                async def __aenter__(self) -> Any:
                    self.inner = FakeGenerate.open(outer, request, model)
                    return await self.inner.__aenter__()

                async def __aexit__(self, *error: Any) -> None:
                    await outer.settle()
                    await self.inner.__aexit__(*error)

            return Context()

    for path, body in (STREAM, JSONL):
        generate = Slow()

        async def run(path: str = path, body: Any = body, generate: Slow = generate) -> None:
            app = build_fake_app(generate, Settings())
            await Conversation(app, "POST", path, json.dumps(body).encode()).end()

        asyncio.run(run())
        assert generate.settled
        assert generate.num_closed == 1


@pytest.mark.parametrize(("path", "body"), [BODY, JSONL])
def test_an_error_before_the_first_token_has_a_status(path: str, body: Any):
    reply, generate = converse(
        [PrefillProgress(computed_tokens=1, total_tokens=2), BROKEN], path, body
    )
    assert reply.status == 500
    assert reply.error["message"] == "out of memory"
    assert generate.num_closed == 1


def test_a_stream_that_fails_at_once_has_a_status():
    reply, generate = converse([BROKEN], *STREAM)
    assert reply.status == 500
    assert reply.headers["content-type"] == "application/json"
    assert generate.num_closed == 1


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_rejected_request_has_a_status(path: str, body: Any, call: Any, generate: FakeGenerate):
    generate.open_error = AppError(
        ErrorKind.CONTEXT_LENGTH, "9 tokens are too many", param="messages"
    )
    reply = call("POST", path, body)
    assert reply.status == 400
    assert reply.error == {
        "message": "9 tokens are too many",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_full_server_sends_retry_after(path: str, body: Any, call: Any, generate: FakeGenerate):
    """The error sets a status, streamed or not, because clients use the status to decide whether to
    retry."""
    generate.open_error = AppError(ErrorKind.BUSY, "66 are here", retry_after=9)
    reply = call("POST", path, body)
    assert reply.status == 429
    assert reply.headers["retry-after"] == "9"
    assert reply.error == {
        "message": "66 are here",
        "type": "rate_limit_error",
        "param": None,
        "code": "server_busy",
    }


def test_an_error_during_a_stream_is_an_event_before_done():
    reply, generate = converse([text("Hel"), BROKEN], *STREAM)
    assert reply.status == 200
    assert reply.complete
    *_, error, done, end = reply.body.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "out of memory"
    assert (done, end) == (b"data: [DONE]", b"")
    assert generate.num_closed == 1


def test_an_error_during_json_lines_is_the_last_line():
    reply, generate = converse([text("Hel"), BROKEN], *JSONL)
    assert reply.complete
    first, last = map(json.loads, reply.body.splitlines())
    assert (first["Content"], first["Error"]) == ("Hel", None)
    assert last["Done"] is False
    assert last["Error"] == {
        "StatusCode": 500,
        "Status": "500 Internal Server Error",
        "error": "out of memory",
    }
    assert generate.num_closed == 1


@pytest.mark.parametrize(("path", "body"), [STREAM, JSONL])
@pytest.mark.parametrize("script", [[text("Hel"), KeyError("secret")], [text("Hel")]])
def test_an_internal_error_ends_a_stream_without_details(
    path: str, body: Any, script: Script, caplog: pytest.LogCaptureFixture
):
    """The same holds if the events end without a Finish, which is a bug."""
    reply, generate = converse(script, path, body)
    assert reply.complete
    assert b"internal error" in reply.body
    assert b"secret" not in reply.body
    assert "a response stream failed" in caplog.text
    assert generate.num_closed == 1


def test_prefill_progress_is_sent_in_comments_at_an_interval():
    prefill = [PrefillProgress(computed_tokens=n, total_tokens=30) for n in range(31)]
    reply, _ = converse([*prefill, *HELLO], *STREAM)
    comments = [line for line in reply.body.splitlines() if line.startswith(b":")]
    assert comments == [b": prefill 0/30"]


def test_prefill_progress_is_repeated_after_the_interval(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app.api.generate_endpoint, "PROGRESS_INTERVAL", 0.02)
    prefill = [
        PrefillProgress(computed_tokens=1, total_tokens=3),
        Pause(0.03),
        PrefillProgress(computed_tokens=2, total_tokens=3),
    ]
    reply, _ = converse([*prefill, *HELLO], *STREAM)
    assert reply.body.startswith(b": prefill 1/3\n\n: prefill 2/3\n\ndata: ")


def test_responses_without_comments_have_no_progress():
    reply, _ = converse([PrefillProgress(computed_tokens=1, total_tokens=2), *HELLO], *JSONL)
    assert len(reply.body.splitlines()) == 3
    reply, _ = converse([PrefillProgress(computed_tokens=1, total_tokens=2), *HELLO], *BODY)
    assert reply.json["choices"][0]["message"]["content"] == "Hello"


def test_keep_alives_do_not_interrupt_the_answer():
    """Waiting for an event with a timeout must not cancel it."""
    silences = [asyncio.Event(), asyncio.Event()]

    async def act(conversation: Conversation, _: FakeGenerate) -> None:
        for index, silence in enumerate(silences):
            num_comments = 2 * (index + 1)
            await conversation.until(
                lambda r, n=num_comments: r.body.count(b": keep-alive\n\n") >= n
            )
            silence.set()

    script = [silences[0], text("Hel"), silences[1], text("lo"), finish()]
    reply, _ = converse(script, *STREAM, act, ping=0.03)
    before, after = reply.body.split(b"Hel")
    assert before.count(b": keep-alive\n\n") >= 2
    assert after.count(b": keep-alive\n\n") >= 1
    assert reply.body.endswith(b"data: [DONE]\n\n")


def test_keep_alives_are_sent_while_text_is_held_back():
    """Only bytes keep a connection alive; events without output do not."""
    held = [step for _ in range(8) for step in (text(""), Pause(0.01))]
    reply, _ = converse([text("a"), *held, *HELLO], *STREAM, ping=0.03)
    assert b": keep-alive" in reply.body


def test_the_first_keep_alive_sends_the_headers_of_a_stream():
    async def act(conversation: Conversation, _: FakeGenerate) -> None:
        reply = await conversation.until(lambda reply: bool(reply.body))
        assert reply.status == 200
        assert reply.body == b": keep-alive\n\n"
        conversation.disconnect()

    converse([FOREVER], *STREAM, act, ping=0.02)


def test_streams_are_framed_with_line_feeds():
    reply, _ = converse([PrefillProgress(computed_tokens=1, total_tokens=2), *HELLO], *STREAM)
    assert b"\r" not in reply.body
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-store"


TWO_CHOICES: dict[str, Any] = {**CHAT_BODY, "stream": True, "n": 2}


class TestSeveralChoices:
    """Events of choices come in any order; the stream ends once, after all of them."""

    SCRIPT: Script = (
        replace(text("Hel"), choice=1),
        text("a"),
        finish(),
        replace(text("lo"), choice=1),
        replace(finish("length"), choice=1),
    )

    def test_a_stream_continues_until_the_last_choice_has_finished(self):
        reply, generate = converse(self.SCRIPT, CHAT, TWO_CHOICES)
        *frames, done, end = reply.body.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        assert reply.body.count(b"[DONE]") == 1
        chunks = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
        texts = {0: "", 1: ""}
        reasons: dict[int, str] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                assert choice["index"] not in reasons, "a chunk after the finish of its choice"
                texts[choice["index"]] += choice["delta"].get("content") or ""
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
        assert texts == {0: "a", 1: "Hello"}
        assert reasons == {0: "stop", 1: "length"}
        assert generate.num_closed == 1

    def test_the_choices_of_a_body_are_in_order(self):
        reply, _ = converse(self.SCRIPT, CHAT, {**CHAT_BODY, "n": 2})
        choices = reply.json["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert [choice["message"]["content"] for choice in choices] == ["a", "Hello"]

    def test_an_error_of_one_choice_ends_the_stream(self):
        reply, generate = converse([*self.SCRIPT[:3], BROKEN], CHAT, TWO_CHOICES)
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert b"out of memory" in reply.body
        assert generate.num_closed == 1

    def test_usage_is_sent_once_at_the_end(self):
        body = {**TWO_CHOICES, "stream_options": {"include_usage": True}}
        reply, _ = converse(self.SCRIPT, CHAT, body)
        *_, last, done, _ = reply.body.split(b"\n\n")
        assert done == b"data: [DONE]"
        usage = json.loads(last.removeprefix(b"data: "))
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4
        assert usage["usage"]["prompt_tokens"] == 7, "both choices have the same prompt"


LOADING_EVENTS: Script = [ModelLoading(progress=0, queued=True), ModelLoading(progress=40)]


def test_a_stream_reports_that_its_model_is_loading():
    reply, _ = converse([*LOADING_EVENTS, *HELLO], *STREAM)
    comments = [line for line in reply.body.decode().split("\n\n") if line.startswith(":")]
    assert comments == [": waiting to load", ": loading 40 %"]
    assert reply.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("path", "body"), [BODY, JSONL])
def test_responses_without_comments_wait_for_a_model_only_load_wait_seconds(path: str, body: Any):
    """A proxy would close a connection that is silent for minutes, without a reason for the
    client."""
    loaded, _ = converse([*LOADING_EVENTS, *HELLO], path, body)
    assert loaded.status == 200
    assert b"load" not in loaded.body
    rejected, generate = converse([*LOADING_EVENTS, FOREVER], path, body, load_wait=0)
    assert (rejected.status, rejected.error["code"]) == (503, "model_loading")
    assert int(rejected.headers["retry-after"]) > 1
    assert generate.num_closed == 1


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_model_that_fails_to_load_gives_a_status_before_any_output(path: str, body: Any):
    error = AppError(ErrorKind.MODEL_FILES, "it broke", retry_after=7)
    reply, _ = converse([error], path, body)
    assert (reply.status, reply.error["message"]) == (500, "it broke")
    assert reply.headers["retry-after"] == "7"


def test_the_caller_of_a_request_is_the_name_of_its_key():
    generate = FakeGenerate(HELLO)

    keyring = Keyring((ApiKey(name="laptop", digest=hash_key("what the laptop has")),))
    headers = {"authorization": "Bearer what the laptop has"}

    async def run() -> None:
        app = build_fake_app(generate, Settings(), keyring=keyring)
        await Conversation(app, "POST", CHAT, json.dumps(CHAT_BODY).encode(), headers).end()

    asyncio.run(run())
    assert generate.opened[0].caller == "laptop"


GENERATING = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/api/generate", {"prompt": "hi"}),
    ("/api/embed", {"input": "hi"}),
]


@rows(("path", "body"), GENERATING)
def test_a_server_with_one_model_needs_no_name(path: str, body: dict[str, Any]):
    assert send_request(FakeGenerate(), "POST", path, body).status == 200


@rows(("path", "body"), GENERATING)
def test_a_server_with_several_models_needs_a_name(path: str, body: dict[str, Any]):
    two = FakeGenerate(cards=(CARD, replace(CARD, id="other")))
    assert send_request(two, "POST", path, body).status == 400
    assert send_request(two, "POST", path, body | {"model": "other"}).status == 200
