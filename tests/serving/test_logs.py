"""The server's log: one line for one thing, whose request it was, and nothing that a client could
make of it."""

import asyncio
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError, ErrorKind
from app.core.events import ModelLoading, PrefillProgress
from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.settings import Settings
from app.http.api_keys import ApiKey, Keyring, hash_key
from app.http.request_id import RequestIdMiddleware
from app.serving.logs import (
    HumanFormatter,
    JsonFormatter,
    configure_logging,
    escape_control_characters,
)
from tests.api.asgi import Conversation, Reply
from tests.fakes import CARD, FOREVER, FakeGenerate, build_fake_app, finish, text

CHAT = "/v1/chat/completions"
BODY: Any = {"model": CARD.id, "messages": [{"role": "user", "content": "what nobody may read"}]}

# a forged line, a screen that is cleared, C1 in one byte, other line ends, writing turned round
NASTY = (
    "x\n2026-11-21 00:00:00,000 INFO app: all is well",
    "\x1b[2J\x1b]0;title\x07",
    "\x9b31m",
    "a\x85b\u2028c\u2029d\x0be",
    "\u202egnp.exe",
    "\ud800",
    "\x00\x7f\r",
)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., io.StringIO]]:
    """log(**settings): what is written from now on. Everything is as it was afterwards."""
    names = (None, "app", "app.access", "uvicorn.access", "httpx2")
    before = {name: logging.getLogger(name).level for name in names}
    handlers = logging.getLogger().handlers
    # tests that serve in this process leave uvicorn's own ways behind, which a server of ours has
    # not
    for name in ("uvicorn", "uvicorn.error"):
        for attribute, value in (("level", logging.NOTSET), ("propagate", True), ("handlers", [])):
            monkeypatch.setattr(logging.getLogger(name), attribute, value)

    def begin(**settings: Any) -> io.StringIO:
        written = io.StringIO()
        monkeypatch.setattr(sys, "stderr", written)
        configure_logging(Settings(**settings))
        return written

    yield begin
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
    logging.getLogger().handlers = handlers


def record(message: str, *arguments: Any, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("app.x", logging.INFO, "x.py", 1, message, arguments, info)


def ask(
    path: str,
    generate: FakeGenerate | None = None,
    body: Any = BODY,
    headers: dict[str, str] | None = None,
) -> Reply:
    """One request to an application of its own, whatever becomes of it."""

    async def run() -> Reply:
        app = build_fake_app(generate or FakeGenerate(), Settings())
        method = "GET" if body is None else "POST"
        conversation = Conversation(app, method, path, json.dumps(body).encode(), headers)
        await asyncio.wait({conversation.task})
        conversation.task.exception()
        return conversation.reply

    return asyncio.run(run())


def told(written: io.StringIO) -> list[Any]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


@pytest.mark.parametrize("nasty", NASTY)
def test_no_text_leaves_its_line(nasty: str):
    for formatter in (HumanFormatter(), JsonFormatter()):
        line = formatter.format(record("the client said %s", nasty))
        assert len(line.splitlines()) == 1
        assert line.isprintable()
    assert json.loads(line)["message"] == f"the client said {nasty}"


@given(st.text(st.characters(codec=None)))
def test_what_is_written_is_seen(anything: str):
    assert escape_control_characters(anything).isprintable()
    line = JsonFormatter().format(record("%s", anything))
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["message"] == anything


@pytest.mark.parametrize("nasty", NASTY)
def test_no_text_leaves_a_traceback(nasty: str):
    try:
        raise KeyError(nasty) from ValueError(nasty)
    except KeyError as error:
        found = record("it broke", error=error)
    human = HumanFormatter().format(found)
    first, *rest = human.split("\n")
    assert first.endswith("it broke")
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    line = JsonFormatter().format(found)
    assert line.isprintable()
    assert "Traceback" in json.loads(line)["exception"]


def test_a_json_line_is_an_object_with_a_time_in_utc():
    found = record("%d of %d", 3, 4)
    found.created = 1_763_744_400.25
    assert json.loads(JsonFormatter().format(found)) == {
        "time": "2025-11-21T17:00:00.250Z",
        "level": "info",
        "logger": "app.x",
        "message": "3 of 4",
    }


def test_every_line_of_a_request_has_its_name_in_threads_too():
    async def application(scope: Any, receive: Any, send: Any) -> None:
        lines.append(JsonFormatter().format(record("here")))
        await asyncio.to_thread(lambda: lines.append(JsonFormatter().format(record("there"))))
        scope["state"]["caller"] = "ada"  # as whoever asks for keys does
        lines.append(HumanFormatter().format(record("human")))
        task = asyncio.create_task(asyncio.to_thread(JsonFormatter().format, record("later")))
        lines.append(await task)

    async def run() -> None:
        headers = {"x-request-id": "mine"}
        await Conversation(RequestIdMiddleware(application), "GET", "/", headers=headers).task

    lines: list[str] = []
    asyncio.run(run())
    here, there, human, later = lines
    for line in (here, there, later):
        assert json.loads(line)["request_id"] == "mine"
    assert "app.x [mine]: human" in human
    assert json.loads(later)["caller"] == "ada"
    assert "request_id" not in json.loads(JsonFormatter().format(record("of no request")))


def test_two_requests_do_not_take_each_others_names():
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.01)
        visit = REQUEST_CONTEXT.get()
        assert visit is not None
        seen.append((scope["path"], visit.id))

    async def run() -> None:
        app = RequestIdMiddleware(application)
        paths = [f"/{n}" for n in range(20)]
        talks = [Conversation(app, "GET", p, headers={"x-request-id": p[1:]}) for p in paths]
        await asyncio.gather(*(talk.task for talk in talks))

    seen: list[tuple[str, str]] = []
    asyncio.run(run())
    assert len(seen) == 20
    assert all(path == f"/{name}" for path, name in seen)


