"""The server's log: one line per event, with its request, which no client can forge."""

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

from app.core.errors import AppError, ErrorKind, escape_control_characters
from app.core.events import ModelLoading, PrefillProgress
from app.core.request_context import REQUEST_CONTEXT, RequestContext
from app.core.settings import Settings
from app.core.terminal import OutputTerminal
from app.http.api_keys import ApiKey, Keyring, hash_key
from app.http.request_id import RequestIdMiddleware
from app.observability.logs import (
    HumanFormatter,
    JsonFormatter,
    TerminalFormatter,
    configure_logging,
    set_log_levels,
)
from tests.api.asgi import Conversation, Reply
from tests.fakes import CARD, FOREVER, FakeGenerate, build_fake_app, finish, text

CHAT = "/v1/chat/completions"
BODY: Any = {"model": CARD.id, "messages": [{"role": "user", "content": "what nobody may read"}]}

# a forged line, escape sequences, C1 controls, other line ends, right-to-left override
HOSTILE_TEXTS = (
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
    """log(**settings): configures logging and returns the output. Restores logging at the end."""
    names = (None, "app", "app.access", "uvicorn.access", "httpx2")
    before = {name: logging.getLogger(name).level for name in names}
    handlers = logging.getLogger().handlers
    # tests that run uvicorn in this process leave its logging configuration behind, which our
    # server does not use
    for name in ("uvicorn", "uvicorn.error"):
        for attribute, value in (("level", logging.NOTSET), ("propagate", True), ("handlers", [])):
            monkeypatch.setattr(logging.getLogger(name), attribute, value)

    def configure(**settings: Any) -> io.StringIO:
        output = io.StringIO()
        monkeypatch.setattr(sys, "stderr", output)
        configure_logging(Settings(**settings))
        return output

    yield configure
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
    logging.getLogger().handlers = handlers


def test_the_levels_can_be_changed_later(log: Callable[..., io.StringIO]):
    output = log(log_level="warning")
    for level in ("debug", "warning"):
        logging.getLogger("app.test").debug("at %s", level)
        set_log_levels(Settings(log_level="debug"))
    assert "at debug" not in output.getvalue()
    assert "DEBUG app.test: at warning" in output.getvalue()


def record(message: str, *arguments: Any, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("app.x", logging.INFO, "x.py", 1, message, arguments, info)


def send_request(
    path: str,
    generate: FakeGenerate | None = None,
    body: Any = BODY,
    headers: dict[str, str] | None = None,
) -> Reply:
    """One request to a separate application, which may fail."""

    async def run() -> Reply:
        app = build_fake_app(generate or FakeGenerate(), Settings())
        method = "GET" if body is None else "POST"
        conversation = Conversation(app, method, path, json.dumps(body).encode(), headers)
        await asyncio.wait({conversation.task})
        conversation.task.exception()
        return conversation.reply

    return asyncio.run(run())


def parse_lines(output: io.StringIO) -> list[Any]:
    return [json.loads(line) for line in output.getvalue().splitlines()]


@pytest.mark.parametrize("hostile", HOSTILE_TEXTS)
def test_no_text_breaks_its_line(hostile: str):
    for formatter in (HumanFormatter(), JsonFormatter()):
        line = formatter.format(record("the client said %s", hostile))
        assert len(line.splitlines()) == 1
        assert line.isprintable()
    assert json.loads(line)["message"] == f"the client said {hostile}"


@given(st.text(st.characters(codec=None)))
def test_log_lines_are_printable(text_: str):
    assert escape_control_characters(text_).isprintable()
    line = JsonFormatter().format(record("%s", text_))
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["message"] == text_


@pytest.mark.parametrize("hostile", HOSTILE_TEXTS)
def test_no_text_breaks_a_traceback(hostile: str):
    try:
        raise KeyError(hostile) from ValueError(hostile)
    except KeyError as error:
        log_record = record("it broke", error=error)
    human = HumanFormatter().format(log_record)
    first, *rest = human.split("\n")
    assert first.endswith("it broke")
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    line = JsonFormatter().format(log_record)
    assert line.isprintable()
    assert "Traceback" in json.loads(line)["exception"]


def test_the_stack_of_a_record_follows_on_indented_lines():
    log_record = record("the event loop has been blocked")
    log_record.stack_info = "Stack (most recent call last):\n  in block\n"
    for formatter in (HumanFormatter(), TerminalFormatter(OutputTerminal())):
        first, *rest = formatter.format(log_record).split("\n")
        assert first.endswith("the event loop has been blocked")
        assert rest == ["    Stack (most recent call last):", "      in block"]
    assert "in block" in json.loads(JsonFormatter().format(log_record))["exception"]


def test_a_json_line_is_an_object_with_a_time_in_utc():
    log_record = record("%d of %d", 3, 4)
    log_record.created = 1_763_744_400.25
    assert json.loads(JsonFormatter().format(log_record)) == {
        "time": "2025-11-21T17:00:00.250Z",
        "level": "info",
        "logger": "app.x",
        "message": "3 of 4",
    }


def test_every_line_of_a_request_has_its_id_in_threads_too():
    async def application(scope: Any, receive: Any, send: Any) -> None:
        lines.append(JsonFormatter().format(record("first")))
        await asyncio.to_thread(lambda: lines.append(JsonFormatter().format(record("in a thread"))))
        scope["state"]["caller"] = "ada"  # as the authentication does
        lines.append(HumanFormatter().format(record("human")))
        task = asyncio.create_task(asyncio.to_thread(JsonFormatter().format, record("later")))
        lines.append(await task)

    async def run() -> None:
        headers = {"x-request-id": "mine"}
        await Conversation(RequestIdMiddleware(application), "GET", "/", headers=headers).task

    lines: list[str] = []
    asyncio.run(run())
    first, in_thread, human, later = lines
    for line in (first, in_thread, later):
        assert json.loads(line)["request_id"] == "mine"
    assert "app.x [mine]: human" in human
    assert json.loads(later)["caller"] == "ada"
    assert "request_id" not in json.loads(JsonFormatter().format(record("of no request")))


def test_concurrent_requests_keep_their_own_ids():
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.01)
        context = REQUEST_CONTEXT.get()
        assert context is not None
        seen.append((scope["path"], context.id))

    async def run() -> None:
        app = RequestIdMiddleware(application)
        paths = [f"/{n}" for n in range(20)]
        conversations = [
            Conversation(app, "GET", p, headers={"x-request-id": p[1:]}) for p in paths
        ]
        await asyncio.gather(*(conversation.task for conversation in conversations))

    seen: list[tuple[str, str]] = []
    asyncio.run(run())
    assert len(seen) == 20
    assert all(path == f"/{name}" for path, name in seen)


def test_a_finished_request_is_one_line(log: Any):
    output = log(log_format="json")
    send_request(CHAT, headers={"x-request-id": "mine"})
    [line] = parse_lines(output)
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


def test_the_human_format_has_the_same_fields(log: Any):
    output = log()
    send_request(CHAT, body={**BODY, "n": 2})
    [line] = output.getvalue().splitlines()
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
def test_an_error_is_logged_by_its_code(log: Any, generate: FakeGenerate, finish: str):
    output = log(log_format="json")
    send_request(CHAT, generate, {**BODY, "stream": True})
    assert parse_lines(output)[-1]["finish"] == finish


def disconnect_after(script: Any, part: bytes, **changes: Any) -> None:
    """A streamed chat request whose client disconnects after this part of the reply."""

    async def run() -> None:
        body = json.dumps({**BODY, "stream": True, **changes}).encode()
        conversation = Conversation(
            build_fake_app(FakeGenerate(script), Settings()), "POST", CHAT, body
        )
        await conversation.until(lambda reply: part in reply.body)
        conversation.disconnect()
        await conversation.end()

    asyncio.run(run())


def test_a_request_cancelled_during_prefill_has_its_prompt_tokens(log: Any):
    output = log(log_format="json")
    script = [
        PrefillProgress(computed_tokens=3, total_tokens=500),
        PrefillProgress(prompt_index=1, computed_tokens=0, total_tokens=20),
        PrefillProgress(computed_tokens=256, total_tokens=500),
        ModelLoading(progress=7),
        FOREVER,
    ]
    disconnect_after(script, b"loading 7 %")
    [line] = parse_lines(output)
    assert line["finish"] == "cancelled"
    counts = (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"])
    assert counts == (520, 3, 0)


def test_finished_prompts_count_by_their_usage(log: Any):
    output = log(log_format="json")
    # 7 tokens, 3 of them cached; the second prompt is cancelled
    script = [
        PrefillProgress(computed_tokens=1, total_tokens=7),
        PrefillProgress(prompt_index=1, computed_tokens=2, total_tokens=20),
        finish(),
        FOREVER,
    ]
    disconnect_after(script, b'"finish_reason":"stop"', n=2)
    [line] = parse_lines(output)
    assert (line["prompt_tokens"], line["cached_tokens"]) == (27, 5)


def test_a_disconnect_is_logged(log: Any):
    async def run() -> None:
        app = build_fake_app(FakeGenerate([text("Hel"), FOREVER]), Settings())
        body = json.dumps({**BODY, "stream": True}).encode()
        conversation = Conversation(app, "POST", CHAT, body)
        await conversation.until(lambda reply: b"Hel" in reply.body)
        conversation.disconnect()
        await conversation.end()

    output = log(log_format="json")
    asyncio.run(run())
    [line] = parse_lines(output)
    assert (line["status"], line["finish"]) == (200, "cancelled")


def test_a_failed_stream_is_logged_with_its_request(log: Any):
    output = log(log_format="json")
    send_request(CHAT, FakeGenerate([text("a"), KeyError("no")]), {**BODY, "stream": True})
    first, access = parse_lines(output)
    assert first["message"] == "a response stream failed"
    assert first["request_id"] == access["request_id"]
    assert "KeyError" in first["exception"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/status"])
def test_probes_are_logged_at_debug_level(log: Any, path: str):
    output = log()
    send_request(path, body=None)
    assert output.getvalue() == ""
    output = log(log_level="debug")
    send_request(path, body=None)
    assert f"GET {path} 200" in output.getvalue()


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
def test_only_server_errors_have_level_error(log: Any, kind: ErrorKind, level: str):
    output = log(log_format="json")
    send_request(CHAT, FakeGenerate(open_error=AppError(kind, "no")))
    assert [line["level"] for line in parse_lines(output)] == [level]


SECRET = "what nobody may read"


@pytest.mark.parametrize(
    ("path", "body", "error", "reason"),
    [
        (CHAT, {**BODY, "temperature": 9}, "invalid_request", "temperature must be "),
        (CHAT, {**BODY, "temperature": SECRET}, "invalid_request", "temperature must be "),
        (CHAT, {**BODY, "temprature": 1}, "invalid_request", "unknown field …: did you mean 'temp"),
        (CHAT, {**BODY, "messages": SECRET}, "invalid_request", "messages must be an array, not …"),
        (CHAT, {**BODY, "logit_bias": {SECRET: 1}}, "invalid_request", "…: keys are token IDs"),
        (CHAT, {**BODY, "messages": [{"role": SECRET}]}, "invalid_request", "messages.0.role must"),
        ("/v1/nowhere", BODY, "not_found", "no such endpoint: POST …; /docs lists all"),
    ],
)
def test_error_lines_have_code_and_reason_without_the_clients_text(
    log: Any, path: str, body: Any, error: str, reason: str
):
    output = log(log_format="json")
    reply = send_request(path, body=body)
    assert reply.status >= 400
    [line] = parse_lines(output)
    assert line["error"] == error
    assert line["reason"].startswith(reason)
    assert SECRET not in output.getvalue()
    assert f" error={error} reason=" in line["message"]


def test_ignored_fields_are_named_in_the_line_of_the_request(log: Any):
    output = log(log_format="json")
    send_request(CHAT, body={**BODY, SECRET: 1, "cot_id": SECRET})
    [line] = parse_lines(output)
    assert line["notice"] == "ignored unknown fields: \\u2026, cot_id"
    assert SECRET not in output.getvalue()


def test_an_unknown_model_is_named_in_the_line_of_its_error(log: Any):
    output = log()
    send_request("/v1/models/none", body=None)
    assert output.getvalue().endswith(
        " error=model_not_found reason=\"the model 'none' does not exist: "
        'GET /v1/models lists the available models"\n'
    )


@pytest.mark.parametrize(
    "hostile", [*HOSTILE_TEXTS[:5], HOSTILE_TEXTS[-1], "x" * 10_000, "é" * 10_000]
)
@pytest.mark.parametrize("log_format", ["human", "json"])
def test_a_reason_is_short_and_on_one_line(log: Any, log_format: Any, hostile: str):
    output = log(log_format=log_format)
    error = AppError(ErrorKind.BUSY, f"busy {hostile}")
    send_request(CHAT, FakeGenerate(open_error=error))
    [line] = output.getvalue().splitlines()
    assert "reason" in line
    assert line.isprintable()
    assert len(line) < 5000


def test_a_reply_without_an_error_has_no_reason(log: Any):
    output = log(log_format="json")
    send_request(CHAT)
    send_request(
        CHAT, FakeGenerate([text("a"), AppError(ErrorKind.ENGINE, "no")]), {**BODY, "stream": True}
    )
    assert all("error" not in line and "reason" not in line for line in parse_lines(output))


def test_a_request_without_a_key_has_its_reason(log: Any):
    keyring = Keyring((ApiKey(name="ada", digest=hash_key("mr-secret")),))

    async def run() -> None:
        app = build_fake_app(FakeGenerate(), Settings(), keyring=keyring)
        for headers in ({}, {"authorization": "Bearer mr-wrong"}):
            body = json.dumps(BODY).encode()
            await Conversation(app, "POST", CHAT, body, headers).end()

    output = log(log_format="json")
    asyncio.run(run())
    assert [line["error"] for line in parse_lines(output)] == ["missing_api_key", "invalid_api_key"]
    assert "mr-" not in output.getvalue()


def test_without_an_access_log_errors_are_logged(log: Any):
    output = log(access_log=False)
    send_request(CHAT)
    assert output.getvalue() == ""
    send_request(CHAT, FakeGenerate(open_error=AppError(ErrorKind.ENGINE, "no")))
    assert f"POST {CHAT} 500" in output.getvalue()


def test_queries_prompts_and_keys_are_not_logged(log: Any):
    output = log(log_level="debug")
    headers = {"authorization": "Bearer mr-secret", "x-api-key": "mr-secret"}
    send_request(CHAT, headers=headers)
    send_request(CHAT, FakeGenerate(open_error=AppError(ErrorKind.INVALID, "no")), headers=headers)
    send_request(CHAT, FakeGenerate([text("a"), KeyError("no")]), headers=headers)
    assert output.getvalue().count(f"POST {CHAT}") == 3
    assert "secret" not in output.getvalue()
    assert "nobody may read" not in output.getvalue()


@pytest.mark.parametrize(
    "hostile", [*HOSTILE_TEXTS[:-2], "x finish=stop caller=root", '"', "x" * 10_000]
)
def test_a_request_cannot_forge_a_line_or_a_field(log: Any, hostile: str):
    output = log()
    send_request(CHAT, body={**BODY, "model": hostile})
    [line] = output.getvalue().splitlines()
    assert " caller=root" not in re.sub(r'"(?:[^"\\]|\\.)*"', "", line)
    assert len(line) < 1000


def test_a_path_is_logged_as_it_was_sent(log: Any):
    """Unquoted, it could contain anything."""

    async def run() -> None:
        app = build_fake_app(FakeGenerate(), Settings())
        conversation = Conversation(app, "GET", "/a%20200%20ms=0%0ax")
        await conversation.end()

    output = log()
    asyncio.run(run())
    assert 'GET "/a%20200%20ms=0%0ax" 404' in output.getvalue()


@pytest.mark.parametrize(
    ("level", "ours", "libraries"),
    [
        ("debug", ["debug", "info", "warning", "error"], ["info", "warning", "error"]),
        ("info", ["info", "warning", "error"], ["info", "warning", "error"]),
        ("warning", ["warning", "error"], ["warning", "error"]),
        ("error", ["error"], ["error"]),
    ],
)
def test_libraries_log_at_most_at_info_level(
    log: Any, level: Any, ours: list[str], libraries: list[str]
):
    output = log(log_level=level, log_format="json")
    for name in ("app.x", "uvicorn.error"):
        for level_name in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger(name), level_name)("said")
    logged = [(line["logger"], line["level"]) for line in parse_lines(output)]
    assert [level_name for name, level_name in logged if name == "app.x"] == ours
    assert [level_name for name, level_name in logged if name == "uvicorn.error"] == libraries


def test_debug_logs_everything(log: Any):
    output = log(debug=True)
    logging.getLogger("app.x").debug("said")
    assert "DEBUG app.x: said" in output.getvalue()


def test_uvicorns_own_access_log_is_silent(log: Any):
    output = log()
    logging.getLogger("uvicorn.access").info("said")
    assert output.getvalue() == ""


def test_a_request_without_a_key_has_no_caller():
    assert RequestContext(id="x").caller == ""
    assert RequestContext(id="x", state={"caller": "ada"}).caller == "ada"
