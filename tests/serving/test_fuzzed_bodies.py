"""Any body on each new route, through the real text path: an answer, or an error in the format of
its dialect, and never a 500."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.images import ImagePixels
from app.core.jobs import (
    CallResult,
    Capacity,
    Ended,
    EngineCall,
    EngineStats,
    Job,
    JobUpdate,
    Started,
    Token,
)
from app.core.model_files import ModelFiles
from app.core.ports import RunnerFailure, RunnerState, RunnerStatus
from app.core.requests import EmbedJob
from tests import tiny
from tests.api.anthropic import test_endpoints as anthropic
from tests.api.asgi import Conversation as Exchange
from tests.api.asgi import Reply
from tests.api.ollama import test_fuzz as ollama
from tests.serving.in_process import serve_model
from tests.test_openapi import schema_validator
from tests.text.families.rows import template

MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
BLOBS = [(method, f"/api/blobs/sha256:{'0' * 64}") for method in ("HEAD", "POST")]
OLLAMA = [*ollama.PATHS, ("POST", "/api/push"), *BLOBS]

Post = Callable[[str, str, Any], Reply]

# a lone surrogate is valid JSON, but no text
TEXTS = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud800", "<|im_end|>", "</think>"])


class EchoEngine:
    """Implements `Runner`. Each output is the last bytes of the prompt."""

    def __init__(self) -> None:
        self._state: RunnerState = "loading"

    async def start(self, files: ModelFiles) -> None:
        self._state = "ready"

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator["EchoJob"]:
        yield EchoJob(job)

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        return [bytes(4 * tiny.CONFIG["hidden_size"]) for _ in job.inputs]

    def status(self) -> RunnerStatus:
        capacity = Capacity(
            parallel=2,
            context_length=4096,
            kv_budget=1 << 20,
            kv_bytes_per_sequence=1,
            hidden_size=tiny.CONFIG["hidden_size"],
        )
        return RunnerStatus(state=self._state, progress=100, stats=EngineStats(), capacity=capacity)

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        raise AssertionError(call)

    async def wait_for_failure(self) -> RunnerFailure:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("the engine never fails")

    async def stop(self) -> None:
        self._state = "failed"


class EchoJob:
    """Implements `Submission`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.started_ns: int | None = None
        self.ended_ns: int | None = None

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        raise AssertionError("the jobs have no images")

    def limit_cached_tokens(self, tokens: int) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        name = self._job.id
        self.started_ns = self.ended_ns = time.monotonic_ns()
        yield [Started(job_id=name, cached_tokens=0, timestamp_ns=self.started_ns)]
        for id_ in self._job.prompt_token_ids[-min(8, self._job.max_tokens) :]:
            logprob = None if self._job.top_logprobs is None else -1.0
            yield [Token(job_id=name, id=id_, timestamp_ns=self.started_ns, logprob=logprob)]
        yield [Ended(job_id=name, reason="stop", timestamp_ns=self.ended_ns)]


@pytest.fixture(scope="module")
def post(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[Post]:
    """post(method, path, body) → Reply; the model has a template with tools and reasoning."""
    folder = tiny.write(tmp_path_factory.mktemp("fuzzed") / "model")
    file = folder / "tokenizer_config.json"
    source = template(shared, "Qwen-Qwen3-0.6B.jinja")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": source}))
    with asyncio.Runner() as runner:
        served = serve_model(folder, lambda _: EchoEngine())
        app = runner.run(served.__aenter__())

        async def exchange(method: str, path: str, body: Any) -> Reply:
            if isinstance(body, dict) and isinstance(body.get("model"), str):
                body = {**body, "model": folder.name}
            request = Exchange(app, method, path, json.dumps(body).encode())
            await request.task
            return request.reply

        yield lambda method, path, body: runner.run(exchange(method, path, body))
        runner.run(served.__aexit__(None, None, None))


CONVERSATIONS = st.fixed_dictionaries(
    {
        "model": st.just("model"),
        "max_tokens": st.integers(0, 9),
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXTS}
            ),
            min_size=1,
            max_size=4,
        ),
    },
    optional={"system": TEXTS, "stream": st.booleans()},
)


REUSED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", MESSAGES)
@given(body=anthropic.BODIES | anthropic.JSON | CONVERSATIONS)
@REUSED
def test_any_body_of_messages_is_answered_or_rejected(post: Post, path: str, body: Any) -> None:
    reply = post("POST", path, body)
    if reply.status != 200:
        assert 400 <= reply.status < 500, reply.body
        schema_validator("AnthropicError").validate(reply.json)
    elif reply.headers["content-type"].startswith("text/event-stream"):
        last = reply.body.decode().removesuffix("\n\n").split("\n\n")[-1]
        assert last.startswith(("event: message_stop\n", "event: error\n")), last


@pytest.mark.exhaustive
@pytest.mark.parametrize(("method", "path"), OLLAMA)
@given(body=ollama.BODIES | ollama.VALUES | CONVERSATIONS)
@REUSED
def test_any_body_of_ollamas_api_is_answered_or_rejected(
    post: Post, method: str, path: str, body: Any
) -> None:
    reply = post(method, path, body)
    if path == "/api/push":
        assert reply.status == 501
    elif reply.status not in (200, 201):
        assert 400 <= reply.status < 500, reply.body
    if reply.status >= 400 and method != "HEAD":
        assert isinstance(reply.json["error"], str)
        assert reply.json["error"]
    elif reply.headers.get("content-type") == "application/x-ndjson":
        assert all(json.loads(line) for line in reply.body.removesuffix(b"\n").split(b"\n"))