def test_a_request_is_one_line_when_it_is_over(log: Any):
    written = log(log_format="json")
    ask(CHAT, headers={"x-request-id": "mine"})
    [line] = told(written)
    assert line.pop("ms") >= 0
    assert line.pop("time")
    assert line.pop("message").startswith(f"POST {CHAT} 200 ms=")
    assert line == {
        "level": "info",
        "logger": "app.access",
        "request_id": "mine",
        "model": CARD.id,
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "client": "127.0.0.1:50000",
        "prompt_tokens": 7,
        "cached_tokens": 3,
        "completion_tokens": 2,
        "finish": "stop",
    }


def test_people_read_the_same(log: Any):
    written = log()
    ask(CHAT, body={**BODY, "n": 2})
    [line] = written.getvalue().splitlines()
    assert " INFO app.access [req_" in line
    end = "prompt_tokens=7 cached_tokens=3 completion_tokens=4 finish=stop"
    assert line.endswith(f"client=127.0.0.1:50000 model={CARD.id} {end}")


@pytest.mark.parametrize(
    ("generate", "finish"),
    [
        (FakeGenerate(open_error=AppError(ErrorKind.BUSY, "no")), "server_busy"),
        (FakeGenerate([text("a"), AppError(ErrorKind.ENGINE, "no")]), "engine_error"),
        (FakeGenerate([text("a"), KeyError("no")]), "internal_error"),
    ],
)
def test_what_went_wrong_is_told_by_its_kind(log: Any, generate: FakeGenerate, finish: str):
    written = log(log_format="json")
    ask(CHAT, generate, {**BODY, "stream": True})
    assert told(written)[-1]["finish"] == finish


def hang_up_after(script: Any, part: bytes, **changes: Any) -> None:
    """A streamed chat whose client disconnects when the reply has that part."""

    async def run() -> None:
        body = json.dumps({**BODY, "stream": True, **changes}).encode()
        conversation = Conversation(
            build_fake_app(FakeGenerate(script), Settings()), "POST", CHAT, body
        )
        await conversation.until(lambda reply: part in reply.body)
        conversation.hang_up()
        await conversation.end()

    asyncio.run(run())


