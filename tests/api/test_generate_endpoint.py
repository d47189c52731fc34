"""The life of a request: what goes out when, and that every way out is the same way out."""

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
from tests.api.asgi import Conversation, Reply, leftovers
from tests.fakes import FOREVER, HELLO, FakeGenerate, Pause, Script, build_fake_app, finish, text

CHAT = "/v1/chat/completions"
LINES = "/completion"
ASK: dict[str, Any] = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}
BROKEN = AppError(ErrorKind.ENGINE, "out of memory")

# Every way to be answered: path and body.
WHOLE = (CHAT, ASK)
STREAM = (CHAT, {**ASK, "stream": True})
JSONL = (LINES, {"prompt": "hi"})
WAYS = [WHOLE, STREAM, JSONL, ("/v1/completions", {"model": "fake/model", "prompt": "x"})]


# what a client does, beside what is asked
Act = Callable[[Conversation, FakeGenerate], Coroutine[Any, Any, None]]


def converse(
    script: Script,
    path: str,
    body: Any,
    act: Act | None = None,
    **settings: Any,
) -> tuple[Reply, FakeGenerate]:
    """Holds one conversation, with `act` as the client; afterwards no task may be left."""
    generate = FakeGenerate(script)

    async def run() -> Reply:
        app = build_fake_app(generate, Settings(**settings))
        conversation = Conversation(app, "POST", path, json.dumps(body).encode())
        if act is not None:
            await act(conversation, generate)
        reply = await conversation.end()
        assert not leftovers()
        return reply

    return asyncio.run(run()), generate


async def opened(generate: FakeGenerate) -> None:
    """Returns when the request is being answered, which some threads come before."""
    async with asyncio.timeout(20):
        while not generate.opened:  # noqa: ASYNC110  # no event tells of it
            await asyncio.sleep(0.001)


async def leave_when_opened(conversation: Conversation, generate: FakeGenerate) -> None:
    await opened(generate)
    conversation.hang_up()


def leave_after(content: bytes) -> Act:
    async def act(conversation: Conversation, _: FakeGenerate) -> None:
        await conversation.until(lambda reply: content in reply.body)
        conversation.hang_up()

    return act


@pytest.mark.parametrize(("path", "body"), WAYS)
def test_an_answer_leaves_its_context_once(path: str, body: Any):
    reply, generate = converse(HELLO, path, body)
    assert reply.status == 200
    assert reply.complete
    assert len(generate.opened) == generate.num_closed == 1


def test_a_whole_answer_is_put_together_beside_the_event_loop():
    """Sixty echoed prompts with their log-probabilities took two seconds, and nobody else was
    answered meanwhile. What is kept of an answer is the event loop's, though."""
    loops, kept = threading.get_ident(), list[tuple[int, Any]]()
    request = GenerateRequest(model="fake/model", prompt="hi")
    reply = JsonBody(
        lambda said: {"events": len(said), "beside": threading.get_ident() != loops},
        lambda body: kept.append((threading.get_ident(), body)),
    )
    generate = FakeGenerate(HELLO)
    ask, settings = ParsedRequest(request=request, reply=reply), Settings()
    bodies = RequestBodies(settings, ThreadPools(), lambda: 0)
    endpoint = GenerateEndpoint(
        lambda _body, _caller, _card: ask, generate, generate, settings, bodies
    )

    async def run() -> Reply:
        return await Conversation(endpoint, "POST", "/", b"{}").end()

    told = asyncio.run(run()).json
    assert told["beside"]
    assert told["events"] > 1
    assert kept == [(loops, told)]


@pytest.mark.parametrize(("path", "body"), WAYS)
def test_a_client_that_leaves_before_the_first_token_cancels(path: str, body: Any):
    reply, generate = converse([FOREVER], path, body, leave_when_opened)
    assert reply.status == 0
    assert len(generate.opened) == generate.num_closed == 1


@pytest.mark.parametrize(("path", "body"), [STREAM, JSONL])
def test_a_client_that_leaves_amid_a_stream_cancels(path: str, body: Any):
    reply, generate = converse([text("Hel"), FOREVER], path, body, leave_after(b"Hel"))
    assert reply.status == 200
    assert not reply.complete
    assert len(generate.opened) == generate.num_closed == 1


def test_a_client_that_leaves_amid_a_plain_answer_cancels():
    script = [text("Hel"), text("lo"), FOREVER, finish()]
    reply, generate = converse(script, *WHOLE, leave_when_opened)
    assert reply.status == 0
    assert len(generate.opened) == generate.num_closed == 1


@pytest.mark.parametrize(("path", "body"), [STREAM, JSONL])
def test_a_client_that_leaves_without_having_read_cancels(path: str, body: Any):
    """Sending waits for a client that does not read, and so a frame is in our hands just then."""

    async def act(conversation: Conversation, _: FakeGenerate) -> None:
        conversation.stalled = True
        await conversation.until(lambda reply: bool(reply.status))
        conversation.hang_up()

    reply, generate = converse([text("Hel"), FOREVER], path, body, act)
    assert reply.body == b""
    assert generate.num_closed == 1


