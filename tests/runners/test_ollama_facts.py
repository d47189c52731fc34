"""The behavior of Ollama's scheduler, one fact per test, and our deliberate differences.

Facts: ollama/ollama, `server/sched.go` and `x/mlxrunner/client.go`, read at 2026-08-21. Each test
states the fact first; "mlxrunner:" introduces a difference, for the reason in
docs/decisions/api.md.
"""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.models import ServedModel
from app.core.settings import Settings
from app.runners.pool import ModelPool
from tests.runners.scripted import (
    RunnerScript,
    make_model,
    make_requirement,
    run_pool,
    settle,
)
from tests.waiting import wait_until_async

A, B, C = make_model("a"), make_model("b"), make_model("c")


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


async def use(pool: ModelPool, model: ServedModel, keep_alive: float | None = None) -> None:
    async with pool.lease(model) as lease:
        await lease.wait()
        if keep_alive is not None:
            pool.set_keep_alive(model, keep_alive, admin=True)


def make_script(**sizes: int) -> RunnerScript:
    return RunnerScript(requirements={name: make_requirement(size) for name, size in sizes.items()})


def test_a_first_model_that_is_too_big_is_an_error_with_both_figures():
    """The first model is loaded with requireFull=false: "model requires A but only B are
    available". mlxrunner: the same, and A includes the KV caches."""

    async def body() -> None:
        async with run_pool(make_script(a=11)) as pool:
            with pytest.raises(AppError, match=r"a needs 11 B .* may use only 10 B") as raised:
                await use(pool, A)
            assert raised.value.kind is ErrorKind.MODEL_FILES

    run(body())


def test_a_later_model_that_is_too_big_evicts_others():
    """Later ones are loaded with requireFull=true: too big means evict and retry."""

    async def body() -> None:
        script = make_script(a=6, b=6)
        async with run_pool(script) as pool:
            await use(pool, A)
            await use(pool, B)
            assert script.loaded == ["b"]

    run(body())


def test_a_model_that_can_never_fit_evicts_nothing():
    """Ollama evicts all models, and then reports that the model does not fit. mlxrunner: this is
    known beforehand, and the others stay."""

    async def body() -> None:
        script = make_script(a=6, b=11)
        async with run_pool(script) as pool:
            await use(pool, A)
            with pytest.raises(AppError):
                await use(pool, B)
            assert script.loaded == ["a"]

    run(body())


def test_kv_caches_count():
    """avail = max(0, free - (minimum + overhead)), weights > avail is too big; KV caches are not
    counted, so that the second prompt may fail (ollama issue 16990). mlxrunner: the
    requirement includes weights, caches and working space, and a runner gets an allocation."""

    async def body() -> None:
        script = RunnerScript(requirements={"a": make_requirement(7, 9)})
        async with run_pool(script) as pool:
            await use(pool, A)
            assert script.runner_of("a").settings.memory == 9

    run(body())


def test_allocated_memory_is_not_free():
    """Free memory before a fit check is min(reported free, total - sum of loaded sizes). mlxrunner:
    the sum of all allocations never exceeds the available memory, used or not."""

    async def body() -> None:
        script = RunnerScript(
            requirements={"a": make_requirement(6, budget=10), "b": make_requirement(5, budget=10)}
        )
        async with run_pool(script, total=None) as pool:
            await use(pool, A)
            # the device still reports 10 as free: a has not used its allocation
            await use(pool, B)
            assert script.loaded == ["b"]

    run(body())


def test_two_names_of_one_model_are_two_models():
    """Two tags with one digest share a runner. mlxrunner: a name has its own settings (context,
    quantize, memory), and so its own runner."""

    async def body() -> None:
        script = make_script(a=4, b=4)
        async with run_pool(script) as pool:
            await use(pool, make_model("a", source="one"))
            await use(pool, make_model("b", source="one"))
            assert script.loaded == ["a", "b"]

    run(body())


@pytest.mark.parametrize(("keep_alive", "stays"), [(0.0, False), (math.inf, True), (300.0, True)])
def test_keep_alive_is_zero_or_seconds_or_for_ever(keep_alive: float, stays: bool):
    """0 unloads when idle, a negative number (infinity, behind the dialects) is forever."""

    async def body() -> None:
        script = make_script(a=4)
        async with run_pool(script) as pool:
            await use(pool, A, keep_alive)
            if stays:
                await settle()
                assert script.loaded == ["a"]
            else:
                await wait_until_async(lambda: not script.loaded)

    run(body())


def test_the_timer_starts_when_the_last_request_ends():
    """The timer starts when the reference count drops to 0 and restarts at each finish."""

    async def body() -> None:
        script = make_script(a=4)
        async with run_pool(script) as pool:
            async with pool.lease(A) as first:
                await first.wait()
                pool.set_keep_alive(A, 0.05, admin=True)
                async with pool.lease(A):
                    pass
                await asyncio.sleep(0.1)  # a shorter sleep could only miss an unload
                assert script.loaded == ["a"]
            await wait_until_async(lambda: not script.loaded)

    run(body())


