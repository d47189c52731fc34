"""The whole of it: a server process, real models, real clients."""

import asyncio
import itertools
import json
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import schemathesis

from app.core.errors import AppError
from app.core.model_files import ModelFiles
from app.core.settings import ModelSettings, Settings
from app.runners.thread_runner import ThreadRunner
from app.server import serve
from app.serving.router import ModelRouter
from tests import tiny
from tests.api.fuzzed import CHECKS, document, examples
from tests.runners.spawning import wait_until
from tests.server_process import TIMEOUT, ServerProcess, run_server
from tests.throttle import Throttle

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    with run_server(str(tiny_model)) as running:
        yield running


@pytest.fixture(scope="module")
def long_server(long_model: Path) -> Iterator[ServerProcess]:
    with run_server(str(long_model)) as running:
        yield running


@pytest.fixture(scope="module")
def builtin() -> Iterator[ServerProcess]:
    with run_server() as running:
        yield running


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A context so short that an answer without a limit soon ends."""
    folder = tiny.write(tmp_path_factory.mktemp("small") / "tiny", max_position_embeddings=96)
    with run_server(str(folder)) as running:
        yield running


DESCRIBED = schemathesis.openapi.from_dict(document("tiny", tiny.VOCAB))


@DESCRIBED.parametrize()
@examples(10)
def test_the_real_server_answers_as_documented(case: Any, small: ServerProcess) -> None:
    """Nothing faked. What is given for each field, each left out, each made wrong, and ten drawn at
    random for each operation come to some 2,500 requests; the fake of tests/api takes more."""
    case.call_and_validate(base_url=small.url, checks=CHECKS)
    assert small.status()["Status"] == 0


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(server: ServerProcess, prompt: Any, **body: Any) -> dict[str, Any]:
    """One plain completion, greedy unless told otherwise."""
    asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 16, **body}
    reply = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=TIMEOUT)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_official_sdk_talks_to_the_built_in_model(builtin: ServerProcess) -> None:
    sdk = client(builtin)
    assert [model.id for model in sdk.models.list()] == ["builtin"]
    plain = sdk.chat.completions.create(model="builtin", messages=HELLO)
    chunks = list(sdk.chat.completions.create(model="builtin", messages=HELLO, stream=True))
    assert plain.choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == plain.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason == "stop"


def test_counts_so_far_grow_with_every_chunk_up_to_those_of_the_whole(
    builtin: ServerProcess,
) -> None:
    """What guidellm asks for."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client(builtin).chat.completions.create(
        model="builtin", messages=HELLO, temperature=0, stream=True, stream_options=options
    )
    assert last.usage is not None
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    # one token is at least one character, and no chunk is empty but the last
    assert counts[0] >= 1
    assert all(a < b for a, b in itertools.pairwise(counts[:-1]))
    assert counts[-1] == last.usage.completion_tokens
    assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage is not None} == {
        last.usage.prompt_tokens
    }
    assert "token_ids" not in chunks[0].choices[0].model_dump()


@pytest.mark.parametrize("over", [False, True])
def test_a_scored_text_has_an_entry_for_the_one_token_behind_it(
    builtin: ServerProcess, over: bool
) -> None:
    """Whichever that token is. lm-evaluation-harness takes away the last entry, and scored one
    token too few where the model would have ended its answer."""
    turn = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nHello! How can I help you"
    text = f"{turn}?" if over else turn
    body = {"model": "builtin", "prompt": text, "temperature": 0}
    scored = httpx.post(
        f"{builtin.url}/v1/completions",
        json={**body, "max_tokens": 1, "logprobs": 1, "echo": True},
        timeout=TIMEOUT,
    ).json()
    (choice,) = scored["choices"]
    ids = httpx.post(f"{builtin.url}/tokenize", json={"prompt": text}, timeout=TIMEOUT).json()
    names = choice["logprobs"]["tokens"]
    assert len(names) == ids["count"] + 1 == len(choice["logprobs"]["token_logprobs"])
    assert "".join(names[:-1]) == text
    assert (names[-1] == "<|im_end|>") is over
    assert choice["text"] == (text if over else f"{text}?")
    assert choice["finish_reason"] == "length"


