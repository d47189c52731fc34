"""What a caller may take and how long an answer may take, with nothing below but a script."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.embeddings import EmbedInput, EmbedRequest
from app.core.errors import AppError, ErrorKind
from app.core.events import Event
from app.core.requests import Conversation, GenerateRequest, Message, PromptBatch
from app.core.settings import Settings
from app.serving.limits import LimitedGenerate
from tests import tiny
from tests.fakes import FOREVER, HELLO, FakeGenerate, Pause, finish, text
from tests.runners.spawning import wait_until
from tests.server_process import TIMEOUT, run_server

STOPPING = AppError(ErrorKind.STOPPING, "the server is shutting down")


def asked(caller: str = "ann", **changes: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": "fake/model", "prompt": "hi", "caller": caller, **changes})


def embedding(caller: str = "ann") -> EmbedRequest:
    one = EmbedInput(content="hi", param="input")
    return EmbedRequest(model="fake/model", inputs=(one,), caller=caller)


async def read(limited: LimitedGenerate, request: GenerateRequest) -> list[Event]:
    async with limited.open(request) as events:
        return [event async for event in events]


async def refusal(result: Awaitable[Any]) -> AppError:
    with pytest.raises(AppError) as caught:
        await result
    return caught.value


async def settled() -> None:
    """Returns when all that is under way waits for something, none of which is time."""
    for _ in range(50):
        await asyncio.sleep(0)


class Held:
    """Answers that stay in the making."""

    def __init__(self, limited: LimitedGenerate) -> None:
        self._limited = limited
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Callable[[GenerateRequest], Awaitable[asyncio.Task[Any]]]:
        return self._hold

    async def _hold(self, request: GenerateRequest) -> asyncio.Task[Any]:
        self._tasks.append(asyncio.create_task(read(self._limited, request)))
        await settled()
        return self._tasks[-1]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def test_without_limits_everything_passes():
    async def run() -> None:
        generate = FakeGenerate(HELLO)
        limited = LimitedGenerate(generate, Settings())
        assert await read(limited, asked()) == list(HELLO)
        assert (await limited.embed(embedding())).vectors
        assert limited.list_models() == generate.cards
        assert limited.status() == generate.runner_status
        assert limited.list_model_states() == generate.list_model_states()
        assert await limited.tokenize("A") == [65]
        assert await limited.detokenize([65]) == "A"
        assert await limited.get_token_bytes([65]) == [b"A"]
        assert (await limited.get_tokenizer_info())["tokenizer_class"] == "Bytes"
        said = Conversation(messages=(Message(role="user", content="A"),))
        assert await limited.tokenize_chat(replace(asked(), prompt=said)) == [65]
        assert (await limited.load("fake/model", 5.0)).name == "fake/model"
        assert (await limited.unload("fake/model")).phase == "unloaded"
        await limited.discover("other")
        assert generate.loaded == [("fake/model", 5.0)]
        assert generate.discovered == ["other"]

    asyncio.run(run())


# Places


def test_one_caller_gets_no_more_than_its_places_and_others_get_theirs():
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate([FOREVER]), Settings(max_per_key=2))
        async with Held(limited) as hold:
            await hold(asked())
            last = await hold(asked())
            refused = await refusal(read(limited, asked()))
            assert (refused.kind, refused.code) == (ErrorKind.BUSY, "too_many_requests")
            assert refused.retry_after == 1
            assert not (await hold(asked("bob"))).done()
            # who has no key is a caller too
            assert not (await hold(asked("", n=2))).done()
            assert (await refusal(read(limited, asked("")))).kind is ErrorKind.BUSY
            last.cancel()
            await asyncio.gather(last, return_exceptions=True)
            assert not (await hold(asked())).done()

    asyncio.run(run())


@pytest.mark.parametrize(
    "request_",
    [asked(n=3), asked(prompt=PromptBatch(prompts=("a", "b", "c"))), asked(n=4)],
    ids=["choices", "prompts", "more"],
)
def test_more_than_one_caller_can_ever_have_is_no_matter_of_waiting(request_: GenerateRequest):
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate(), Settings(max_per_key=2))
        refused = await refusal(read(limited, request_))
        assert refused.kind is ErrorKind.INVALID
        assert refused.param == ("n" if request_.n > 1 else "prompt")
        assert "--max-per-key" in refused.message

    asyncio.run(run())


def test_vectors_take_a_place_too():
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate([FOREVER]), Settings(max_per_key=1))
        async with Held(limited) as hold:
            await hold(asked())
            assert (await refusal(limited.embed(embedding()))).kind is ErrorKind.BUSY
            assert (await limited.embed(embedding("bob"))).vectors

    asyncio.run(run())


Lives = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.booleans()), max_size=30)


@given(lives=Lives, most=st.integers(1, 4))
def test_whatever_comes_and_goes_a_place_is_taken_once_and_given_back(
    lives: list[tuple[str, int, bool]], most: int
):
    """Each either stays or is left at once, by an error or by a client."""

    async def run() -> None:
        generate = FakeGenerate([FOREVER])
        limited = LimitedGenerate(generate, Settings(max_per_key=most))
        here = dict.fromkeys("abc", 0)
        stayed: list[asyncio.Task[Any]] = []
        try:
            for caller, count, stays in lives:
                task = asyncio.create_task(read(limited, asked(caller, n=count)))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                fits = here[caller] + count <= most
                assert task.done() != fits
                if fits and stays:
                    here[caller] += count
                    stayed.append(task)
                    continue
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        finally:
            for task in stayed:
                task.cancel()
            await asyncio.gather(*stayed, return_exceptions=True)
        for caller in here:
            async with limited.open(asked(caller, n=most)):
                pass
        assert len(generate.opened) == generate.num_closed

    asyncio.run(run())


# Time


@pytest.mark.parametrize("script", [[FOREVER], [text("so"), FOREVER], [text("so"), Pause(0.1)] * 9])
def test_an_answer_that_takes_too_long_ends_in_an_error(script: Any):
    async def run() -> None:
        generate = FakeGenerate(script)
        limited = LimitedGenerate(generate, Settings(deadline=0.2))
        refused = await refusal(read(limited, asked()))
        assert refused.kind is ErrorKind.DEADLINE
        assert "0.2 s" in refused.message
        assert generate.num_closed == 1

    asyncio.run(run())


class Slow(FakeGenerate):
    """Takes for ever before it answers at all."""

    async def embed(self, request: EmbedRequest) -> Any:
        await asyncio.sleep(1e6)

    async def detokenize(self, ids: Any, model: str | None = None) -> str:
        await asyncio.sleep(1e6)
        return ""


@pytest.mark.parametrize("ends", [False, True], ids=["deadline", "stopping"])
def test_waiting_to_be_opened_counts_too(ends: bool):
    async def run() -> None:
        limited = LimitedGenerate(Slow(), Settings(deadline=None if ends else 0.1))
        waits = [
            asyncio.create_task(refusal(limited.embed(embedding()))),
            asyncio.create_task(refusal(read(limited, asked(prompt=(1, 2))))),
        ]
        await settled()
        if ends:
            limited.abort_all(STOPPING)
        for refused in await asyncio.gather(*waits):
            assert refused.kind is (ErrorKind.STOPPING if ends else ErrorKind.DEADLINE)

    asyncio.run(run())


def test_a_client_that_reads_slowly_gets_no_more_time():
    """What is there already needs no waiting, so nothing waited too long."""

    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate(HELLO), Settings(deadline=0.5))
        async with limited.open(asked()) as events:
            await anext(aiter(events))
            await asyncio.sleep(0.6)
            assert (await refusal(anext(aiter(events)))).kind is ErrorKind.DEADLINE

    asyncio.run(run())


def test_a_deadline_is_no_business_of_an_answer_that_keeps_it():
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate(HELLO), Settings(deadline=60))
        assert await read(limited, asked()) == list(HELLO)

    asyncio.run(run())


def test_time_limits_of_others_are_left_alone():
    """A TimeoutError from below is a fault, not this limit."""

    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate([TimeoutError("a disk")]), Settings(deadline=60))
        with pytest.raises(TimeoutError, match="a disk"):
            await read(limited, asked())

    asyncio.run(run())


# The end


def test_all_answers_end_with_the_reason_and_none_begins():
    async def run() -> None:
        script = [text("so"), FOREVER, finish()]
        generate = FakeGenerate(script)
        limited = LimitedGenerate(generate, Settings())
        async with Held(limited) as hold:
            answers = [await hold(asked()) for _ in range(3)]
            limited.abort_all(STOPPING)
            for answer in answers:
                assert await refusal(answer) is STOPPING
            assert await refusal(read(limited, asked())) is STOPPING
            assert await refusal(limited.embed(embedding())) is STOPPING
            assert await refusal(limited.load("fake/model")) is STOPPING
            assert len(generate.opened) == generate.num_closed

    asyncio.run(run())


def test_an_answer_that_nobody_listens_to_just_now_ends_at_its_next_word():
    async def run() -> None:
        limited = LimitedGenerate(FakeGenerate(HELLO), Settings())
        async with limited.open(asked()) as events:
            await anext(aiter(events))
            limited.abort_all(STOPPING)
            assert await refusal(anext(aiter(events))) is STOPPING

    asyncio.run(run())


def test_a_client_that_leaves_is_no_mistake_of_anybody():
    async def run() -> None:
        generate = FakeGenerate([FOREVER])
        limited = LimitedGenerate(generate, Settings(deadline=60))
        task = asyncio.create_task(read(limited, asked()))
        await settled()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert generate.num_closed == 1

    asyncio.run(run())


BODY: Any = {"model": "tiny", "prompt": "x", **tiny.UNENDING}


def test_the_real_server_refuses_more_than_one_caller_may_have(long_model: Path):
    limits = ("--max-per-key", "2", "--max-tokens", str(tiny.LONG // 2))
    with run_server(str(long_model), "--runner", "thread", *limits) as server, ExitStack() as open_:
        url = f"{server.url}/v1/completions"
        stream = {**BODY, "stream": True}
        streams = [
            open_.enter_context(httpx.stream("POST", url, json=stream, timeout=TIMEOUT))
            for _ in range(2)
        ]
        assert [reply.status_code for reply in streams] == [200, 200]
        refused = httpx.post(url, json=BODY, timeout=TIMEOUT)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        open_.close()
        wait_until(lambda: server.status()["Running"] == 0)
        short = httpx.post(url, json={**BODY, "max_tokens": 20}, timeout=TIMEOUT).json()
        assert short["choices"][0]["finish_reason"] == "length"


def test_the_real_server_ends_what_misses_its_deadline(long_model: Path):
    # time enough to begin on a busy machine, since an answer that did not begin has a status
    with run_server(str(long_model), "--runner", "thread", "--deadline", "3") as server:
        url = f"{server.url}/v1/completions"
        httpx.post(url, json={**BODY, "max_tokens": 2}, timeout=TIMEOUT)
        with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=TIMEOUT) as stream:
            *_, told, done = filter(None, stream.iter_lines())
        assert json.loads(told.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert done == "data: [DONE]"
        late = httpx.post(url, json=BODY, timeout=TIMEOUT)
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "deadline_exceeded"
        assert late.headers["x-should-retry"] == "false"


def test_the_real_server_cuts_what_takes_too_long(long_model: Path):
    with run_server(str(long_model), "--runner", "thread", "--max-time", "0.3") as server:
        reply = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=TIMEOUT)
        found = reply.json()
        assert found["choices"][0]["finish_reason"] == "length"
        assert 1 <= found["usage"]["completion_tokens"] < tiny.LONG // 2
        wait_until(lambda: server.status()["Running"] == 0)