def test_a_request_cancelled_during_prefill_has_its_prompt_tokens(log: Any):
    written = log(log_format="json")
    script = [
        PrefillProgress(computed_tokens=3, total_tokens=500),
        PrefillProgress(prompt_index=1, computed_tokens=0, total_tokens=20),
        PrefillProgress(computed_tokens=256, total_tokens=500),
        ModelLoading(progress=7),
        FOREVER,
    ]
    hang_up_after(script, b"loading 7 %")
    [line] = told(written)
    assert line["finish"] == "cancelled"
    counts = (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"])
    assert counts == (520, 3, 0)


def test_prompts_that_finished_count_as_their_usage_says(log: Any):
    written = log(log_format="json")
    # 7 tokens, 3 of them cached; the second prompt is cancelled
    script = [
        PrefillProgress(computed_tokens=1, total_tokens=7),
        PrefillProgress(prompt_index=1, computed_tokens=2, total_tokens=20),
        finish(),
        FOREVER,
    ]
    hang_up_after(script, b'"finish_reason":"stop"', n=2)
    [line] = told(written)
    assert (line["prompt_tokens"], line["cached_tokens"]) == (27, 5)


def test_a_client_that_left_is_told(log: Any):
    async def run() -> None:
        app = build_fake_app(FakeGenerate([text("Hel"), FOREVER]), Settings())
        body = json.dumps({**BODY, "stream": True}).encode()
        conversation = Conversation(app, "POST", CHAT, body)
        await conversation.until(lambda reply: b"Hel" in reply.body)
        conversation.hang_up()
        await conversation.end()

    written = log(log_format="json")
    asyncio.run(run())
    [line] = told(written)
    assert (line["status"], line["finish"]) == (200, "cancelled")


def test_a_stream_that_broke_off_is_told_with_its_request(log: Any):
    written = log(log_format="json")
    ask(CHAT, FakeGenerate([text("a"), KeyError("no")]), {**BODY, "stream": True})
    first, access = told(written)
    assert first["message"] == "a response stream failed"
    assert first["request_id"] == access["request_id"]
    assert "KeyError" in first["exception"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/status"])
def test_probes_are_told_to_those_who_debug(log: Any, path: str):
    written = log()
    ask(path, body=None)
    assert written.getvalue() == ""
    written = log(log_level="debug")
    ask(path, body=None)
    assert f"GET {path} 200" in written.getvalue()


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        (ErrorKind.ENGINE, "error"),
        (ErrorKind.LOADING, "info"),
        (ErrorKind.STOPPING, "info"),
        (ErrorKind.DEADLINE, "info"),
        (ErrorKind.INVALID, "info"),
    ],
)
def test_a_fault_is_an_error_and_a_refusal_is_none(log: Any, kind: ErrorKind, level: str):
    written = log(log_format="json")
    ask(CHAT, FakeGenerate(open_error=AppError(kind, "no")))
    assert [line["level"] for line in told(written)] == [level]


SECRET = "what nobody may read"


@pytest.mark.parametrize(
    ("path", "body", "error", "reason"),
    [
        (CHAT, {**BODY, "temperature": 9}, "invalid_request", "temperature must be "),
        (CHAT, {**BODY, "temperature": SECRET}, "invalid_request", "temperature must be "),
        (CHAT, {**BODY, SECRET: 1}, "invalid_request", "unknown field …"),
        (CHAT, {**BODY, "messages": SECRET}, "invalid_request", "messages must be an array, not …"),
        (CHAT, {**BODY, "logit_bias": {SECRET: 1}}, "invalid_request", "…: keys are token ids"),
        (CHAT, {**BODY, "messages": [{"role": SECRET}]}, "invalid_request", "messages.0.role must"),
        ("/v1/nowhere", BODY, "not_found", "no such endpoint: POST …; the API is under /v1"),
    ],
)
def test_the_line_of_an_error_has_its_code_and_reason_without_the_clients_text(
    log: Any, path: str, body: Any, error: str, reason: str
):
    written = log(log_format="json")
    reply = ask(path, body=body)
    assert reply.status >= 400
    [line] = told(written)
    assert line["error"] == error
    assert line["reason"].startswith(reason)
    assert SECRET not in written.getvalue()
    assert f" error={error} reason=" in line["message"]


def test_an_unknown_model_is_named_in_the_line_of_its_error(log: Any):
    written = log()
    ask("/v1/models/none", body=None)
    assert written.getvalue().endswith(
        " error=model_not_found reason=\"the model 'none' does not exist: "
        'GET /v1/models lists the available models"\n'
    )


@pytest.mark.parametrize("nasty", [*NASTY[:5], NASTY[-1], "x" * 10_000, "é" * 10_000])
@pytest.mark.parametrize("log_format", ["human", "json"])
def test_a_reason_is_short_and_stays_within_its_line(log: Any, log_format: Any, nasty: str):
    written = log(log_format=log_format)
    error = AppError(ErrorKind.BUSY, f"busy {nasty}")
    ask(CHAT, FakeGenerate(open_error=error))
    [line] = written.getvalue().splitlines()
    assert "reason" in line
    assert line.isprintable()
    assert len(line) < 5000