def test_a_client_that_leaves_between_keep_alives_cancels():
    act = leave_after(b"keep-alive\n\n: keep-alive")
    _, generate = converse([FOREVER], *STREAM, act, ping=0.02)
    assert generate.num_closed == 1


@pytest.mark.parametrize(("path", "body"), WAYS)
def test_a_client_that_leaves_before_its_body_is_whole_opens_nothing(path: str, body: Any):
    generate = FakeGenerate()

    async def run() -> None:
        conversation = Conversation(build_fake_app(generate, Settings()), "POST", path, None)
        half = json.dumps(body).encode()[:10]
        conversation.incoming.put_nowait({"type": "http.request", "body": half, "more_body": True})
        conversation.hang_up()
        assert (await conversation.end()).status == 499  # for the log: nobody reads it
        assert not leftovers()

    asyncio.run(run())
    assert generate.opened == []


@pytest.mark.parametrize(("path", "body"), WAYS)
def test_a_server_that_stops_cancels_too(path: str, body: Any):
    generate = FakeGenerate([FOREVER])

    async def run() -> None:
        app = build_fake_app(generate, Settings())
        conversation = Conversation(app, "POST", path, json.dumps(body).encode())
        await opened(generate)
        conversation.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await conversation.end()
        assert not leftovers()

    asyncio.run(run())
    assert len(generate.opened) == generate.num_closed == 1


def test_a_slow_way_out_is_not_cut_short_by_the_end_of_the_reply():
    """A server reports a disconnect right after a complete reply. Leaving the context may take
    longer than that, and it is no reason to cancel it."""

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


@pytest.mark.parametrize(("path", "body"), [WHOLE, JSONL])
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


@pytest.mark.parametrize(("path", "body"), WAYS)
def test_a_refused_request_has_a_status(path: str, body: Any, call: Any, generate: FakeGenerate):
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


@pytest.mark.parametrize(("path", "body"), WAYS)
def test_a_full_server_says_when_to_come_again(
    path: str, body: Any, call: Any, generate: FakeGenerate
):
    """With a status, streamed or not: a client that retries looks at nothing else."""
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


def test_an_error_amid_a_stream_is_an_event_before_done():
    reply, generate = converse([text("Hel"), BROKEN], *STREAM)
    assert reply.status == 200
    assert reply.complete
    *_, problem, done, end = reply.body.split(b"\n\n")
    assert json.loads(problem.removeprefix(b"data: "))["error"]["message"] == "out of memory"
    assert (done, end) == (b"data: [DONE]", b"")
    assert generate.num_closed == 1


def test_an_error_amid_lines_is_a_line_and_nothing_is_done():
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
def test_a_fault_of_ours_amid_a_stream_ends_it_without_details(
    path: str, body: Any, script: Script, caplog: pytest.LogCaptureFixture
):
    """Also when the events end without a Finish, which they never may."""
    reply, generate = converse(script, path, body)
    assert reply.complete
    assert b"internal error" in reply.body
    assert b"secret" not in reply.body
    assert "a response stream failed" in caplog.text
    assert generate.num_closed == 1


def test_progress_is_told_in_comments_but_not_too_often():
    prefill = [PrefillProgress(computed_tokens=n, total_tokens=30) for n in range(31)]
    reply, _ = converse([*prefill, *HELLO], *STREAM)
    comments = [line for line in reply.body.splitlines() if line.startswith(b":")]
    assert comments == [b": prefill 0/30"]


def test_progress_is_told_again_after_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app.api.generate_endpoint, "PROGRESS_INTERVAL", 0.02)
    prefill = [
        PrefillProgress(computed_tokens=1, total_tokens=3),
        Pause(0.03),
        PrefillProgress(computed_tokens=2, total_tokens=3),
    ]
    reply, _ = converse([*prefill, *HELLO], *STREAM)
    assert reply.body.startswith(b": prefill 1/3\n\n: prefill 2/3\n\ndata: ")


def test_progress_does_not_show_where_there_are_no_comments():
    reply, _ = converse([PrefillProgress(computed_tokens=1, total_tokens=2), *HELLO], *JSONL)
    assert len(reply.body.splitlines()) == 3
    reply, _ = converse([PrefillProgress(computed_tokens=1, total_tokens=2), *HELLO], *WHOLE)
    assert reply.json["choices"][0]["message"]["content"] == "Hello"


def test_silence_is_broken_and_the_answer_goes_on():
    """Waiting with a time limit must not cancel what is waited for."""
    silences = [asyncio.Event(), asyncio.Event()]

    async def act(conversation: Conversation, _: FakeGenerate) -> None:
        for place, silence in enumerate(silences):
            heard = 2 * (place + 1)
            await conversation.until(lambda r, n=heard: r.body.count(b": keep-alive\n\n") >= n)
            silence.set()

    script = [silences[0], text("Hel"), silences[1], text("lo"), finish()]
    reply, _ = converse(script, *STREAM, act, ping=0.03)
    before, amid = reply.body.split(b"Hel")
    assert before.count(b": keep-alive\n\n") >= 2
    assert amid.count(b": keep-alive\n\n") >= 1
    assert reply.body.endswith(b"data: [DONE]\n\n")


