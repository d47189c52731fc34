"""The contract of all runners. A test module binds `runner` to one and imports these tests.

Most of them share a runner, because a process takes a second to start.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.core.jobs import (
    Ended,
    GetPrefixSnapshot,
    Job,
    JobUpdate,
    PixelsNeeded,
    PromptLogprobs,
    SetSpareMemory,
    Started,
    Token,
)
from app.core.ports import Runner
from app.core.requests import EmbedJob, JsonSchema
from app.core.settings import Settings
from app.engine.model_info import complete_config
from app.engine.outputs import PUBLISH_EVERY
from app.runners.thread_runner import ThreadRunner
from models.cpu_backend import get_num_threads
from tests import tiny, tiny_vision
from tests.batches import flatten
from tests.engine.harness import job
from tests.engine.images import image_job, picture
from tests.waiting import wait_until_async

PATIENCE = 60.0

MakeRunner = Callable[[], Runner]
Body = Callable[[Runner], Awaitable[None]]
UseRunner = Callable[[Body], None]


async def start(make: MakeRunner, folder: Path) -> Runner:
    runner = make()
    await runner.start(complete_config(store.resolve(str(folder))))
    return runner


def with_runner(make: MakeRunner, folder: Path, body: Body) -> None:
    """Start a runner, use it, stop it."""

    async def run() -> None:
        runner = await start(make, folder)
        try:
            await asyncio.wait_for(body(runner), PATIENCE)
        finally:
            await runner.stop()

    asyncio.run(run())


def share_runner(make: MakeRunner, folder: Path) -> Iterator[UseRunner]:
    """A function that runs the body of a test with a runner that other tests have used."""
    with asyncio.Runner() as loop:
        running = loop.run(start(make, folder))

        async def use(body: Body) -> None:
            async with asyncio.timeout(PATIENCE):
                await body(running)

        yield lambda body: loop.run(use(body))
        loop.run(running.stop())


@pytest.fixture(scope="module")
def use_tiny(runner: MakeRunner, tiny_model: Path) -> Iterator[UseRunner]:
    yield from share_runner(runner, tiny_model)


@pytest.fixture(scope="module")
def use_long(runner: MakeRunner, long_model: Path) -> Iterator[UseRunner]:
    yield from share_runner(runner, long_model)


@pytest.fixture(scope="module")
def use_vision(runner: MakeRunner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UseRunner]:
    folder = tiny_vision.write(tmp_path_factory.mktemp("vision") / "vision")
    yield from share_runner(runner, folder)


def endless(name: str, prompt: bytes = b"hello") -> Job:
    """A job that does not end by itself on `long_model`."""
    return job(name, prompt, max_tokens=tiny.LONG // 2, stop_token_ids=frozenset[int]())


async def answer(runner: Runner, name: str, prompt: bytes, **changes: object) -> list[JobUpdate]:
    async with runner.submit(job(name, prompt, **changes)) as submission:
        return [update async for update in flatten(submission)]


def ids(updates: list[JobUpdate]) -> list[int]:
    return [update.id for update in updates if isinstance(update, Token)]


def count_cached(updates: list[JobUpdate]) -> int:
    assert isinstance(updates[0], Started)
    return updates[0].cached_tokens


def test_a_job_starts_yields_tokens_and_ends(use_tiny: UseRunner) -> None:
    async def body(running: Runner) -> None:
        updates = await answer(running, "a", b"hello")
        assert isinstance(updates[0], Started)
        assert isinstance(updates[-1], Ended)
        assert ids(updates)

    use_tiny(body)


def test_concurrent_jobs_get_their_own_tokens(use_tiny: UseRunner) -> None:
    prompts = [b"one", b"two", b"three", b"four"]

    async def body(running: Runner) -> None:
        together = await asyncio.gather(*(answer(running, p.decode(), p) for p in prompts))
        for prompt, updates in zip(prompts, together, strict=True):
            assert ids(updates) == ids(await answer(running, "again", prompt))

    use_tiny(body)


def test_leaving_early_frees_the_engine_and_keeps_the_cache(use_long: UseRunner) -> None:
    async def body(running: Runner) -> None:
        async with running.submit(endless("a", b"hello world")) as submission:
            async for update in flatten(submission):
                if isinstance(update, Token):
                    break
        assert count_cached(await answer(running, "b", b"hello world")) == len(b"hello world") - 1
        assert running.status().stats.running == 0

    use_long(body)


def test_a_snapshot_shows_the_cached_prefixes(runner: MakeRunner, tiny_model: Path) -> None:
    async def body(running: Runner) -> None:
        assert (await running.call(GetPrefixSnapshot())).nodes == ()
        await answer(running, "a", b"hello world, one")
        await answer(running, "b", b"hello world, two")
        snapshot = await running.call(GetPrefixSnapshot())
        shared = next(node for node in snapshot.nodes if node.parent is None)
        assert (shared.tokens, shared.branches) == (len(b"hello world, "), 2)

    with_runner(runner, tiny_model, body)


def test_spare_memory_is_added_to_the_budget(use_tiny: UseRunner) -> None:
    async def body(running: Runner) -> None:
        await answer(running, "a", b"hello")
        before = running.status().stats.ledger
        assert await running.call(SetSpareMemory(num_bytes=1 << 20)) == 1 << 20
        await answer(running, "b", b"hello")
        assert running.status().stats.ledger.budget == before.budget + (1 << 20)
        assert await running.call(SetSpareMemory(num_bytes=0)) == 0
        await wait_until_async(lambda: running.status().stats.ledger.budget == before.budget)

    use_tiny(body)


def test_limit_cached_tokens_bounds_the_cache_of_a_left_job(use_long: UseRunner) -> None:
    """However far the engine is ahead of the client: it publishes tokens at intervals, and others
    may use these, so they stay."""
    own = b"a prompt of no other test"

    async def body(running: Runner) -> None:
        before = running.status().stats.generated_tokens
        sampled: list[int] = []
        async with running.submit(endless("a", own)) as submission:
            async for update in flatten(submission):
                if isinstance(update, Token):
                    sampled.append(update.id)
                if len(sampled) == 8:
                    submission.limit_cached_tokens(2)
                    break
        updates = await answer(running, "b", bytes([*own, *(i % 256 for i in sampled)]))
        generated = running.status().stats.generated_tokens - before - len(ids(updates))
        published = generated // PUBLISH_EVERY * PUBLISH_EVERY
        assert count_cached(updates) <= len(own) + max(2, published)

    use_long(body)


def test_a_grammar_is_followed(use_tiny: UseRunner) -> None:
    schema = JsonSchema(text='{"type": "array", "items": {"type": "boolean"}, "maxItems": 4}')

    async def body(running: Runner) -> None:
        for seed in range(3):
            updates = await answer(
                running, "a", b"hello", grammar=schema, temperature=1.0, seed=seed, max_tokens=400
            )
            value = json.loads(bytes(ids(updates)))
            assert len(value) <= 4
            assert all(isinstance(item, bool) for item in value)

    use_tiny(body)


def test_an_unsatisfiable_grammar_is_rejected_and_takes_no_slot(use_tiny: UseRunner) -> None:
    schema = JsonSchema(text='{"type": "integer", "minimum": 2, "maximum": 1}')

    async def body(running: Runner) -> None:
        for _ in range(100):  # more than fit in the queue
            with pytest.raises(AppError, match="is greater than maximum") as caught:
                await answer(running, "a", b"hello", grammar=schema)
            assert caught.value.kind is ErrorKind.INVALID
        assert ids(await answer(running, "b", b"hello"))

    use_tiny(body)


def test_status_has_the_latest_stats_of_the_engine(runner: MakeRunner, tiny_model: Path) -> None:
    async def body(running: Runner) -> None:
        assert (running.status().state, running.status().progress) == ("ready", 100)
        await answer(running, "a", b"hello")
        stats = running.status().stats
        assert stats.allocated_bytes > 0
        assert stats.prefilled_tokens == 5
        assert stats.generated_tokens > 0

    with_runner(runner, tiny_model, body)


def test_a_job_before_the_load_is_rejected(runner: MakeRunner, tiny_model: Path) -> None:
    async def run() -> None:
        running = runner()
        assert running.status().state == "loading"
        with pytest.raises(AppError) as caught:
            async with running.submit(job("a", b"x")):
                pass
        assert caught.value.kind is ErrorKind.LOADING
        await running.stop()

    asyncio.run(run())


def test_a_failed_load_raises_from_start(
    runner: MakeRunner, tiny_model: Path, tmp_path: Path
) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    files = store.resolve(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"garbage")

    async def run() -> None:
        running = runner()
        with pytest.raises(AppError, match="not a complete safetensors file"):
            await running.start(files)
        assert running.status().state == "failed"
        with pytest.raises(AppError, match="the engine is not running") as caught:
            async with running.submit(job("a", b"x")):
                pass
        assert caught.value.kind is ErrorKind.ENGINE
        await running.stop()

    asyncio.run(run())


def test_a_ready_runner_reports_its_ledger(runner: MakeRunner, tiny_model: Path) -> None:
    """Before the first request, because operators look at it after a start."""

    async def body(running: Runner) -> None:
        ledger = running.status().stats.ledger
        assert ledger.budget > ledger.weights > 0
        assert ledger.working > 0
        assert ledger.free == ledger.budget - ledger.weights - ledger.working

    with_runner(runner, tiny_model, body)


def test_a_ready_runner_reports_its_compute_backend(use_tiny: UseRunner) -> None:
    async def body(running: Runner) -> None:
        capacity = running.status().capacity
        assert capacity is not None
        assert capacity.backend is not None
        assert capacity.backend.device == "cpu"
        assert capacity.backend.threads == get_num_threads(os.environ)

    use_tiny(body)


@pytest.mark.parametrize(("top", "scores"), [(20, 5), (tiny.VOCAB, tiny.VOCAB)])
def test_all_numbers_equal_those_of_a_thread_runner(
    use_tiny: UseRunner, tiny_model: Path, top: int, scores: int
) -> None:
    """Bitwise: top logprobs, logprobs of a prompt of many chunks, and vectors. Also for all tokens
    of the vocabulary."""
    options = {"top_logprobs": top, "prompt_logprobs": scores, "max_tokens": 8}
    prompt = bytes(range(256)) * 5
    inputs = ((1, 2, 3), (4,), tuple(range(200)))

    async def collect(running: Runner) -> tuple[list[object], list[bytes]]:
        updates = await answer(running, "a", prompt, **options)
        vectors = await running.embed(EmbedJob(id="b", inputs=inputs, pooling="mean"))
        numbers = [
            (u.logprobs if isinstance(u, PromptLogprobs) else (u.id, u.logprob, u.top_logprobs))
            for u in updates
            if isinstance(u, PromptLogprobs | Token)
        ]
        return [*numbers], list(vectors)

    found: list[tuple[list[object], list[bytes]]] = []

    async def body(running: Runner) -> None:
        found.append(await collect(running))

    use_tiny(body)
    with_runner(lambda: ThreadRunner(Settings(prefill_chunk=8)), tiny_model, body)
    actual, expected = found
    assert len(actual[1]) == 3
    assert len(actual[0]) > 1
    assert actual == expected
    for entry in actual[0]:
        if isinstance(entry, tuple) and len(entry) == 3 and isinstance(entry[0], int):
            assert len(entry[2]) == top


def test_a_cancelled_embedding_frees_the_engine(use_long: UseRunner) -> None:
    # at eight tokens a step, so much that it cannot be over before it is cancelled
    many = (tuple(range(200)) * 20,) * 500

    async def body(running: Runner) -> None:
        task = asyncio.create_task(
            running.embed(EmbedJob(id="a", inputs=many, pooling="mean"))  # type: ignore[arg-type]
        )
        while not running.status().stats.embedding_jobs:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ids(await answer(running, "b", b"hello"))
        assert running.status().stats.embedding_jobs == 0

    use_long(body)


def test_a_job_cancelled_during_grammar_compilation_never_runs(use_tiny: UseRunner) -> None:
    schema = JsonSchema(text='{"type": "array", "items": {"type": "string"}}')

    async def body(running: Runner) -> None:
        task = asyncio.create_task(answer(running, "a", b"hello", grammar=schema, max_tokens=4000))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ids(await answer(running, "b", b"hello", grammar=schema, max_tokens=40))
        assert running.status().stats.running == 0
        assert running.status().stats.waiting == 0

    use_tiny(body)


def test_stop_ends_jobs_with_errors_and_is_idempotent(runner: MakeRunner, long_model: Path) -> None:
    async def run() -> None:
        running = runner()
        await running.start(store.resolve(str(long_model)))
        waiting = asyncio.create_task(running.wait_for_failure())
        async with asyncio.timeout(PATIENCE), running.submit(endless("a")) as submission:
            await asyncio.gather(running.stop(), running.stop())
            updates = [update async for update in flatten(submission)]
        assert isinstance(updates[-1], Ended)
        assert updates[-1].reason == "error"
        await running.stop()
        assert running.status().state == "failed"
        assert running.status().pid is None
        with pytest.raises(AppError, match="the engine is not running: the engine was stopped"):
            await answer(running, "b", b"x")
        assert not waiting.done(), "a stop is not a failure"
        waiting.cancel()

    asyncio.run(run())


def test_stopping_a_load_raises_from_start(runner: MakeRunner, tiny_model: Path) -> None:
    async def run() -> None:
        running = runner()
        starting = asyncio.create_task(running.start(store.resolve(str(tiny_model))))
        await asyncio.sleep(0)
        await running.stop()
        with pytest.raises(AppError) as caught:
            await asyncio.wait_for(starting, PATIENCE)
        assert caught.value.kind is ErrorKind.STOPPING

    asyncio.run(run())


def test_pixels_are_provided_on_request(use_vision: UseRunner) -> None:
    """The second time, they are not needed."""
    side = tiny_vision.SIDE
    cat, dog = picture(1, side=side), picture(2, side=side)

    async def describe(running: Runner, image: ImagePixels) -> tuple[list[int], int]:
        one = image_job("a", b"see ", image, b"?", side=side, top_logprobs=None)
        tokens, requests = list[int](), 0
        async with running.submit(one) as submission:
            async for update in flatten(submission):
                if isinstance(update, PixelsNeeded):
                    requests += 1
                    submission.provide_images([image])
                elif isinstance(update, Token):
                    tokens.append(update.id)
                elif isinstance(update, Ended):
                    assert update.reason in ("stop", "length"), update.error
        return tokens, requests

    async def body(running: Runner) -> None:
        capacity = running.status().capacity
        assert capacity is not None
        assert capacity.vision
        before = running.status().stats.images_encoded
        tokens, requests = await describe(running, cat)
        assert requests == 1
        assert await describe(running, cat) == (tokens, 0)
        others, requests = await describe(running, dog)
        assert requests == 1
        assert others != tokens
        assert running.status().stats.images_encoded == before + 2

    use_vision(body)


def test_a_job_that_waits_for_pixels_can_be_cancelled(use_vision: UseRunner) -> None:
    side = tiny_vision.SIDE

    async def body(running: Runner) -> None:
        one = image_job("a", b"see ", picture(side=side), side=side)
        async with running.submit(one) as submission:
            async for update in flatten(submission):
                if isinstance(update, PixelsNeeded):
                    break
        submission.provide_images([picture(side=side)])  # too late
        assert ids(await answer(running, "b", b"hello", top_logprobs=None))
        await wait_until_async(lambda: running.status().stats.ledger.kv == 0)

    use_vision(body)