def test_the_official_sdk_gets_the_json_that_it_asked_for(builtin: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
        "required": ["name", "sure"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "who", "schema": schema}}
    sdk = client(builtin)
    whole = sdk.chat.completions.create(model="builtin", messages=HELLO, response_format=wanted)
    chunks = sdk.chat.completions.create(
        model="builtin", messages=HELLO, response_format=wanted, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    value = json.loads(streamed)
    assert set(value) == {"name", "sure"}
    assert isinstance(value["sure"], bool)


def test_the_official_async_sdk_talks_to_it_too(builtin: ServerProcess) -> None:
    async def talk() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{builtin.url}/v1", api_key="none") as sdk:
            plain = await sdk.chat.completions.create(model="builtin", messages=HELLO)
            stream = await sdk.chat.completions.create(model="builtin", messages=HELLO, stream=True)
            parts = [c.choices[0].delta.content or "" async for c in stream]
            return plain.choices[0].message.content or "", "".join(parts)

    plain, streamed = asyncio.run(talk())
    assert plain == streamed != ""


@pytest.mark.parametrize("name", ["stories260K", "babyllama-361"])
def test_greedy_text_is_that_of_the_published_runs(shared: Path, name: str) -> None:
    folder = shared / "models" / name
    rows = _rows(folder / "anchors/greedy.jsonl")
    documented = folder / "anchors/upstream_documented.jsonl"
    strict = [row for row in rows if row.get("strict")]
    assert len(strict) > 5
    with run_server(str(folder), "--parallel", str(len(strict))) as running:

        def ask(row: dict[str, Any]) -> dict[str, Any]:
            asked = {"model": name, "max_tokens": row["max_tokens"], "logprobs": 0}
            return complete(running, row["prompt"], **asked)["choices"][0]

        # the first one alone, the others together, which takes a fifth of the steps
        answers = [ask(strict[0])]
        with ThreadPoolExecutor(len(strict)) as together:
            answers += together.map(ask, strict[1:])
        for row, got in zip(strict, answers, strict=True):
            assert row["prompt"] + got["text"] == row["text_with_prompt"]
            assert got["finish_reason"] == row["finish_reason"]
            told = got["logprobs"]["token_logprobs"]
            # the published list ends with the end-of-sequence token, which is no text
            assert len(row["logprobs"]) - len(told) == (got["finish_reason"] == "stop")
            assert told == pytest.approx(row["logprobs"][: len(told)], abs=1e-4)
        for row in _rows(documented) if documented.exists() else []:
            if row["temperature"] != 0:
                continue
            got = complete(running, row["prompt"], model=name, max_tokens=256)
            text = row["prompt"] + got["choices"][0]["text"]
            assert text.startswith(row.get("text") or row["text_prefix"])


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"temperature": 1, "seed": 5},
        {"temperature": 1.5, "seed": 6, "top_p": 0.9, "frequency_penalty": 1},
        {"temperature": 1, "seed": 7, "stop": ["e", "\u00e9", " t"]},
        {"temperature": 1, "seed": 8, "max_tokens": 1},
    ],
)
def test_streamed_equals_collected_to_the_byte(server: ServerProcess, body: dict[str, Any]) -> None:
    whole = (
        complete(server, "once upon", max_tokens=64, **{"logprobs": 2, **body})
        if ("max_tokens" not in body)
        else complete(server, "once upon", logprobs=2, **body)
    )
    asked = {
        "model": "tiny",
        "prompt": "once upon",
        "temperature": 0,
        "max_tokens": 64,
        "logprobs": 2,
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    for part in ("tokens", "token_logprobs", "text_offset"):
        told = [x for c in choices if c["logprobs"] for x in c["logprobs"][part]]
        wanted = whole["choices"][0]["logprobs"][part]
        assert told == (pytest.approx(wanted, abs=1e-4) if part == "token_logprobs" else wanted)
    usage = chunks[-1]["usage"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[count] == whole["usage"][count]


def test_a_warm_prompt_is_told_to_be_cached(server: ServerProcess) -> None:
    prompt = "the very same words " * 20
    cold, warm = (complete(server, prompt) for _ in range(2))
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
    assert warm["prompt_eval_count"] == len(prompt)


def hang_up(server: ServerProcess, path: str, body: dict[str, Any], after: bytes | None) -> None:
    """Send a request, read until `after` has come, and cut the line. None: cut it when the engine
    runs the request, of which nothing is read."""
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as line:
        line.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        seen = b""
        while after is not None and after not in seen:
            received = line.recv(65536)
            assert received, seen
            seen += received
        if after is None:
            wait_until(lambda: server.status()["Running"] == 1)


LONG = "all work and no play makes jack a dull boy. " * 90  # 3960 bytes, a token each


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_decoding_frees_the_engine(
    long_server: ServerProcess, stream: bool
) -> None:
    complete(long_server, "something else")
    body = {"model": "tiny", "prompt": "never ending", **tiny.UNENDING, "stream": stream}
    hang_up(long_server, "/v1/completions", body, b"data: " if stream else None)
    wait_until(lambda: long_server.status()["Running"] == 0)
    again = complete(long_server, "never ending", max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len("never ending") - 1


def test_a_client_that_leaves_while_prefilling_leaves_its_work_to_the_next(
    tiny_model: Path, throttle: Throttle
) -> None:
    # one entry, so that the second request forgets the first
    arguments = ("--cache", "single", "--parallel", "1", "--prefill-chunk", "16")
    with run_server(str(tiny_model), *arguments, environ=throttle.variables) as running:
        fresh = complete(running, LONG)
        complete(running, "something else")
        body = {"model": "tiny", "prompt": LONG, "stream": True}
        throttle.on()
        hang_up(running, "/v1/completions", body, b": prefill")
        wait_until(lambda: running.status()["Running"] == 0)
        throttle.off()
        again = complete(running, LONG)
        assert again["choices"][0]["text"] == fresh["choices"][0]["text"]
        kept = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < kept < len(LONG) - 1


def test_a_run_after_a_cancel_is_a_run_on_a_fresh_server(long_model: Path) -> None:
    asked = {"temperature": 1, "seed": 3, "max_tokens": 40}
    with run_server(str(long_model)) as running:
        fresh = complete(running, "it was a dark", **asked)["choices"][0]["text"]
    with run_server(str(long_model)) as running:
        body = {"model": "tiny", "prompt": "it was a bright", **tiny.UNENDING, "stream": True}
        hang_up(running, "/v1/completions", body, b"data: ")
        assert complete(running, "it was a dark", **asked)["choices"][0]["text"] == fresh


def test_requests_at_once_get_their_own_answers(server: ServerProcess) -> None:
    bodies: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 1},
        {"temperature": 1, "seed": 2, "presence_penalty": 2},
        {"temperature": 0, "logit_bias": {"65": 50}},
        {"temperature": 0.5, "seed": 3, "repetition_penalty": 1.5},
        {"temperature": 2, "seed": 4, "top_p": 0.5, "stop": ["a"]},
    ]
    alone = [complete(server, "at once", **body)["choices"][0]["text"] for body in bodies]
    assert len(set(alone)) == len(alone)
    together = [""] * len(bodies)

    def ask(place: int) -> None:
        together[place] = complete(server, "at once", **bodies[place])["choices"][0]["text"]

    for order in (range(len(bodies)), reversed(range(len(bodies)))):
        threads = [threading.Thread(target=ask, args=(place,)) for place in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert together == alone


def test_status_answers_at_once_while_a_long_prompt_is_read(long_server: ServerProcess) -> None:
    # a hundred times as much as is read while this looks
    body = {"model": "tiny", "prompt": LONG * 100, "stream": True}
    url = f"{long_server.url}/v1/completions"
    times: list[float] = []
    with (
        httpx.Client(base_url=long_server.url) as http,
        httpx.stream("POST", url, json=body, timeout=TIMEOUT) as reply,
    ):
        comments = reply.iter_lines()
        assert next(comments).startswith(": prefill")
        for _ in range(20):
            begun = time.monotonic()
            status = http.get("/v1/status").json()
            times.append(time.monotonic() - begun)
            assert (status["Status"], status["Running"]) == (0, 1)
        assert status["Tokens"]["prefilled"] < len(LONG) * 100
    # the figure of the requirement is the bench's to take; this only catches blocking
    assert statistics.median(times) < 0.25
    wait_until(lambda: long_server.status()["Running"] == 0)


def test_the_seeds_client_finds_what_it_reads(server: ServerProcess) -> None:
    status = server.status()
    # Go's decoder matches names whatever their case, and skips those it does not know
    read = {"status": int, "progress": int, "contextlength": int, "memory": int}
    found = [(k.lower(), type(v)) for k, v in status.items() if k.lower() in read]
    assert sorted(found) == sorted(read.items())
    assert (status["ContextLength"], status["Progress"]) == (4096, 100)
    assert status["Memory"] > 0
    plain = {"Content-Type": "text/plain"}
    assert httpx.post(f"{server.url}/v1/tokenize", content="hé", headers=plain).json() == [
        *"hé".encode()
    ]
    assert httpx.post(f"{server.url}/v1/tokenize", content="").json() == []
    asked = {"prompt": "once upon", "options": {"num_predict": 5}}
    reply = httpx.post(f"{server.url}/completion", json=asked)
    lines = [json.loads(line) for line in reply.text.splitlines()]
    text = complete(server, "once upon", max_tokens=5)["choices"][0]["text"]
    assert "".join(line["Content"] for line in lines) == text
    assert [line["Done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["DoneReason"] == 1
    assert lines[-1]["PromptEvalCount"] == 9
    assert lines[-1]["EvalCount"] == 5


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_even_while_it_streams(long_model: Path, sent: int) -> None:
    with run_server(str(long_model), "--drain", "0.5", environ=os.environ) as running:
        body = {"model": "tiny", "prompt": "x", **tiny.UNENDING, "stream": True}
        with httpx.stream(
            "POST", f"{running.url}/v1/completions", json=body, timeout=TIMEOUT
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            code = running.stop(sent)
        assert code == (0 if sent == signal.SIGINT else -sent)
        assert "Traceback" not in running.log_text()


def test_a_port_that_is_taken_gives_status_1(server: ServerProcess, tiny_model: Path) -> None:
    second = ServerProcess([str(tiny_model), "--port", str(server.port)])
    second.process.wait(TIMEOUT)
    assert second.stop() == 1
    told = f"mlxrunner: cannot listen on 127.0.0.1:{server.port}: the port is in use"
    assert second.log_text().startswith(told), "one line, and nothing was begun"
    assert "Traceback" not in second.log_text()


def test_a_load_that_breaks_ends_the_server(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: ThreadRunner, __: ModelFiles) -> None:
        raise RuntimeError("of all things")

    monkeypatch.setattr(ThreadRunner, "start", broken)
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    with pytest.raises(AppError, match="tiny could not be loaded: of all things"):
        serve(Settings(models=(ModelSettings(name=str(tiny_model)),), port=0, runner="thread"))


def test_a_fault_of_ours_at_the_start_is_told_and_ends_a_server_that_would_serve_nobody(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all tasks, this one's errors nobody would look at before the server ends."""

    async def broken(_: ModelRouter) -> None:
        raise RuntimeError("of all things")

    monkeypatch.setattr(ModelRouter, "preload_models", broken)
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    with pytest.raises(AppError, match="models could not be loaded: of all things"):
        serve(Settings(models=(ModelSettings(name=str(tiny_model)),), port=0, runner="thread"))
    assert "in broken" in caplog.text


def test_a_context_beyond_the_models_is_told_to_be_less(tiny_model: Path) -> None:
    with run_server(str(tiny_model), "--context", "9999") as running:
        assert running.wait_until_ready().status()["ContextLength"] == 4096
    assert "--context 9999 exceeds the context length of tiny, which is 4096" in running.log_text()


CHAT = b'{"model":"tiny","max_tokens":2,"messages":'

BAD: list[tuple[str, bytes, int, str | None]] = [
    ("malformed", CHAT, 400, None),
    ("not a number", CHAT + b'[{"role":"user","content":"x"}],"temperature":NaN}', 400, None),
    ("half a surrogate", CHAT + b'[{"role":"user","content":"\\ud800"}]}', 400, None),
    ("deep", CHAT + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, None),
    (
        "large",
        CHAT + b'[{"role":"user","content":"' + b"x" * 11_000_000 + b'"}]}',
        413,
        "request_too_large",
    ),
    ("no messages", CHAT + b"[]}", 400, None),
    ("unknown role", CHAT + b'[{"role":"wizard","content":"x"}]}', 400, None),
    ("cold", CHAT + b'[{"role":"user","content":"x"}],"temperature":-1}', 400, None),
    ("unlikely", CHAT + b'[{"role":"user","content":"x"}],"top_p":2}', 400, None),
    ("nothing asked", b'{"model":"tiny","prompt":"x","max_tokens":0}', 400, None),
    ("unknown field", b'{"model":"tiny","prompt":"x","flux":1}', 400, None),
    ("unknown model", b'{"model":"gpt-9","prompt":"x"}', 404, "model_not_found"),
    (
        "a schema without an answer",
        CHAT + b'[{"role":"user","content":"x"}],"response_format":{"type":"json_schema",'
        b'"json_schema":{"name":"n","schema":{"enum":[]}}}}',
        400,
        None,
    ),
    ("no such token", b'{"model":"tiny","prompt":[258]}', 400, None),
    ("no such bias", b'{"model":"tiny","prompt":"x","logit_bias":{"258":1}}', 400, None),
    (
        "longer than the context",
        CHAT + b'[{"role":"user","content":"' + b"x" * 5000 + b'"}]}',
        400,
        "context_length_exceeded",
    ),
]


@pytest.mark.parametrize(
    ("body", "status", "code"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_bad_input_gets_an_error_object_and_harms_nobody(
    server: ServerProcess, body: bytes, status: int, code: str | None
) -> None:
    path = "completions" if b'"prompt"' in body else "chat/completions"
    reply = httpx.post(
        f"{server.url}/v1/{path}", content=body, headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == code
    assert complete(server, "fine", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_garbage_on_the_wire_harms_nobody(server: ServerProcess) -> None:
    for garbage in (
        b"\x00" * 4096,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as line:
            line.sendall(garbage)
    assert complete(server, "still there")["choices"][0]["finish_reason"]


def test_a_broken_folder_gives_one_line_and_status_1(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"garbage")
    running = ServerProcess([str(folder)])
    running.process.wait(TIMEOUT)
    assert running.stop() == 1
    assert running.log[-1].startswith("mlxrunner: ")
    assert "is not a valid safetensors file" in running.log[-1]
    assert "Traceback" not in running.log_text()
