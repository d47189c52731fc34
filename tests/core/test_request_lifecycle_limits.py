"""Limits of concurrent requests per caller and of time, with scripted generations."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError, ErrorKind
from app.core.events import Event
from app.core.ports import ResolvedModel
from app.core.request_lifecycle import ObservedGenerate, RequestLimits
from app.core.requests import EmbedInput, EmbedRequest, GenerateRequest, PromptBatch
from app.core.settings import Settings
from app.core.usage import UsageCounters, UsageLimits
from tests import tiny
from tests.batches import flatten
from tests.fakes import FOREVER, HELLO, FakeGenerate, FakeModel, Pause, finish, text
from tests.server_process import TIMEOUT, run_server
from tests.waiting import wait_until

MODEL = FakeModel()
STOPPING = AppError(ErrorKind.STOPPING, "the server is shutting down")


def make_request(caller: str = "ann", **changes: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": "fake/model", "prompt": "hi", "caller": caller, **changes})


def make_embed_request(caller: str = "ann") -> EmbedRequest:
    one = EmbedInput(content="hi", param="input")
    return EmbedRequest(model="fake/model", inputs=(one,), caller=caller)


class LimitedGenerate(ObservedGenerate):
    """Limits a scripted generation."""

    def __init__(
        self, generate: FakeGenerate, settings: Settings, usage: UsageCounters | None = None
    ) -> None:
        self.limits = RequestLimits(settings, usage)
        super().__init__(generate, limits=self.limits)


async def read(limited: LimitedGenerate, request: GenerateRequest) -> list[Event]:
    async with limited.open(request, MODEL) as events:
        return [event async for event in flatten(events)]


async def get_error(result: Awaitable[Any]) -> AppError:
    with pytest.raises(AppError) as caught:
        await result
    return caught.value


async def settle() -> None:
    """Returns when all tasks wait for something other than time."""
    for _ in range(50):
        await asyncio.sleep(0)


class HeldRequests:
    """Requests that keep running."""

    def __init__(self, limited: LimitedGenerate) -> None:
        self._limited = limited
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Callable[[GenerateRequest], Awaitable[asyncio.Task[Any]]]:
        return self._hold

    async def _hold(self, request: GenerateRequest) -> asyncio.Task[Any]:
        self._tasks.append(asyncio.create_task(read(self._limited, request)))
        await settle()
        return self._tasks[-1]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def test_without_limits_requests_are_forwarded():
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate(HELLO), Settings())
        assert await read(limited, make_request()) == list(HELLO)
        assert (await limited.embed(make_embed_request(), MODEL)).vectors

    asyncio.run(run())


# Concurrent requests


def test_concurrent_requests_are_limited_per_caller():
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate([FOREVER]), Settings(max_per_key=2))
        async with HeldRequests(limited) as hold:
            await hold(make_request())
            last = await hold(make_request())
            error = await get_error(read(limited, make_request()))
            assert (error.kind, error.code) == (ErrorKind.BUSY, "too_many_requests")
            assert error.retry_after == 1
            assert not (await hold(make_request("bob"))).done()
            # requests without a key are one caller
            assert not (await hold(make_request("", n=2))).done()
            assert (await get_error(read(limited, make_request("")))).kind is ErrorKind.BUSY
            last.cancel()
            await asyncio.gather(last, return_exceptions=True)
            assert not (await hold(make_request())).done()

    asyncio.run(run())


def test_requests_and_tokens_are_counted_per_caller_and_limited():
    async def run() -> None:
        usage = UsageCounters(
            lambda name: UsageLimits(daily_tokens=20 if name == "ann" else None), lambda: 0.0
        )
        generate = FakeGenerate(HELLO)
        limited = LimitedGenerate(generate, Settings(max_per_key=1), usage)
        await read(limited, make_request())  # 7 + 2 tokens, of which 3 are cached
        await limited.embed(make_embed_request(), MODEL)
        used = usage.get("ann")
        assert (used.requests, used.cached_tokens, used.generated_tokens) == (2, 3, 2)
        usage.add_tokens("ann", prompt=20, cached=0, generated=0)
        for rejected in (read(limited, make_request()), limited.embed(make_embed_request(), MODEL)):
            error = await get_error(rejected)
            assert (error.kind, error.code) == (ErrorKind.BUSY, "insufficient_quota")
        assert usage.get("ann").requests == 2
        await read(limited, make_request("bob"))
        assert list(usage.snapshot()) == ["ann", "bob"]

    asyncio.run(run())


def test_a_disconnected_stream_counts_what_was_sent():
    async def run() -> None:
        usage = UsageCounters()
        generate = FakeGenerate([text("a"), text("b"), FOREVER])
        limited = LimitedGenerate(generate, Settings(), usage)
        async with HeldRequests(limited) as hold:
            task = await hold(make_request())
            assert usage.get("ann").generated_tokens == 0
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert usage.get("ann").generated_tokens == 2

    asyncio.run(run())


def test_new_limits_apply_to_later_requests():
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate([FOREVER]), Settings(max_per_key=1))
        async with HeldRequests(limited) as hold:
            running = await hold(make_request())
            limited.limits.apply(Settings(max_per_key=2, deadline=1e-9))
            assert (await get_error(read(limited, make_request()))).kind is ErrorKind.DEADLINE
            limited.limits.apply(Settings(max_per_key=2))
            assert not (await hold(make_request())).done()
            assert (await get_error(read(limited, make_request()))).kind is ErrorKind.BUSY
            assert not running.done()

    asyncio.run(run())


@pytest.mark.parametrize(
    "request_",
    [
        make_request(n=3),
        make_request(prompt=PromptBatch(prompts=("a", "b", "c"))),
        make_request(n=4),
    ],
    ids=["choices", "prompts", "more"],
)
def test_a_request_beyond_the_limit_of_its_caller_is_invalid(request_: GenerateRequest):
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate(), Settings(max_per_key=2))
        error = await get_error(read(limited, request_))
        assert error.kind is ErrorKind.INVALID
        assert error.param == ("n" if request_.n > 1 else "prompt")
        assert "--max-per-key" in error.message

    asyncio.run(run())


def test_embedding_requests_count_for_the_limit():
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate([FOREVER]), Settings(max_per_key=1))
        async with HeldRequests(limited) as hold:
            await hold(make_request())
            assert (
                await get_error(limited.embed(make_embed_request(), MODEL))
            ).kind is ErrorKind.BUSY
            assert (await limited.embed(make_embed_request("bob"), MODEL)).vectors

    asyncio.run(run())


Operations = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.booleans()), max_size=30
)


@given(operations=Operations, max_per_key=st.integers(1, 4))
def test_every_request_is_counted_once_and_released(
    operations: list[tuple[str, int, bool]], max_per_key: int
):
    """Each request either keeps running or ends at once, with an error or by cancellation."""

    async def run() -> None:
        generate = FakeGenerate([FOREVER])
        limited = LimitedGenerate(generate, Settings(max_per_key=max_per_key))
        in_use = dict.fromkeys("abc", 0)
        held: list[asyncio.Task[Any]] = []
        try:
            for caller, count, keep_open in operations:
                task = asyncio.create_task(read(limited, make_request(caller, n=count)))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                fits = in_use[caller] + count <= max_per_key
                assert task.done() != fits
                if fits and keep_open:
                    in_use[caller] += count
                    held.append(task)
                    continue
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        finally:
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
        for caller in in_use:
            async with limited.open(make_request(caller, n=max_per_key), MODEL):
                pass
        assert len(generate.opened) == generate.num_closed

    asyncio.run(run())


# Time


@pytest.mark.parametrize("script", [[FOREVER], [text("so"), FOREVER], [text("so"), Pause(0.1)] * 9])
def test_an_answer_beyond_the_deadline_ends_with_an_error(script: Any):
    async def run() -> None:
        generate = FakeGenerate(script)
        limited = LimitedGenerate(generate, Settings(deadline=0.2))
        error = await get_error(read(limited, make_request()))
        assert error.kind is ErrorKind.DEADLINE
        assert "0.2 s" in error.message
        assert generate.num_closed == 1

    asyncio.run(run())


class Slow(FakeGenerate):
    """Never answers."""

    async def embed(self, request: EmbedRequest, model: ResolvedModel) -> Any:
        await asyncio.sleep(1e6)

    async def detokenize(self, model: ResolvedModel, ids: Any) -> str:
        await asyncio.sleep(1e6)
        return ""


@pytest.mark.parametrize("abort", [False, True], ids=["deadline", "stopping"])
def test_the_deadline_and_shutdown_apply_before_the_first_event(abort: bool):
    async def run() -> None:
        limited = LimitedGenerate(Slow(), Settings(deadline=None if abort else 0.1))
        tasks = [
            asyncio.create_task(get_error(limited.embed(make_embed_request(), MODEL))),
            asyncio.create_task(get_error(read(limited, make_request(prompt=(1, 2))))),
        ]
        await settle()
        if abort:
            limited.limits.abort_all(STOPPING)
        for error in await asyncio.gather(*tasks):
            assert error.kind is (ErrorKind.STOPPING if abort else ErrorKind.DEADLINE)

    asyncio.run(run())


def test_the_deadline_applies_to_slow_readers():
    """The events are available without waiting, so no wait timed out."""

    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate(HELLO), Settings(deadline=0.5))
        async with limited.open(make_request(), MODEL) as events:
            await anext(aiter(events))
            await asyncio.sleep(0.6)
            assert (await get_error(anext(aiter(events)))).kind is ErrorKind.DEADLINE

    asyncio.run(run())


def test_an_answer_within_the_deadline_is_unchanged():
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate(HELLO), Settings(deadline=60))
        assert await read(limited, make_request()) == list(HELLO)

    asyncio.run(run())


def test_timeout_errors_of_the_generation_are_passed_on():
    """A TimeoutError of the generation is an internal error, not the deadline."""

    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate([TimeoutError("a disk")]), Settings(deadline=60))
        with pytest.raises(TimeoutError, match="a disk"):
            await read(limited, make_request())

    asyncio.run(run())


# Shutdown


def test_abort_all_ends_running_requests_and_rejects_new_ones():
    async def run() -> None:
        script = [text("so"), FOREVER, finish()]
        generate = FakeGenerate(script)
        limited = LimitedGenerate(generate, Settings())
        async with HeldRequests(limited) as hold:
            answers = [await hold(make_request()) for _ in range(3)]
            limited.limits.abort_all(STOPPING)
            for answer in answers:
                assert await get_error(answer) is STOPPING
            assert await get_error(read(limited, make_request())) is STOPPING
            assert await get_error(limited.embed(make_embed_request(), MODEL)) is STOPPING
            assert await get_error(limited.limits.wait(settle)) is STOPPING
            assert len(generate.opened) == generate.num_closed

    asyncio.run(run())


def test_an_aborted_stream_raises_at_its_next_event():
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate(HELLO), Settings())
        async with limited.open(make_request(), MODEL) as events:
            await anext(aiter(events))
            limited.limits.abort_all(STOPPING)
            assert await get_error(anext(aiter(events))) is STOPPING

    asyncio.run(run())


def test_a_cancelled_request_raises_no_error():
    async def run() -> None:
        generate = FakeGenerate([FOREVER])
        limited = LimitedGenerate(generate, Settings(deadline=60))
        task = asyncio.create_task(read(limited, make_request()))
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert generate.num_closed == 1

    asyncio.run(run())


# Interrupting a stream


@pytest.mark.parametrize("reason", ["deadline", "stopping"])
def test_an_interrupted_stream_raises_in_its_reader(reason: str):
    """In the current `__anext__` and in every later one; the reader's task is not cancelled."""

    async def run() -> None:
        limited = LimitedGenerate(
            FakeGenerate([text("so"), FOREVER]),
            Settings(deadline=0.5 if reason == "deadline" else None),
        )
        async with limited.open(make_request(), MODEL) as events:
            await anext(events)
            if reason == "stopping":
                asyncio.get_running_loop().call_later(0.05, limited.limits.abort_all, STOPPING)
            error = await get_error(anext(events))
            kind = ErrorKind.DEADLINE if reason == "deadline" else ErrorKind.STOPPING
            assert error.kind is kind
            assert await get_error(anext(events)) is error
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await asyncio.sleep(0)  # would raise a pending cancellation

    asyncio.run(run())