def test_the_keep_alive_of_the_latest_request_counts():
    """The latest request's value replaces the old one; one without a value sets the default again.
    mlxrunner: a request without a value changes nothing, so that a client of the OpenAI API, which
    has no such field, does not reset it."""

    async def body() -> None:
        script = make_script(a=4)
        async with run_pool(script) as pool:
            await use(pool, A, 600.0)
            await use(pool, A, math.inf)
            assert pool.model_state(A).expires_at is None
            await use(pool, A, 900.0)
            await use(pool, A)
            assert pool.get_handle(A).keep_alive == 900.0

    run(body())


def test_as_many_models_are_loaded_as_fit():
    """OLLAMA_MAX_LOADED_MODELS is 3 per GPU. mlxrunner: memory decides, because it includes the
    caches, and --max-loaded is an optional limit."""

    async def body() -> None:
        script = make_script(a=1, b=1, c=1, d=1)
        models = [make_model(name) for name in "abcd"]
        async with run_pool(script) as pool:
            for model in models:
                await use(pool, model)
            assert script.loaded == ["a", "b", "c", "d"]
        bounded = make_script(a=1, b=1, c=1, d=1)
        async with run_pool(bounded, max_loaded=2) as pool:
            for model in models:
                await use(pool, model)
            assert bounded.loaded == ["c", "d"]

    run(body())


def test_a_request_beyond_the_queue_limit_is_rejected():
    """The pending queue holds OLLAMA_MAX_QUEUE = 512 of all models; full is a 503. mlxrunner:
    max_queue for each model, so that one that cannot be loaded does not block all others."""

    async def body() -> None:
        script = make_script(a=1, b=1)
        script.gates["a"] = asyncio.Event()
        model = make_model("a", max_queue=1)
        async with run_pool(script) as pool, pool.lease(model):
            with pytest.raises(AppError) as raised:
                await use(pool, model)
            assert raised.value.kind is ErrorKind.BUSY
            async with pool.lease(B) as lease:
                assert lease.loading_event().queued, "it is not rejected"
        assert Settings().max_queue == 64

    run(body())


def test_the_least_recently_used_model_is_evicted():
    """The victim is the first idle one by keep_alive duration, then by path: not the least
    recently used one. mlxrunner: it is."""

    async def body() -> None:
        script = make_script(a=5, b=5, c=5)
        async with run_pool(script) as pool:
            await use(pool, B, 10.0)
            await use(pool, A, 1000.0)
            await use(pool, B)
            await use(pool, C)
            assert script.loaded == ["b", "c"]

    run(body())


def test_a_draining_model_serves_only_its_running_requests():
    """A busy victim's duration becomes 0, and Ollama waits for its requests; new ones are still
    admitted, so the other load may wait forever. mlxrunner: new ones wait, once all earlier
    requests have ended (`app.runners.eviction`)."""

    async def body() -> None:
        script = make_script(a=9, b=9)
        async with run_pool(script) as pool:
            async with pool.lease(A) as first:
                await first.wait()
                waiting = asyncio.create_task(use(pool, B))
                await settle()
                async with pool.lease(A) as second:
                    assert second.is_held, "b waits for the first one anyway"
            late = asyncio.create_task(use(pool, A))
            await asyncio.gather(waiting, late)
            assert script.loads == ["a", "b", "a"]

    run(body())


def test_a_load_begins_when_the_evicted_runner_has_stopped():
    """Ollama waits for the unload, and on discrete GPUs up to 5 s until the memory is reported as
    free. mlxrunner: a runner is a process, and its memory is free after the exit."""

    async def body() -> None:
        script = make_script(a=9, b=9)
        async with run_pool(script) as pool:
            await use(pool, A)
            stopped = script.runner_of("a").slow_stop = asyncio.Event()
            waiting = asyncio.create_task(use(pool, B))
            await wait_until_async(lambda: pool.model_state(A).phase == "unloading")
            await settle()
            assert script.loads == ["a"]
            stopped.set()
            await waiting

    run(body())


def test_a_disconnect_during_a_load_does_not_cancel_the_load():
    """A request that is cancelled while it waits gets a 499, and the load continues."""

    async def body() -> None:
        script = make_script(a=1)
        gate = script.gates["a"] = asyncio.Event()
        async with run_pool(script) as pool:
            waiting = asyncio.create_task(use(pool, A))
            await wait_until_async(lambda: script.loads)
            waiting.cancel()
            await settle()
            gate.set()
            await wait_until_async(lambda: pool.model_state(A).phase == "ready")

    run(body())


def test_a_crashed_runner_is_detected_without_a_request():
    """A loaded runner is used again unless a ping fails (10 s), so the next request finds out.
    mlxrunner: the pool detects the exit of a runner at once, and `state` reports it."""

    async def body() -> None:
        script = make_script(a=1)
        async with run_pool(script) as pool:
            await use(pool, A)
            script.runner_of("a").fail("killed by SIGKILL")
            await wait_until_async(lambda: pool.model_state(A).phase == "unloaded")
            assert "killed by SIGKILL" in (pool.model_state(A).error or "")

    run(body())
