"""What Ollama's scheduler does, one fact a test, and where we differ on purpose.

Facts: ollama/ollama, `server/sched.go` and `x/mlxrunner/client.go`, read at 2026-08-21. Each test
says the fact first; "Here:" begins what this server does instead, and why is in
docs/decisions/ollama.md.
"""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.model_state import ServedModel
from app.core.settings import Settings
from app.runners.pool import ModelPool
from tests.runners.scripted import House, need, pooled, served, settled, until

A, B, C = served("a"), served("b"), served("c")


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


async def use(pool: ModelPool, model: ServedModel, keep_alive: float | None = None) -> None:
    async with pool.lease(model) as lease:
        await lease.wait()
        if keep_alive is not None:
            pool.set_keep_alive(model, keep_alive, admin=True)


def sizes(**least: int) -> House:
    return House(needs={name: need(size) for name, size in least.items()})


def test_a_first_model_that_is_too_big_is_an_error_with_both_figures():
    """The first model is loaded with requireFull=false: "model requires A but only B are
    available". Here: the same, and A has the KV caches in it."""

    async def body() -> None:
        async with pooled(sizes(a=11)) as pool:
            with pytest.raises(AppError, match=r"a needs 11 B .* may use only 10 B") as raised:
                await use(pool, A)
            assert raised.value.kind is ErrorKind.MODEL_FILES

    run(body())


def test_a_later_model_that_is_too_big_has_others_leave_and_is_tried_again():
    """Later ones are loaded with requireFull=true: too big means evict and retry."""

    async def body() -> None:
        house = sizes(a=6, b=6)
        async with pooled(house) as pool:
            await use(pool, A)
            await use(pool, B)
            assert house.here == ["b"]

    run(body())


def test_a_model_that_can_never_fit_drives_nobody_out():
    """Ollama evicts until nobody is left, and then says that it does not fit. Here: that is known
    beforehand, and the others stay."""

    async def body() -> None:
        house = sizes(a=6, b=11)
        async with pooled(house) as pool:
            await use(pool, A)
            with pytest.raises(AppError):
                await use(pool, B)
            assert house.here == ["a"]

    run(body())


def test_kv_caches_count():
    """avail = max(0, free - (minimum + overhead)), weights > avail is too big; KV caches are not
    counted, so that the second prompt may fail (ollama issue 16990). Here: a model asks for its
    weights, its caches and its working space, and is told how much it may use."""

    async def body() -> None:
        house = House(needs={"a": need(least=7, wanted=9)})
        async with pooled(house) as pool:
            await use(pool, A)
            assert house.of("a").settings.memory == 9

    run(body())


def test_what_was_promised_to_a_model_is_not_free():
    """Free memory before a fit check is min(reported free, total - sum of loaded sizes). Here: the
    sum of all shares never exceeds what is there, used up or not."""

    async def body() -> None:
        house = House(needs={"a": need(6, budget=10), "b": need(5, budget=10)})
        async with pooled(house, total=None) as pool:
            await use(pool, A)
            # the device says that 10 are free still: a has not touched its share
            await use(pool, B)
            assert house.here == ["b"]

    run(body())


def test_two_names_of_one_model_are_two_models():
    """Two tags with one digest share a runner. Here: a name has settings of its own (context,
    quantize, memory), so each has its runner."""

    async def body() -> None:
        house = sizes(a=4, b=4)
        async with pooled(house) as pool:
            await use(pool, served("a", source="one"))
            await use(pool, served("b", source="one"))
            assert house.here == ["a", "b"]

    run(body())


@pytest.mark.parametrize(("keep_alive", "stays"), [(0.0, False), (math.inf, True), (300.0, True)])
def test_keep_alive_is_nothing_or_seconds_or_for_ever(keep_alive: float, stays: bool):
    """0 unloads when idle, a negative number (infinity, behind the dialects) is for ever."""

    async def body() -> None:
        house = sizes(a=4)
        async with pooled(house) as pool:
            await use(pool, A, keep_alive)
            if stays:
                await settled()
                assert house.here == ["a"]
            else:
                await until(lambda: not house.here)

    run(body())


def test_the_timer_starts_when_the_last_request_ends():
    """The timer starts when the reference count drops to 0 and restarts at each finish."""

    async def body() -> None:
        house = sizes(a=4)
        async with pooled(house) as pool:
            async with pool.lease(A) as first:
                await first.wait()
                pool.set_keep_alive(A, 0.05, admin=True)
                async with pool.lease(A):
                    pass
                await asyncio.sleep(0.1)
                assert house.here == ["a"]
            await until(lambda: not house.here)

    run(body())


