"""End-to-end: a server process, real models, real clients."""

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

from app.core.errors import AppError
from app.core.model_files import ModelFiles
from app.core.settings import ModelSettings, Settings
from app.runners.thread_runner import ThreadRunner
from app.server import serve
from app.serving.router import ModelRouter
from tests import tiny
from tests.models.gguf.test_lora import write_adapter as write_gguf_adapter
from tests.server_process import TIMEOUT, ServerProcess, run_server
from tests.store.gguf.files import write_tiny as write_gguf
from tests.store.ollama_store import OllamaStore
from tests.store.stand_in import StandIn
from tests.throttle import Throttle
from tests.waiting import wait_until

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    with run_server(str(tiny_model)) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def long_server(long_model: Path) -> Iterator[ServerProcess]:
    with run_server(str(long_model)) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def builtin_server() -> Iterator[ServerProcess]:
    with run_server() as running_server:
        yield running_server


@pytest.fixture(scope="module")
def sdk(builtin_server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"{builtin_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def complete(server: ServerProcess, prompt: Any, **body: Any) -> dict[str, Any]:
    """One unstreamed completion, greedy by default."""
    request = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 16, **body}
    reply = httpx.post(f"{server.url}/v1/completions", json=request, timeout=TIMEOUT)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_official_sdk_talks_to_the_built_in_model(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["builtin"]
    plain = sdk.chat.completions.create(model="builtin", messages=HELLO)
    chunks = list(sdk.chat.completions.create(model="builtin", messages=HELLO, stream=True))
    assert plain.choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == plain.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason == "stop"


def test_continuous_usage_grows_with_every_chunk(sdk: openai.OpenAI) -> None:
    """guidellm requests these."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = sdk.chat.completions.create(
        model="builtin", messages=HELLO, temperature=0, stream=True, stream_options=options
    )
    assert last.usage is not None
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    # the first chunk has the role, one token is at least one character, and the last chunk is empty
    assert counts[0] == 0
    assert all(a < b for a, b in itertools.pairwise(counts[:-1]))
    assert counts[-1] == last.usage.completion_tokens
    assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage is not None} == {
        last.usage.prompt_tokens
    }
    assert "token_ids" not in chunks[0].choices[0].model_dump()


@pytest.mark.parametrize("ends_turn", [False, True])
def test_an_echoed_text_with_logprobs_has_an_entry_for_the_next_token(
    builtin_server: ServerProcess, ends_turn: bool
) -> None:
    """For any token. lm-evaluation-harness drops the last entry, and scored one token too few if
    the model would have ended its answer."""
    turn = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nHello! How can I help you"
    text = f"{turn}?" if ends_turn else turn
    body = {"model": "builtin", "prompt": text, "temperature": 0}
    scored = httpx.post(
        f"{builtin_server.url}/v1/completions",
        json={**body, "max_tokens": 1, "logprobs": 1, "echo": True},
        timeout=TIMEOUT,
    ).json()
    (choice,) = scored["choices"]
    ids = httpx.post(
        f"{builtin_server.url}/tokenize", json={"prompt": text}, timeout=TIMEOUT
    ).json()
    names = choice["logprobs"]["tokens"]
    assert len(names) == ids["count"] + 1 == len(choice["logprobs"]["token_logprobs"])
    assert "".join(names[:-1]) == text
    assert (names[-1] == "<|im_end|>") is ends_turn
    assert choice["text"] == (text if ends_turn else f"{text}?")
    assert choice["finish_reason"] == "length"


def test_the_official_sdk_gets_the_requested_json(sdk: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
        "required": ["name", "sure"],
        "additionalProperties": False,
    }
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "who", "schema": schema}}
    unstreamed = sdk.chat.completions.create(
        model="builtin", messages=HELLO, response_format=response_format
    )
    chunks = sdk.chat.completions.create(
        model="builtin", messages=HELLO, response_format=response_format, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == unstreamed.choices[0].message.content
    assert unstreamed.choices[0].finish_reason == "stop"
    value = json.loads(streamed)
    assert set(value) == {"name", "sure"}
    assert isinstance(value["sure"], bool)


def test_the_official_async_sdk_talks_to_the_built_in_model(builtin_server: ServerProcess) -> None:
    async def talk() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{builtin_server.url}/v1", api_key="none") as sdk:
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
    with run_server(str(folder), "--parallel", str(len(strict))) as running_server:

        def ask(row: dict[str, Any]) -> dict[str, Any]:
            body = {"model": name, "max_tokens": row["max_tokens"], "logprobs": 0}
            return complete(running_server, row["prompt"], **body)["choices"][0]

        # the first one alone, the others concurrently, which takes a fifth of the steps
        answers = [ask(strict[0])]
        with ThreadPoolExecutor(len(strict)) as answers_:
            answers += answers_.map(ask, strict[1:])
        for row, choice in zip(strict, answers, strict=True):
            assert row["prompt"] + choice["text"] == row["text_with_prompt"]
            assert choice["finish_reason"] == row["finish_reason"]
            logprobs = choice["logprobs"]["token_logprobs"]
            # the published list ends with the end-of-sequence token, which has no text
            assert len(row["logprobs"]) - len(logprobs) == (choice["finish_reason"] == "stop")
            assert logprobs == pytest.approx(row["logprobs"][: len(logprobs)], abs=1e-4)
        for row in _rows(documented) if documented.exists() else []:
            if row["temperature"] != 0:
                continue
            choice = complete(running_server, row["prompt"], model=name, max_tokens=256)
            text = row["prompt"] + choice["choices"][0]["text"]
            assert text.startswith(row.get("text") or row["text_prefix"])


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(connection) for connection in file.read_text().splitlines()]


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
    collected = (
        complete(server, "once upon", max_tokens=64, **{"logprobs": 2, **body})
        if ("max_tokens" not in body)
        else complete(server, "once upon", logprobs=2, **body)
    )
    body = {
        "model": "tiny",
        "prompt": "once upon",
        "temperature": 0,
        "max_tokens": 64,
        "logprobs": 2,
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT) as reply:
        lines = [
            connection[6:] for connection in reply.iter_lines() if connection.startswith("data: ")
        ]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(connection) for connection in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == collected["choices"][0]["text"]
    assert choices[-1]["finish_reason"] == collected["choices"][0]["finish_reason"]
    for part in ("tokens", "token_logprobs", "text_offset"):
        streamed = [x for c in choices if c["logprobs"] for x in c["logprobs"][part]]
        expected = collected["choices"][0]["logprobs"][part]
        assert streamed == (
            pytest.approx(expected, abs=1e-4) if part == "token_logprobs" else expected
        )
    usage = chunks[-1]["usage"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[count] == collected["usage"][count]


def test_a_repeated_prompt_is_reported_as_cached(server: ServerProcess) -> None:
    prompt = "the very same words " * 20
    cold, warm = (complete(server, prompt) for _ in range(2))
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
    assert warm["prompt_eval_count"] == len(prompt)


def disconnect(server: ServerProcess, path: str, body: dict[str, Any], after: bytes | None) -> None:
    """Send a request, read until `after` is received, and disconnect. None: read nothing, and
    disconnect when the engine runs the request."""
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as connection:
        connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        data = b""
        while after is not None and after not in data:
            part = connection.recv(65536)
            assert part, data
            data += part
        if after is None:
            wait_until(lambda: server.status()["Running"] == 1)


LONG = "all work and no play makes jack a dull boy. " * 90  # 3960 bytes, a token each


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_during_decoding_frees_the_engine(
    long_server: ServerProcess, stream: bool
) -> None:
    complete(long_server, "something else")
    body = {"model": "tiny", "prompt": "never ending", **tiny.UNENDING, "stream": stream}
    disconnect(long_server, "/v1/completions", body, b"data: " if stream else None)
    wait_until(lambda: long_server.status()["Running"] == 0)
    again = complete(long_server, "never ending", max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len("never ending") - 1


def test_a_disconnect_during_prefill_keeps_the_cached_part(
    tiny_model: Path, throttle: Throttle
) -> None:
    # one cache entry, so that the second request replaces the first
    arguments = ("--cache", "single", "--parallel", "1", "--prefill-chunk", "16")
    with run_server(str(tiny_model), *arguments, environ=throttle.variables) as running_server:
        fresh = complete(running_server, LONG)
        complete(running_server, "something else")
        body = {"model": "tiny", "prompt": LONG, "stream": True}
        throttle.on()
        disconnect(running_server, "/v1/completions", body, b": prefill")
        wait_until(lambda: running_server.status()["Running"] == 0)
        throttle.off()
        again = complete(running_server, LONG)
        assert again["choices"][0]["text"] == fresh["choices"][0]["text"]
        num_cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < num_cached < len(LONG) - 1


def test_an_answer_after_a_cancellation_is_that_of_a_fresh_server(
    long_model: Path, long_server: ServerProcess
) -> None:
    sampling = {"temperature": 1, "seed": 3, "max_tokens": 40}
    with run_server(str(long_model)) as running_server:
        fresh = complete(running_server, "it was a dark", **sampling)["choices"][0]["text"]
    body = {"model": "tiny", "prompt": "it was a bright", **tiny.UNENDING, "stream": True}
    disconnect(long_server, "/v1/completions", body, b"data: ")
    assert complete(long_server, "it was a dark", **sampling)["choices"][0]["text"] == fresh


def test_concurrent_requests_get_their_own_answers(server: ServerProcess) -> None:
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
    answers_ = [""] * len(bodies)

    def ask(index: int) -> None:
        answers_[index] = complete(server, "at once", **bodies[index])["choices"][0]["text"]

    for order in (range(len(bodies)), reversed(range(len(bodies)))):
        threads = [threading.Thread(target=ask, args=(index,)) for index in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert answers_ == alone


@pytest.mark.timing
def test_status_is_fast_during_a_long_prefill(long_server: ServerProcess) -> None:
    # a hundred times as much as is prefilled during this test
    body = {"model": "tiny", "prompt": LONG * 100, "stream": True}
    url = f"{long_server.url}/v1/completions"
    times: list[float] = []
    with (
        httpx.Client(base_url=long_server.url, timeout=TIMEOUT) as http,
        httpx.stream("POST", url, json=body, timeout=TIMEOUT) as reply,
    ):
        comments = reply.iter_lines()
        assert next(comments).startswith(": prefill")
        for _ in range(20):
            start = time.monotonic()
            status = http.get("/v1/status").json()
            times.append(time.monotonic() - start)
            assert (status["Status"], status["Running"]) == (0, 1)
        assert status["Tokens"]["prefilled"] < len(LONG) * 100
    print(f"median {1000 * statistics.median(times):.0f} ms, worst {1000 * max(times):.0f} ms")
    # the benchmark measures the required latency; this test only detects blocking
    assert statistics.median(times) < 0.25
    wait_until(lambda: long_server.status()["Running"] == 0)


def test_ollamas_client_finds_its_fields(server: ServerProcess) -> None:
    status = server.status()
    # Go's decoder is case-insensitive, and ignores unknown names
    read = {"status": int, "progress": int, "contextlength": int, "memory": int}
    found = [(k.lower(), type(v)) for k, v in status.items() if k.lower() in read]
    assert sorted(found) == sorted(read.items())
    assert (status["ContextLength"], status["Progress"]) == (4096, 100)
    assert status["Memory"] > 0
    plain = {"Content-Type": "text/plain"}
    url = f"{server.url}/v1/tokenize"
    ids = httpx.post(url, content="hé", headers=plain, timeout=TIMEOUT).json()
    assert ids == [*"hé".encode()]
    assert httpx.post(url, content="", timeout=TIMEOUT).json() == []
    body = {"prompt": "once upon", "options": {"num_predict": 5}}
    reply = httpx.post(f"{server.url}/completion", json=body, timeout=TIMEOUT)
    lines = [json.loads(connection) for connection in reply.text.splitlines()]
    text = complete(server, "once upon", max_tokens=5)["choices"][0]["text"]
    assert "".join(connection["Content"] for connection in lines) == text
    assert [connection["Done"] for connection in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["DoneReason"] == 1
    assert lines[-1]["PromptEvalCount"] == 9
    assert lines[-1]["EvalCount"] == 5


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_during_a_stream(long_model: Path, signal_number: int) -> None:
    with run_server(str(long_model), "--drain", "0.5", environ=os.environ) as running_server:
        body = {"model": "tiny", "prompt": "x", **tiny.UNENDING, "stream": True}
        with httpx.stream(
            "POST", f"{running_server.url}/v1/completions", json=body, timeout=TIMEOUT
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            code = running_server.stop(signal_number)
        assert code == (0 if signal_number == signal.SIGINT else -signal_number)
        assert "Traceback" not in running_server.log_text()


def test_a_used_port_gives_status_1(server: ServerProcess, tiny_model: Path) -> None:
    second = ServerProcess([str(tiny_model), "--port", str(server.port)])
    second.process.wait(TIMEOUT)
    assert second.stop() == 1
    message = f"mlxrunner: cannot listen on 127.0.0.1:{server.port}: the port is in use"
    assert second.log_text().startswith(message), "the error must be the only line"
    assert "Traceback" not in second.log_text()


def test_a_failed_load_ends_the_server(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: ThreadRunner, __: ModelFiles) -> None:
        raise RuntimeError("of all things")

    monkeypatch.setattr(ThreadRunner, "start", fail)
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    with pytest.raises(AppError, match="tiny could not be loaded: of all things"):
        serve(Settings(models=(ModelSettings(name=str(tiny_model)),), port=0, runner="thread"))


def test_an_internal_error_at_startup_is_logged_and_ends_the_server(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise, the exception of this task would not be noticed until the server ends."""

    async def fail(_: ModelRouter) -> None:
        raise RuntimeError("of all things")

    monkeypatch.setattr(ModelRouter, "preload_models", fail)
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    with pytest.raises(AppError, match="models could not be loaded: of all things"):
        serve(Settings(models=(ModelSettings(name=str(tiny_model)),), port=0, runner="thread"))
    assert "in fail" in caplog.text


def test_a_context_beyond_that_of_the_model_is_reduced_with_a_warning(tiny_model: Path) -> None:
    with run_server(str(tiny_model), "--context", "9999") as running_server:
        assert running_server.wait_until_ready().status()["ContextLength"] == 4096
    assert (
        "--context 9999 exceeds the context length of tiny, which is 4096"
        in running_server.log_text()
    )


def test_a_loaded_model_caches_in_the_memory_of_another_until_that_is_loaded(
    tmp_path: Path,
) -> None:
    """A may keep four conversations of 1,024 tokens, and keeps twelve until B is loaded. All its
    answers are the same to the bit."""
    folders = [str(tiny.write(tmp_path / name, seed=i)) for i, name in enumerate("ab")]
    limits = ("--memory", "3MiB", "--context", "1024", "--parallel", "2")

    def ask(name: str) -> tuple[list[Any], int]:
        """The answers to 12 prompts, and the number of those whose prompt was cached."""
        replies = [
            complete(server, f"{i:04d}" * 240, model=name, max_tokens=8, logprobs=2)
            for i in range(12)
        ]
        cached = [
            reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 900 for reply in replies
        ]
        return [reply["choices"] for reply in replies], sum(cached)

    with run_server(*folders, *limits) as server:
        first, cached = ask("a")
        assert cached == 0
        again, cached = ask("a")
        assert (again, cached) == (first, 12)
        status: Any = server.status()
        share = status["Models"][0]["Share"]
        assert status["Ledger"]["prefix"] > share
        assert status["Ledger"]["budget"] == 3 << 20
        ask("b")
        status = server.status()
        assert [model["Phase"] for model in status["Models"]] == ["ready", "ready"]
        assert [model["Evictions"] for model in status["Models"]] == [0, 0]
        assert status["Models"][1]["Share"] == share
        assert status["Ledger"]["budget"] <= 3 << 20
        again, _ = ask("a")
        assert again == first


def test_models_are_managed_while_the_server_runs(tiny_model: Path, tmp_path: Path) -> None:
    """A preview, a download, a load and a change of the context of a pinned model and of one that
    was just installed, which the next start applies."""
    hub, config = StandIn(), tmp_path / "a.toml"
    hub.add("org/new", tiny_model)
    lines = "installed = true\nmemory = 1  # GiB\n\n[[models]]\n"
    config.write_text(f'{lines}name = "{tiny_model}"\npinned = true\n')
    environ = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hub"),
        "OLLAMA_MODELS": str(tmp_path / "ollama"),
    }
    arguments = ("--config", str(config))
    with run_server(*arguments, environ=environ) as server:
        client = httpx.Client(base_url=server.wait_until_ready().url, timeout=TIMEOUT)
        with client:
            fits = client.post("/v1/models/preview", json={"model": "org/new"}).json()
            assert fits["fits"] is True, fits
            assert fits["memory"]["available"] == 1 << 30
            assert 0 < fits["memory"]["needed"] < 1 << 30
            client.post("/api/pull", json={"model": "org/new", "stream": False})
            assert client.post("/v1/models/load", json={"model": "org/new"}).status_code == 200
            for model, context in (("tiny", 300), ("org/new", 200)):
                body = {"model": model, "defaults": {"context": context}}
                assert client.post("/v1/models/defaults", json=body).json()["saved"] is True
                chat = {"model": model, "messages": HELLO, "max_tokens": 2}
                assert client.post("/v1/chat/completions", json=chat).status_code == 200
            assert read_contexts(client) == {"tiny": 300, "org/new": 200}
    text = config.read_text()
    assert "memory = 1  # GiB\n" in text
    with run_server(*arguments, environ=environ) as server:
        client = httpx.Client(base_url=server.wait_until_ready().url, timeout=TIMEOUT)
        with client:
            client.get("/api/tags")  # scans the installed models
            assert read_contexts(client) == {"tiny": 300, "org/new": 200}
    hub.close()


