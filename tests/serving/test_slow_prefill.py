"""Streams while a prompt is computed for a minute, or waits for its turn, in every dialect.

The event loop has a clock that stands still until the test moves it, so each frame has an exact
time, and no test waits. One exhaustive test spends a real minute for each dialect.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.images import ImagePixels
from app.core.jobs import (
    CallResult,
    Capacity,
    Ended,
    EngineCall,
    EngineStats,
    Job,
    JobUpdate,
    Prefilled,
    Started,
    Token,
)
from app.core.model_files import ModelFiles
from app.core.ports import RunnerFailure, RunnerState, RunnerStatus
from app.core.requests import EmbedJob
from tests import tiny
from tests.api.asgi import Conversation as Exchange
from tests.api.asgi import Reply
from tests.server_process import run_server
from tests.serving.in_process import serve_model
from tests.throttle import STEP_SECONDS, Throttle

PREFILL_SECONDS = 60.0

# promised: of the first byte after the tokens are counted, and without it; between two outputs
FIRST_BYTE, FIRST_BYTE_IN_QUEUE, MAX_SILENCE = 1.0, 5.0, 10.0

MESSAGES = [{"role": "user", "content": "Hello"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "stream": True},
    "/v1/completions": {"prompt": "Hello", "stream": True},
    "/v1/responses": {"input": "Hello", "stream": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9, "stream": True},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "Hello"},
}


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only with `advance`."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0

    def time(self) -> float:
        return self._now

    async def advance(self, seconds: float) -> None:
        """Moves the clock, and lets everything run that is due."""
        self._now += seconds
        for _ in range(20):
            await asyncio.sleep(0)


class SlowEngine:
    """Implements `Runner`. A job waits in the queue until `may_start` is set, and its prefill lasts
    until `may_answer` is set. prefilling: set while a prompt is computed."""

    def __init__(self) -> None:
        self.may_start, self.may_answer = asyncio.Event(), asyncio.Event()
        self.submitted, self.prefilling = asyncio.Event(), asyncio.Event()
        self._state: RunnerState = "loading"

    async def start(self, files: ModelFiles) -> None:
        self._state = "ready"

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator["SlowJob"]:
        yield SlowJob(self, job)

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        raise AssertionError("the engine computes prompts")

    def status(self) -> RunnerStatus:
        capacity = Capacity(
            parallel=1, context_length=4096, kv_budget=1 << 20, kv_bytes_per_sequence=1
        )
        return RunnerStatus(state=self._state, progress=100, stats=EngineStats(), capacity=capacity)

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        raise AssertionError(call)

    async def wait_for_failure(self) -> RunnerFailure:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("the engine never fails")

    async def stop(self) -> None:
        self._state = "failed"


class SlowJob:
    """Implements `Submission`."""

    def __init__(self, engine: SlowEngine, job: Job) -> None:
        self._engine = engine
        self._job = job
        self.started_ns: int | None = None
        self.ended_ns: int | None = None

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        raise AssertionError("the jobs have no images")

    def limit_cached_tokens(self, tokens: int) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        name = self._job.id
        self._engine.submitted.set()
        await self._engine.may_start.wait()
        self.started_ns = time.monotonic_ns()
        yield [Started(job_id=name, cached_tokens=0, timestamp_ns=self.started_ns)]
        self._engine.prefilling.set()
        await self._engine.may_answer.wait()
        yield [Prefilled(job_id=name, computed_tokens=len(self._job.prompt_token_ids))]
        yield [Token(job_id=name, id=ord("A"), timestamp_ns=time.monotonic_ns())]
        self.ended_ns = time.monotonic_ns()
        yield [
            Ended(job_id=name, reason="stop", timestamp_ns=self.ended_ns, stop_token_id=tiny.END)
        ]


def run_stepped(use: Callable[[SteppedLoop], Any]) -> Any:
    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SteppedLoop)
        return runner.run(use(loop))


async def exchange(folder: Path, path: str, loop: SteppedLoop, *, queued: bool) -> None:
    engine = SlowEngine()
    if not queued:
        engine.may_start.set()
    async with serve_model(folder, lambda _: engine) as app:
        body = json.dumps({"model": folder.name, **STREAMS[path]}).encode()
        began = loop.time()
        sent: list[float] = []

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            async def note(message: Any) -> None:
                if message.get("body"):
                    sent.append(loop.time())
                await send(message)

            await app(scope, receive, note)

        request = Exchange(watched, "POST", path, body)
        await (engine.submitted if queued else engine.prefilling).wait()
        await loop.advance(0)
        for _ in range(round(PREFILL_SECONDS / 0.25)):
            await loop.advance(0.25)
        engine.may_start.set()
        engine.may_answer.set()
        await request.task
    first = FIRST_BYTE_IN_QUEUE if queued else 0.0
    assert sent[0] - began <= first
    gaps = [later - earlier for earlier, later in pairwise(sent)]
    assert max(gaps) <= MAX_SILENCE, sent
    assert sent[-1] - began == PREFILL_SECONDS
    check_stream(path, request.reply)


def check_stream(path: str, reply: Reply) -> None:
    """Every line is one that the strictest client of the dialect reads, and the answer is whole."""
    assert reply.status == 200
    text = reply.body.decode()
    if path.startswith("/api/"):
        assert text.endswith("\n")
        lines = [json.loads(line) for line in text.removesuffix("\n").split("\n")]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        return
    assert "A" in text
    for frame in text.removesuffix("\n\n").split("\n\n"):
        assert frame.startswith(("event: ", "data: ", ": ")), frame
        # comments keep a connection open, but clients of this dialect count events
        assert path != "/v1/messages" or frame.startswith("event: "), frame


@pytest.mark.parametrize("path", STREAMS)
def test_the_first_byte_comes_before_the_prefill_and_then_one_every_ten_seconds(
    tiny_model: Path, path: str
) -> None:
    run_stepped(lambda loop: exchange(tiny_model, path, loop, queued=False))


@pytest.mark.parametrize("path", STREAMS)
def test_a_request_in_the_queue_gets_its_first_byte_after_five_seconds(
    tiny_model: Path, path: str
) -> None:
    run_stepped(lambda loop: exchange(tiny_model, path, loop, queued=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.timing
def test_a_real_minute_of_prefill_is_never_silent(
    long_model: Path, throttle: Throttle, path: str
) -> None:
    """The same with a real engine in its own process, and a real clock."""
    chunk, steps = 16, round(PREFILL_SECONDS / STEP_SECONDS)
    text = "x" * (chunk * steps)
    body = json.loads(json.dumps(STREAMS[path]).replace("Hello", text))
    options = ["--prefill-chunk", str(chunk), "--context", str(2 * len(text))]
    with run_server(str(long_model), *options, environ=throttle.on().variables) as server:
        began = time.monotonic()
        times = [began]
        fields = {"model": long_model.name, **body}
        with httpx.stream("POST", server.url + path, json=fields, timeout=MAX_SILENCE * 2) as reply:
            assert reply.status_code == 200
            for _ in reply.iter_raw():
                times.append(time.monotonic())
                if times[-1] - began >= PREFILL_SECONDS - 5:
                    break
    # one step passes before the first event
    assert times[1] - began < FIRST_BYTE + STEP_SECONDS
    gaps = [later - earlier for earlier, later in pairwise(times)]
    print(f"first byte after {times[1] - began:.1f} s, longest silence {max(gaps):.1f} s")
    assert max(gaps) < MAX_SILENCE + STEP_SECONDS
    assert times[-1] - began >= PREFILL_SECONDS - 5 - MAX_SILENCE