def test_a_reply_without_an_error_has_no_reason(log: Any):
    written = log(log_format="json")
    ask(CHAT)
    ask(CHAT, FakeGenerate([text("a"), AppError(ErrorKind.ENGINE, "no")]), {**BODY, "stream": True})
    assert all("error" not in line and "reason" not in line for line in told(written))


def test_a_request_without_a_key_has_its_reason(log: Any):
    keyring = Keyring((ApiKey(name="ada", digest=hash_key("mr-secret")),))

    async def run() -> None:
        app = build_fake_app(FakeGenerate(), Settings(), keyring=keyring)
        for headers in ({}, {"authorization": "Bearer mr-wrong"}):
            body = json.dumps(BODY).encode()
            await Conversation(app, "POST", CHAT, body, headers).end()

    written = log(log_format="json")
    asyncio.run(run())
    assert [line["error"] for line in told(written)] == ["missing_api_key", "invalid_api_key"]
    assert "mr-" not in written.getvalue()


def test_without_an_access_log_faults_are_told_all_the_same(log: Any):
    written = log(access_log=False)
    ask(CHAT)
    assert written.getvalue() == ""
    ask(CHAT, FakeGenerate(open_error=AppError(ErrorKind.ENGINE, "no")))
    assert f"POST {CHAT} 500" in written.getvalue()


def test_neither_the_query_nor_the_prompt_nor_a_key_is_told(log: Any):
    written = log(log_level="debug")
    headers = {"authorization": "Bearer mr-secret", "x-api-key": "mr-secret"}
    ask(CHAT, headers=headers)
    ask(CHAT, FakeGenerate(open_error=AppError(ErrorKind.INVALID, "no")), headers=headers)
    ask(CHAT, FakeGenerate([text("a"), KeyError("no")]), headers=headers)
    assert written.getvalue().count(f"POST {CHAT}") == 3
    assert "secret" not in written.getvalue()
    assert "nobody may read" not in written.getvalue()


@pytest.mark.parametrize("nasty", [*NASTY[:-2], "x finish=stop caller=root", '"', "x" * 10_000])
def test_a_request_cannot_forge_a_line_or_a_part_of_one(log: Any, nasty: str):
    written = log()
    ask(CHAT, body={**BODY, "model": nasty})
    [line] = written.getvalue().splitlines()
    assert " caller=root" not in re.sub(r'"(?:[^"\\]|\\.)*"', "", line)
    assert len(line) < 1000


def test_a_path_is_told_as_it_was_sent(log: Any):
    """Unquoted, it could hold anything."""

    async def run() -> None:
        app = build_fake_app(FakeGenerate(), Settings())
        conversation = Conversation(app, "GET", "/a%20200%20ms=0%0ax")
        await conversation.end()

    written = log()
    asyncio.run(run())
    assert 'GET "/a%20200%20ms=0%0ax" 404' in written.getvalue()


@pytest.mark.parametrize(
    ("level", "ours", "libraries"),
    [
        ("debug", ["debug", "info", "warning", "error"], ["info", "warning", "error"]),
        ("info", ["info", "warning", "error"], ["info", "warning", "error"]),
        ("warning", ["warning", "error"], ["warning", "error"]),
        ("error", ["error"], ["error"]),
    ],
)
def test_libraries_never_say_more_than_they_do_today(
    log: Any, level: Any, ours: list[str], libraries: list[str]
):
    written = log(log_level=level, log_format="json")
    for name in ("app.x", "uvicorn.error"):
        for word in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger(name), word)("said")
    said = [(line["logger"], line["level"]) for line in told(written)]
    assert [word for name, word in said if name == "app.x"] == ours
    assert [word for name, word in said if name == "uvicorn.error"] == libraries


def test_to_debug_is_to_hear_of_everything(log: Any):
    written = log(debug=True)
    logging.getLogger("app.x").debug("said")
    assert "DEBUG app.x: said" in written.getvalue()


def test_uvicorns_own_access_log_is_silent(log: Any):
    written = log()
    logging.getLogger("uvicorn.access").info("said")
    assert written.getvalue() == ""


def test_a_visit_without_a_key_has_no_caller():
    assert RequestContext(id="x").caller == ""
    assert RequestContext(id="x", state={"caller": "ada"}).caller == "ada"