def test_only_the_first_error_interrupts_a_stream():
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate([FOREVER]), Settings(deadline=0.05))
        async with limited.open(make_request(), MODEL) as events:
            assert (await get_error(anext(events))).kind is ErrorKind.DEADLINE
            limited.limits.abort_all(STOPPING)
            assert (await get_error(anext(events))).kind is ErrorKind.DEADLINE

    asyncio.run(run())


@pytest.mark.parametrize("order", ["cancelled", "cancelled, aborted", "aborted, cancelled"])
def test_a_cancellation_by_others_stays_a_cancellation(order: str):
    """This holds even if the stream is interrupted in the same turn of the event loop."""

    async def run() -> None:
        generate = FakeGenerate([FOREVER])
        limited = LimitedGenerate(generate, Settings(deadline=60))
        task = asyncio.create_task(read(limited, make_request()))
        await settle()
        for step in order.split(", "):
            if step == "cancelled":
                task.cancel()
            else:
                limited.limits.abort_all(STOPPING)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert task.cancelling() == 1
        assert generate.num_closed == 1

    asyncio.run(run())


def test_an_error_caused_by_a_cancellation_leaves_no_cancellation_behind():
    """An interrupted stream may fail with an error other than CancelledError."""

    class Failing(FakeGenerate):
        @asynccontextmanager
        async def open(
            self, request: Any, model: Any
        ) -> AsyncGenerator[AsyncIterator[Sequence[Event]]]:
            async def events() -> AsyncGenerator[Sequence[Event]]:
                yield [text("so")]
                try:
                    await asyncio.sleep(1e6)
                except asyncio.CancelledError:
                    raise AppError(ErrorKind.ENGINE, "it broke") from None

            yield events()

    async def run() -> None:
        limited = LimitedGenerate(Failing(), Settings())
        async with limited.open(make_request(), MODEL) as events:
            await anext(events)
            asyncio.get_running_loop().call_later(0.02, limited.limits.abort_all, STOPPING)
            assert (await get_error(anext(events))).message == "it broke"
            assert await get_error(anext(events)) is STOPPING
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

    asyncio.run(run())