def test_text_that_is_held_back_is_silence_too():
    """Events alone do not keep a connection alive: bytes do."""
    held = [step for _ in range(8) for step in (text(""), Pause(0.01))]
    reply, _ = converse([text("a"), *held, *HELLO], *STREAM, ping=0.03)
    assert b": keep-alive" in reply.body


def test_headers_of_a_stream_come_no_later_than_the_first_keep_alive():
    async def act(conversation: Conversation, _: FakeGenerate) -> None:
        reply = await conversation.until(lambda reply: bool(reply.body))
        assert reply.status == 200
        assert reply.body == b": keep-alive\n\n"
        conversation.hang_up()

    converse([FOREVER], *STREAM, act, ping=0.02)


def test_streams_are_framed_with_line_feeds():
    reply, _ = converse([PrefillProgress(computed_tokens=1, total_tokens=2), *HELLO], *STREAM)
    assert b"\r" not in reply.body
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-store"


SEVERAL: dict[str, Any] = {**ASK, "stream": True, "n": 2}


class TestSeveralChoices:
    """Events of choices come in any order; the end comes once, behind all of them."""

    SCRIPT: Script = (
        replace(text("Hel"), choice=1),
        text("a"),
        finish(),
        replace(text("lo"), choice=1),
        replace(finish("length"), choice=1),
    )

    def test_a_stream_goes_on_until_the_last_has_finished(self):
        reply, generate = converse(self.SCRIPT, CHAT, SEVERAL)
        *frames, done, end = reply.body.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        assert reply.body.count(b"[DONE]") == 1
        chunks = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
        said = {0: "", 1: ""}
        reasons: dict[int, str] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                assert choice["index"] not in reasons, "nothing follows a choice's end"
                said[choice["index"]] += choice["delta"].get("content") or ""
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
        assert said == {0: "a", 1: "Hello"}
        assert reasons == {0: "stop", 1: "length"}
        assert generate.num_closed == 1

    def test_a_whole_answer_has_them_in_their_order(self):
        reply, _ = converse(self.SCRIPT, CHAT, {**ASK, "n": 2})
        choices = reply.json["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert [choice["message"]["content"] for choice in choices] == ["a", "Hello"]

    def test_an_error_of_one_ends_the_stream_of_all(self):
        reply, generate = converse([*self.SCRIPT[:3], BROKEN], CHAT, SEVERAL)
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert b"out of memory" in reply.body
        assert generate.num_closed == 1

    def test_usage_comes_once_at_the_end(self):
        body = {**SEVERAL, "stream_options": {"include_usage": True}}
        reply, _ = converse(self.SCRIPT, CHAT, body)
        *_, last, done, _ = reply.body.split(b"\n\n")
        assert done == b"data: [DONE]"
        counted = json.loads(last.removeprefix(b"data: "))
        assert counted["choices"] == []
        assert counted["usage"]["completion_tokens"] == 4
        assert counted["usage"]["prompt_tokens"] == 7, "both answer one prompt"


WAITING: Script = [ModelLoading(progress=0, queued=True), ModelLoading(progress=40)]


def test_a_stream_tells_that_its_model_is_being_loaded():
    reply, _ = converse([*WAITING, *HELLO], *STREAM)
    comments = [line for line in reply.body.decode().split("\n\n") if line.startswith(":")]
    assert comments == [": waiting to load", ": loading 40 %"]
    assert reply.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("path", "body"), [WHOLE, JSONL])
def test_who_can_be_told_nothing_waits_for_a_model_only_so_long(path: str, body: Any):
    """A proxy would give up on a connection that is silent for minutes, and hide why."""
    soon, _ = converse([*WAITING, *HELLO], path, body)
    assert soon.status == 200
    assert b"load" not in soon.body
    late, generate = converse([*WAITING, FOREVER], path, body, load_wait=0)
    assert (late.status, late.error["code"]) == (503, "model_loading")
    assert int(late.headers["retry-after"]) > 1
    assert generate.num_closed == 1


@pytest.mark.parametrize(("path", "body"), WAYS)
def test_a_model_that_cannot_be_loaded_has_a_status_if_nothing_was_told(path: str, body: Any):
    error = AppError(ErrorKind.MODEL_FILES, "it broke", retry_after=7)
    reply, _ = converse([error], path, body)
    assert (reply.status, reply.error["message"]) == (500, "it broke")
    assert reply.headers["retry-after"] == "7"


def test_who_asks_is_known_by_the_name_of_the_key():
    generate = FakeGenerate(HELLO)

    keyring = Keyring((ApiKey(name="laptop", digest=hash_key("what the laptop has")),))
    shown = {"authorization": "Bearer what the laptop has"}

    async def run() -> None:
        app = build_fake_app(generate, Settings(), keyring=keyring)
        await Conversation(app, "POST", CHAT, json.dumps(ASK).encode(), shown).end()

    asyncio.run(run())
    assert generate.opened[0].caller == "laptop"