def test_an_adapter_of_a_gguf_model_is_served_by_name_and_as_a_part_of_it(tmp_path: Path) -> None:
    """The model of Ollama's store gives the tokens of the same model with the named adapter."""
    base = write_gguf(tmp_path / "base.gguf")
    adapter = write_gguf_adapter(tmp_path / "adapter.gguf", alpha=40.0)
    stored = OllamaStore(tmp_path / "ollama")
    layers = [
        stored.layer("model", base.read_bytes()),
        stored.layer("adapter", adapter.read_bytes()),
    ]
    stored.write("tuned", layers)

    def read_ids(server: ServerProcess, model: str) -> list[int]:
        fields = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
        body = complete(server.wait_until_ready(), "hello", model=model, **fields)
        return body["choices"][0]["token_ids"]

    with run_server(str(base), "--adapter", f"mine={adapter}") as server:
        plain, named = read_ids(server, "base"), read_ids(server, "base:mine")
    assert plain != named
    with run_server("--installed", environ={"OLLAMA_MODELS": str(tmp_path / "ollama")}) as server:
        assert read_ids(server, "tuned") == named


def read_contexts(client: httpx.Client) -> dict[str, int]:
    cards = client.get("/v1/models").json()["data"]
    return {card["id"]: card["context_length"] for card in cards if card["id"] != "builtin"}