def test_no_timeout_and_no_timer_is_created_per_event(monkeypatch: pytest.MonkeyPatch):
    created: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            created[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    async def count_objects(num_events: int) -> dict[str, int]:
        limited = LimitedGenerate(
            FakeGenerate([*[text("a")] * num_events, finish()]), Settings(deadline=60)
        )
        created.clear()
        assert len(await read(limited, make_request())) == num_events + 1
        return dict(created)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        count(asyncio.Timeout, "__init__")
        for name in ("call_at", "call_later", "create_task", "create_future"):
            count(loop, name)
        few, many = await count_objects(1), await count_objects(1000)
        assert few["__init__"] >= 1, "timeouts are counted"
        assert few == many

    asyncio.run(run())


BODY: Any = {"model": "tiny", "prompt": "x", **tiny.UNENDING}


def test_the_real_server_limits_concurrent_requests_per_caller(long_model: Path):
    limits = ("--max-per-key", "2", "--max-tokens", str(tiny.LONG // 2))
    with run_server(str(long_model), "--runner", "thread", *limits) as server, ExitStack() as open_:
        url = f"{server.url}/v1/completions"
        stream = {**BODY, "stream": True}
        streams = [
            open_.enter_context(httpx.stream("POST", url, json=stream, timeout=TIMEOUT))
            for _ in range(2)
        ]
        assert [reply.status_code for reply in streams] == [200, 200]
        rejected = httpx.post(url, json=BODY, timeout=TIMEOUT)
        assert (rejected.status_code, rejected.headers["retry-after"]) == (429, "1")
        open_.close()
        wait_until(lambda: server.status()["Running"] == 0)
        short = httpx.post(url, json={**BODY, "max_tokens": 20}, timeout=TIMEOUT).json()
        assert short["choices"][0]["finish_reason"] == "length"


def test_the_real_server_enforces_the_deadline(long_model: Path):
    # long enough to start on a busy machine: an answer that has not begun ends with a status
    with run_server(str(long_model), "--runner", "thread", "--deadline", "3") as server:
        url = f"{server.url}/v1/completions"
        httpx.post(url, json={**BODY, "max_tokens": 2}, timeout=TIMEOUT)
        with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=TIMEOUT) as stream:
            *_, error, done = filter(None, stream.iter_lines())
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert done == "data: [DONE]"
        rejected = httpx.post(url, json=BODY, timeout=TIMEOUT)
        assert rejected.status_code == 504
        assert rejected.json()["error"]["code"] == "deadline_exceeded"
        assert rejected.headers["x-should-retry"] == "false"


def test_the_real_server_enforces_max_time(long_model: Path):
    with run_server(str(long_model), "--runner", "thread", "--max-time", "0.3") as server:
        reply = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=TIMEOUT)
        body = reply.json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert 1 <= body["usage"]["completion_tokens"] < tiny.LONG // 2
        wait_until(lambda: server.status()["Running"] == 0)