def test_the_latest_requests_keep_alive_replaces_the_one_before():
    """The latest request's value replaces the old one; one without a value sets the default again.
    Here: a request that says nothing changes nothing, so that a client of the OpenAI API, which has
    no such field, does not undo what an operator asked for."""

    async def body() -> None:
        house = sizes(a=4)
        async with pooled(house) as pool:
            await use(pool, A, 600.0)
            await use(pool, A, math.inf)
            assert pool.model_state(A).expires_at is None
            await use(pool, A, 900.0)
            await use(pool, A)
            assert pool.get_handle(A).keep_alive == 900.0

    run(body())


def test_as_many_are_loaded_as_fit():
    """OLLAMA_MAX_LOADED_MODELS is 3 per GPU. Here: memory decides, since it counts the caches, and
    --max-loaded bounds it where somebody wants that."""

    async def body() -> None:
        house = sizes(a=1, b=1, c=1, d=1)
        models = [served(name) for name in "abcd"]
        async with pooled(house) as pool:
            for model in models:
                await use(pool, model)
            assert house.here == ["a", "b", "c", "d"]
        bounded = sizes(a=1, b=1, c=1, d=1)
        async with pooled(bounded, max_loaded=2) as pool:
            for model in models:
                await use(pool, model)
            assert bounded.here == ["c", "d"]

    run(body())


def test_whoever_comes_when_too_many_wait_is_told_so():
    """The pending queue holds OLLAMA_MAX_QUEUE = 512 of all models; full is a 503. Here: max_queue
    for each model, so that one nobody can load does not take the places of all others."""

    async def body() -> None:
        house = sizes(a=1, b=1)
        house.gates["a"] = asyncio.Event()
        model = served("a", max_queue=1)
        async with pooled(house) as pool, pool.lease(model):
            with pytest.raises(AppError) as raised:
                await use(pool, model)
            assert raised.value.kind is ErrorKind.BUSY
            async with pool.lease(B) as lease:
                assert lease.loading_event().queued, "it is not refused"
        assert Settings().max_queue == 64

    run(body())


def test_the_least_recently_used_one_leaves():
    """The victim is the first idle one by keep_alive duration, then by path: not the one that was
    used least recently. Here: it is that one."""

    async def body() -> None:
        house = sizes(a=5, b=5, c=5)
        async with pooled(house) as pool:
            await use(pool, B, 10.0)
            await use(pool, A, 1000.0)
            await use(pool, B)
            await use(pool, C)
            assert house.here == ["b", "c"]

    run(body())


def test_a_busy_one_that_has_to_leave_serves_who_is_there_and_nobody_else():
    """A busy victim's duration becomes 0, and its requests are waited for; new ones are still let
    in, so whoever waits for its room may wait for ever. Here: new ones wait, once all are gone that
    were there before (`app.runners.eviction`)."""

    async def body() -> None:
        house = sizes(a=9, b=9)
        async with pooled(house) as pool:
            async with pool.lease(A) as first:
                await first.wait()
                waiting = asyncio.create_task(use(pool, B))
                await settled()
                async with pool.lease(A) as second:
                    assert second.is_held, "b waits for the first one anyway"
            late = asyncio.create_task(use(pool, A))
            await asyncio.gather(waiting, late)
            assert house.loads == ["a", "b", "a"]

    run(body())


def test_a_load_begins_when_the_evicted_runner_is_gone():
    """Ollama waits for the unload, and on discrete GPUs up to 5 s until the memory is told to be
    free. Here: a runner is a process, and memory is free when it has ended."""

    async def body() -> None:
        house = sizes(a=9, b=9)
        async with pooled(house) as pool:
            await use(pool, A)
            gone = house.of("a").slow_stop = asyncio.Event()
            waiting = asyncio.create_task(use(pool, B))
            await until(lambda: pool.model_state(A).phase == "unloading")
            await settled()
            assert house.loads == ["a"]
            gone.set()
            await waiting

    run(body())


def test_a_client_that_leaves_while_its_model_is_loaded_does_not_end_the_load():
    """A request that is cancelled while it waits gets a 499, and the load goes on."""

    async def body() -> None:
        house = sizes(a=1)
        gate = house.gates["a"] = asyncio.Event()
        async with pooled(house) as pool:
            waiting = asyncio.create_task(use(pool, A))
            await until(lambda: house.loads)
            waiting.cancel()
            await settled()
            gate.set()
            await until(lambda: pool.model_state(A).phase == "ready")

    run(body())


def test_a_runner_that_is_gone_is_noticed_without_a_request():
    """A loaded runner is used again unless a ping fails (10 s), so the next request finds out.
    Here: whoever keeps a runner hears of its end at once, and tells in `state`."""

    async def body() -> None:
        house = sizes(a=1)
        async with pooled(house) as pool:
            await use(pool, A)
            house.of("a").die("killed by SIGKILL")
            await until(lambda: pool.model_state(A).phase == "unloaded")
            assert "killed by SIGKILL" in (pool.model_state(A).error or "")

    run(body())