CHAT = b'{"model":"tiny","max_tokens":2,"messages":'

INVALID_REQUESTS: list[tuple[str, bytes, int, str | None]] = [
    ("malformed", CHAT, 400, None),
    ("not a number", CHAT + b'[{"role":"user","content":"x"}],"temperature":NaN}', 400, None),
    ("half a surrogate", CHAT + b'[{"role":"user","content":"\\ud800"}]}', 400, None),
    ("deep", CHAT + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, None),
    (
        "large",
        CHAT + b'[{"role":"user","content":"' + b"x" * 34_000_000 + b'"}]}',
        413,
        "request_too_large",
    ),
    ("no messages", CHAT + b"[]}", 400, None),
    ("unknown role", CHAT + b'[{"role":"wizard","content":"x"}]}', 400, None),
    ("cold", CHAT + b'[{"role":"user","content":"x"}],"temperature":-1}', 400, None),
    ("unlikely", CHAT + b'[{"role":"user","content":"x"}],"top_p":2}', 400, None),
    ("nothing asked", b'{"model":"tiny","prompt":"x","max_tokens":0}', 400, None),
    ("misspelled field", b'{"model":"tiny","prompt":"x","temprature":1}', 400, None),
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
    ("body", "status", "code"),
    [case[1:] for case in INVALID_REQUESTS],
    ids=[case[0] for case in INVALID_REQUESTS],
)
def test_invalid_requests_get_an_error_object_and_affect_no_others(
    server: ServerProcess, body: bytes, status: int, code: str | None
) -> None:
    path = "completions" if b'"prompt"' in body else "chat/completions"
    url, headers = f"{server.url}/v1/{path}", {"Content-Type": "application/json"}
    reply = httpx.post(url, content=body, headers=headers, timeout=TIMEOUT)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == code
    assert complete(server, "fine", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_garbage_on_the_wire_affects_no_other_requests(server: ServerProcess) -> None:
    for garbage in (
        b"\x00" * 4096,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as connection:
            connection.sendall(garbage)
    assert complete(server, "still there")["choices"][0]["finish_reason"]


def test_a_broken_folder_gives_one_line_and_status_1(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"garbage")
    running_server = ServerProcess([str(folder)])
    running_server.process.wait(TIMEOUT)
    assert running_server.stop() == 1
    assert running_server.log[-1].startswith("mlxrunner: ")
    assert "is not a valid safetensors file" in running_server.log[-1]
    assert "Traceback" not in running_server.log_text()
