"""The model pool, with scripted runners."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.events import ModelLoading
from app.core.jobs import Ended, EngineStats, Started
from app.core.models import ServedModel
from app.runners import admission
from app.runners import pool as pool_module
from app.runners.pool import ModelPool
from app.runners.restart_policy import RUNNER_CRASHED, RestartPolicy
from tests.batches import flatten
from tests.runners.scripted import (
    PATIENCE,
    RunnerScript,
    job,
    make_model,
    make_requirement,
    run_pool,
    settle,
)
from tests.waiting import wait_until_async

A, B, C = make_model("a"), make_model("b"), make_model("c")


def make_script() -> RunnerScript:
    """Three models of which two fit."""
    return RunnerScript(
        requirements={"a": make_requirement(4), "b": make_requirement(5), "c": make_requirement(6)}
    )


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


async def use(pool: ModelPool, model: ServedModel, keep_alive: float | None = None) -> None:
    async with pool.lease(model) as lease:
        await lease.wait()
        if keep_alive is not None:
            pool.set_keep_alive(model, keep_alive, admin=True)


@asynccontextmanager
async def hold(
    pool: ModelPool, model: ServedModel, keep_alive: float | None = None
) -> AsyncGenerator[None]:
    async with pool.lease(model) as lease:
        await lease.wait()
        if keep_alive is not None:
            pool.set_keep_alive(model, keep_alive, admin=True)
        yield


def phases(pool: ModelPool) -> dict[str, str]:
    return {model.name: pool.model_state(model).phase for model in (A, B, C)}


def test_a_request_waits_for_the_load_and_the_next_one_does_not():
    async def body() -> None:
        script = make_script()
        gate = script.gates["a"] = asyncio.Event()
        async with run_pool(script) as pool:
            async with pool.lease(A) as lease:
                assert not lease.is_held
                assert lease.loading_event() == ModelLoading(progress=0, queued=True)
                await wait_until_async(lambda: script.loads)
                assert lease.loading_event() == ModelLoading(progress=40)
                assert phases(pool) == {"a": "loading", "b": "unloaded", "c": "unloaded"}
                gate.set()
                await lease.wait()
                assert lease.is_held
                async with pool.lease(A) as second:
                    assert second.is_held
                    assert pool.model_state(A).leases == 2
            state = pool.model_state(A)
            assert (state.phase, state.leases, state.allocation) == ("ready", 0, 4)
            assert (state.context_length, state.parallel, state.pid) == (64, 2, 7)
            capacity = pool.capacity(A)
            assert capacity is not None
            assert (capacity.context_length, pool.capacity(B)) == (64, None)
            assert pool.get_handle(A) is pool.get_handle(A)
            assert script.loads == ["a"]

    run(body())


def test_a_loaded_model_does_not_wait_for_another_load():
    async def body() -> None:
        script = make_script()
        script.gates["b"] = asyncio.Event()
        async with run_pool(script) as pool:
            await use(pool, A)
            async with pool.lease(B):
                await wait_until_async(lambda: phases(pool)["b"] == "loading")
                async with pool.lease(A) as lease:
                    assert lease.is_held

    run(body())


def test_models_are_loaded_one_at_a_time_in_the_order_of_requests():
    async def body() -> None:
        script = RunnerScript(requirements={name: make_requirement(3) for name in "abc"})
        script.gates = {name: asyncio.Event() for name in "abc"}
        async with run_pool(script) as pool, AsyncExitStack() as stack:
            for model in (C, A, B):
                await stack.enter_async_context(pool.lease(model))
                await asyncio.sleep(0.001)
            for loaded in ("c", "ca", "cab"):
                await wait_until_async(lambda loaded=loaded: len(script.loads) == len(loaded))
                await settle()
                assert "".join(script.loads) == loaded
                assert phases(pool)[loaded[-1]] == "loading"
                script.gates[loaded[-1]].set()
            await wait_until_async(lambda: set(phases(pool).values()) == {"ready"})

    run(body())


def test_the_least_recently_used_model_is_evicted_and_reported():
    async def body() -> None:
        script, unloaded = make_script(), list[str]()
        async with run_pool(script) as pool:
            pool.on_unloaded = lambda model: unloaded.append(model.name)
            for model in (A, B, A, C):
                await use(pool, model)
            assert phases(pool) == {"a": "ready", "b": "unloaded", "c": "ready"}
            assert unloaded == ["b"]

    run(body())


def test_a_busy_model_drains_before_its_eviction_and_new_requests_wait():
    async def body() -> None:
        script = RunnerScript(requirements={"a": make_requirement(9), "b": make_requirement(9)})
        async with run_pool(script) as pool:
            release = asyncio.Event()

            async def old_request() -> None:
                async with hold(pool, A):
                    await release.wait()

            before = asyncio.create_task(old_request())
            await wait_until_async(lambda: pool.model_state(A).phase == "ready")
            async with pool.lease(B) as lease:
                await settle()
                async with hold(pool, A):
                    # admitted: b cannot be served before the old request ends anyway
                    release.set()
                    await before
                    await wait_until_async(lambda: pool.model_state(A).phase == "unloading")
                    late = asyncio.create_task(use(pool, A))
                    await settle()
                    assert not lease.is_held
                    assert not late.done(), "the model is draining"
                await lease.wait()
                assert script.loaded == ["b"]
            await late
            assert script.loads == ["a", "b", "a"]

    run(body())


def test_allocations_leave_memory_for_evicted_models():
    async def body() -> None:
        script = RunnerScript(
            requirements={"a": make_requirement(4, 9), "b": make_requirement(5, 9)}
        )
        async with run_pool(script) as pool:
            for model in (A, B, A):
                await use(pool, model)
            assert [runner.settings.memory for runner in script.runners] == [9, 6, 4]
            assert phases(pool) == {"a": "ready", "b": "ready", "c": "unloaded"}

    run(body())


def test_the_memory_setting_of_a_model_bounds_its_allocation():
    async def body() -> None:
        script = RunnerScript(requirements={"a": make_requirement(4, 9)})
        async with run_pool(script) as pool:
            await use(pool, make_model("a", memory=6))
            assert script.runners[0].settings.memory == 6

    run(body())


def test_free_memory_is_lent_to_loaded_models_and_comes_back_for_a_load():
    async def body() -> None:
        script = make_script()
        script.requirements["b"] = make_requirement(2)
        async with run_pool(script) as pool:
            await use(pool, A)
            first = script.runner_of("a")
            await wait_until_async(lambda: first.spare_memory == [6])
            gate = script.gates["spare memory of a"] = asyncio.Event()
            async with pool.lease(B) as lease:
                await settle()
                assert phases(pool)["b"] == "queued", "A has not given the memory back"
                gate.set()
                await lease.wait()
            second = script.runner_of("b")
            await wait_until_async(lambda: second.spare_memory == [2])
            assert first.spare_memory == [6, 4, 2], "it never gives back more than necessary"
            await pool.unload(B)
            await wait_until_async(lambda: first.spare_memory[-1] == 6)

    run(body())


def test_a_load_waits_for_the_requests_that_use_lent_memory():
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool, hold(pool, A):
            first = script.runner_of("a")
            await wait_until_async(lambda: first.spare_memory == [6])
            first.spare_in_use = 3
            async with pool.lease(B) as lease:
                await wait_until_async(lambda: first.spare_memory[-1] == 1)
                await settle()
                assert first.spare_memory == [6, 1, 1], "it is not set all the time"
                assert not lease.is_held
                async with hold(pool, A):
                    pass  # other requests of A are served
                first.spare_in_use = 0
                async with hold(pool, A):
                    pass
                await lease.wait()

    run(body())


def test_without_a_total_no_memory_is_lent():
    async def body() -> None:
        script = RunnerScript(requirements={"a": make_requirement(4, budget=10)})
        async with run_pool(script, total=None) as pool:
            await use(pool, A)
            await settle()
            assert script.runner_of("a").spare_memory == []

    run(body())


def test_a_crash_returns_lent_memory():
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool:
            await use(pool, A)
            first = script.runner_of("a")
            script.gates["spare memory of a"] = asyncio.Event()
            await wait_until_async(lambda: pool.get_handle(A).spare_bytes == 6)
            first.fail()
            await use(pool, C)
            assert pool.get_handle(A).spare_bytes == 0

    run(body())


def test_a_single_model_gets_its_settings_without_an_estimate():
    async def body() -> None:
        script = RunnerScript()
        pool = ModelPool(script.make, script.files, None, total_bytes=10)
        await pool.start()
        await use(pool, A)
        assert script.runners[0].settings == A.settings
        assert pool.model_state(A).allocation is None
        assert script.estimated == []
        await pool.stop()

    run(body())


def test_an_estimate_is_repeated_only_if_it_depends_on_the_device():
    async def body() -> None:
        for total, times in ((10, 1), (None, 2)):
            script = RunnerScript(requirements={"a": make_requirement(4, budget=10)})
            async with run_pool(script, total=total) as pool:
                for _ in range(2):
                    await use(pool, A)
                    await pool.unload(A)
            assert script.estimated == ["a"] * times

    run(body())


def test_a_slow_estimate_without_demand_does_not_block_other_loads():
    async def body() -> None:
        script = make_script()
        script.gates["estimate of a"] = asyncio.Event()
        async with run_pool(script) as pool:
            async with pool.lease(A):
                await wait_until_async(lambda: script.estimated == ["a"])
                assert pool.model_state(A).phase == "queued"
            await use(pool, B)
            assert script.loads == ["b"]

    run(body())


def test_without_a_total_free_and_held_memory_are_shared():
    """a may use 6 and holds 4; with the 7 that are free the total is 11, which leaves 5 for b."""

    async def body() -> None:
        script = RunnerScript(
            requirements={
                "a": make_requirement(6, budget=10),
                "b": make_requirement(3, 9, budget=7),
            }
        )
        async with run_pool(script, total=None) as pool:
            async with hold(pool, A):
                script.runner_of("a").stats = EngineStats(allocated_bytes=4)
                await use(pool, B)
            assert script.runner_of("b").settings.memory == 5

    run(body())


def test_an_estimate_during_an_unload_is_repeated():
    """The estimate may or may not count the freed memory, so the total could be wrong."""

    async def body() -> None:
        script = RunnerScript(
            requirements={"a": make_requirement(6, budget=10), "b": make_requirement(6, budget=10)}
        )
        gate = script.gates["estimate of b"] = asyncio.Event()
        async with run_pool(script, total=None) as pool:
            await use(pool, A)
            script.runner_of("a").stats = EngineStats(allocated_bytes=6)
            async with pool.lease(B) as lease:
                await wait_until_async(lambda: script.estimated == ["a", "b"])
                script.runner_of("a").fail()
                await wait_until_async(lambda: pool.model_state(A).phase == "unloaded")
                gate.set()
                await lease.wait()
            assert script.estimated == ["a", "b", "b"]
            assert pool.model_state(B).allocation == 6

    run(body())


def test_a_model_that_does_not_fit_is_rejected_with_the_figures():
    async def body() -> None:
        script = RunnerScript(requirements={"a": make_requirement(11), "b": make_requirement(5)})
        async with run_pool(script) as pool:
            [error, result] = await asyncio.gather(
                use(pool, A), use(pool, B), return_exceptions=True
            )
            assert isinstance(error, AppError)
            assert error.kind is ErrorKind.MODEL_FILES
            assert "a needs 11 B" in error.message
            assert result is None
            assert pool.model_state(A).error == error.message

    run(body())


def test_an_idle_model_is_unloaded_after_its_keep_alive():
    async def body() -> None:
        async with run_pool(make_script()) as pool:
            model = make_model("a", keep_alive=0.5)
            async with hold(pool, model):
                await asyncio.sleep(0.6)
                assert pool.model_state(model).expires_at is None
                before = time.time()
            after, expires = time.time(), pool.model_state(model).expires_at
            assert expires is not None
            assert before + 0.49 <= expires <= after + 0.51
            await wait_until_async(lambda: pool.model_state(model).phase == "unloaded")
            assert time.time() >= expires - 0.01

    run(body())


def test_keep_alive_persists_until_an_unload():
    async def body() -> None:
        async with run_pool(make_script()) as pool:
            await use(pool, A, keep_alive=500)
            await use(pool, A)
            expires = pool.model_state(A).expires_at
            assert expires is not None
            assert 400 < expires - time.time() < 600
            await pool.unload(A)
            await use(pool, A)
            assert pool.model_state(A).expires_at is None, "the configured keep-alive"

    run(body())


def test_only_an_admin_may_set_a_shorter_keep_alive_than_the_operator():
    """One request with 0 unloaded the model for all other clients."""

    async def body() -> None:
        async with run_pool(make_script()) as pool:
            model = make_model("a", keep_alive=300.0)

            def set_keep_alive(seconds: float, *, admin: bool = False) -> float:
                pool.set_keep_alive(model, seconds, admin=admin)
                return pool.get_handle(model).keep_alive

            await use(pool, model)
            assert set_keep_alive(0.0) == 300.0
            assert set_keep_alive(900.0) == 900.0
            assert set_keep_alive(400.0) == 400.0
            assert set_keep_alive(math.inf, admin=True) == math.inf
            assert set_keep_alive(400.0) == math.inf
            assert set_keep_alive(60.0, admin=True) == 60.0
            assert set_keep_alive(0.0) == 60.0
            assert set_keep_alive(90.0) == 90.0
            # reset by an unload
            await pool.unload(model)
            await use(pool, model)
            assert set_keep_alive(90.0) == 300.0
            set_keep_alive(0.0, admin=True)
            await wait_until_async(lambda: pool.model_state(model).phase == "unloaded")

    run(body())


def test_a_pinned_model_is_never_unloaded():
    async def body() -> None:
        pinned = make_model("a", pinned=True, keep_alive=0.0)
        async with run_pool(make_script()) as pool:
            await use(pool, pinned, keep_alive=0)
            for model in (B, C, B):
                await use(pool, model)
            assert pool.model_state(pinned).phase == "ready"
            with pytest.raises(AppError, match="is pinned"):
                await pool.unload(pinned)

    run(body())


def test_a_disconnect_during_a_load_does_not_cancel_the_load():
    async def body() -> None:
        script = make_script()
        gate = script.gates["a"] = asyncio.Event()
        async with run_pool(script) as pool:
            async with pool.lease(A):
                await wait_until_async(lambda: script.loads)
            await settle()
            gate.set()
            await wait_until_async(lambda: pool.model_state(A).phase == "ready")

    run(body())


def test_a_wait_for_an_ended_lease_is_an_error():
    async def body() -> None:
        script = make_script()
        script.gates["a"] = asyncio.Event()
        async with run_pool(script) as pool:
            async with pool.lease(A) as lease:
                waiting = asyncio.create_task(lease.wait())
                await settle()
            with pytest.raises(AppError, match="the request has ended"):
                await waiting

    run(body())


def test_a_load_without_demand_is_cancelled_for_another():
    async def body() -> None:
        script = make_script()
        script.gates["a"] = asyncio.Event()
        async with run_pool(script) as pool:
            async with pool.lease(A):
                await wait_until_async(lambda: script.loads)
            await use(pool, B)
            assert phases(pool) == {"a": "unloaded", "b": "ready", "c": "unloaded"}

    run(body())


async def give_up(pool: ModelPool, model: ServedModel) -> None:
    """Request a model, and end with retry_after, as for a client that cannot wait."""
    with suppress(AppError):
        async with pool.lease(model) as lease:
            await settle()
            assert lease.is_waiting
            raise AppError(ErrorKind.LOADING, "try again", retry_after=1)


def test_a_client_with_retry_after_keeps_its_place_and_finds_its_model():
    """Otherwise each retry would queue behind all other requests, possibly forever."""

    async def body() -> None:
        script = RunnerScript(requirements={name: make_requirement(8) for name in "abc"})
        async with run_pool(script) as pool:
            async with hold(pool, A):
                await give_up(pool, B)
                assert (pool.model_state(B).phase, pool.model_state(B).leases) == ("queued", 0)
                behind = asyncio.create_task(use(pool, C))
                await settle()
            await wait_until_async(lambda: pool.get_handle(B).phase == "ready")
            await settle()
            assert script.loads == ["a", "b"], "and it is not evicted for the next one"
            async with pool.lease(B) as lease, pool.lease(B) as another:
                assert (lease.is_held, another.is_held) == (True, False), (
                    "it drains after the retry"
                )
            await behind
            assert script.loads == ["a", "b", "c"]

    run(body())


def test_a_load_continues_for_a_client_with_retry_after():
    """Otherwise a load that takes longer than clients wait would be cancelled for others."""

    async def body() -> None:
        script = RunnerScript(requirements={name: make_requirement(8) for name in "abc"})
        gate = script.gates["a"] = asyncio.Event()
        async with run_pool(script) as pool:
            await give_up(pool, A)
            await wait_until_async(lambda: script.loads)
            other = asyncio.create_task(use(pool, B))
            await settle()
            assert script.loaded == ["a"]
            gate.set()
            await use(pool, A)
            await other
            assert script.loads == ["a", "b"]

    run(body())


def test_a_client_that_does_not_retry_loses_its_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(admission, "_RETRY_GRACE", -0.9)

    async def body() -> None:
        script = RunnerScript(requirements={name: make_requirement(8) for name in "abc"})
        async with run_pool(script) as pool:
            before, after = hold(pool, B), hold(pool, B)
            await before.__aenter__()
            await give_up(pool, A)
            await after.__aenter__()
            await before.__aexit__(None, None, None)
            await wait_until_async(lambda: pool.model_state(B).phase == "unloading")
            # after the time for a retry, the model serves other requests again
            await use(pool, B)
            await after.__aexit__(None, None, None)
            script.gates["a"] = asyncio.Event()
            await give_up(pool, A)
            await wait_until_async(lambda: "a" in script.loads)
            await use(pool, C)
            assert script.loads == ["b", "a", "c"]
            assert pool.model_state(A).loads == 0

    run(body())


@pytest.mark.parametrize("end", ["unload", "stop"])
def test_unload_and_stop_do_not_wait_for_retries(end: str):
    async def body() -> None:
        script = make_script()
        gate = script.gates["a"] = asyncio.Event()
        async with run_pool(script) as pool:
            await give_up(pool, A)
            gate.set()
            await wait_until_async(lambda: pool.model_state(A).phase == "ready")
            async with asyncio.timeout(PATIENCE):
                await (pool.unload(A) if end == "unload" else pool.stop(drain=2 * PATIENCE))
            assert not script.loaded

    run(body())


def test_clients_with_retry_after_take_no_queue_slots():
    async def body() -> None:
        script = make_script()
        script.gates["a"] = asyncio.Event()
        narrow = make_model("a", max_queue=1)
        async with run_pool(script) as pool:
            for _ in range(3):
                await give_up(pool, narrow)
            async with pool.lease(narrow) as lease:
                assert lease.is_waiting
                assert pool.model_state(narrow).leases == 1

    run(body())


def test_max_queue_limits_the_requests_that_wait_for_a_load():
    async def body() -> None:
        script = make_script()
        gate = script.gates["a"] = asyncio.Event()
        model = make_model("a", max_queue=2)
        async with run_pool(script) as pool:
            two = [asyncio.create_task(use(pool, model)) for _ in range(2)]
            await wait_until_async(lambda: pool.model_state(model).leases == 2)
            with pytest.raises(
                AppError, match="the queue for a, which is loading, already has 2 requests;"
            ) as raised:
                await use(pool, model)
            assert raised.value.kind is ErrorKind.BUSY
            assert raised.value.retry_after
            assert pool.model_state(model).rejected == 1
            gate.set()
            await asyncio.gather(*two)

    run(body())


def test_with_max_queue_0_one_request_still_loads_the_model():
    async def body() -> None:
        script = make_script()
        script.gates["a"] = asyncio.Event()
        model = make_model("a", max_queue=0)
        async with run_pool(script) as pool:
            first = asyncio.create_task(use(pool, model))
            await wait_until_async(lambda: script.loads)
            with pytest.raises(AppError, match="already has 1 request"):
                await use(pool, model)
            script.gates["a"].set()
            await first

    run(body())


def test_a_crashed_model_is_restarted_for_waiting_requests():
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool:
            async with hold(pool, B):
                async with pool.lease(A) as lease:
                    await lease.wait()
                    script.runner_of("a").fail("killed by SIGKILL")
                    await wait_until_async(lambda: not lease.is_held)
                    assert "killed by SIGKILL" in (pool.model_state(A).error or "")
                    await lease.wait()
                state = pool.model_state(A)
                assert (state.phase, state.restarts, state.error) == ("ready", 1, None)
            assert script.loads == ["b", "a", "a"]

    run(body())


def test_a_retired_model_is_unloaded_after_its_requests():
    async def body() -> None:
        script = make_script()
        pinned = replace(A, pinned=True)
        async with run_pool(script) as pool:
            async with pool.lease(pinned) as running, pool.lease(pinned) as second:
                await running.wait()
                await second.wait()
                pool.retire(pinned)
                await settle()
                assert phases(pool)["a"] == "ready"
                # a request that was resolved before
                async with pool.lease(pinned) as late:
                    await late.wait()
            await wait_until_async(lambda: phases(pool)["a"] == "unloaded")
            assert script.loads == ["a"]
            await use(pool, A)  # served again
            await settle()
            assert phases(pool)["a"] == "ready"

    run(body())


def test_a_retired_model_that_was_not_loaded_is_not_loaded():
    async def body() -> None:
        script = make_script()
        script.gates["b"] = asyncio.Event()
        async with run_pool(script, max_loaded=1) as pool:
            pool.preload(B)
            await wait_until_async(lambda: script.loads == ["b"])
            pool.preload(A)
            pool.retire(A)
            pool.retire(B)
            script.gates["b"].set()
            await wait_until_async(lambda: script.loaded == [])
            await settle()
            assert script.loads == ["b"]

    run(body())


def test_a_model_with_new_settings_is_loaded_again_after_its_requests():
    async def body() -> None:
        script = make_script()
        changed = replace(A, settings=replace(A.settings, context=32))
        async with run_pool(script) as pool:
            async with pool.lease(A) as running:
                await running.wait()
                pool.reload(changed)
                await settle()
                assert phases(pool)["a"] == "unloading"
                assert script.loads == ["a"], "its request runs"
                async with pool.lease(A) as resolved_before, pool.lease(changed) as later:
                    assert resolved_before.is_waiting
                    assert later.is_waiting
            await wait_until_async(lambda: phases(pool)["a"] == "ready")
            assert script.loads == ["a", "a"]
            assert script.runner_of("a").settings.context == 32
            await use(pool, changed)
            pool.reload(B)
            await settle()
            assert phases(pool)["b"] == "unloaded"

    run(body())


def test_new_limits_apply_at_once():
    async def body() -> None:
        script = make_script()
        script.gates["a"] = asyncio.Event()
        full = replace(A, settings=replace(A.settings, max_queue=1), keep_alive=7.0)
        async with run_pool(script) as pool:
            pool.apply(full)  # without an effect: it has never been requested
            async with pool.lease(A), pool.lease(A):
                pool.apply(full)
                async with pool.lease(A) as third:
                    with pytest.raises(AppError) as raised:
                        await third.wait()
                assert raised.value.kind is ErrorKind.BUSY
                script.gates["a"].set()
            await use(pool, full)
            assert pool.get_handle(full).keep_alive == 7.0
            pool.set_keep_alive(full, 9.0, admin=True)
            pool.apply(replace(full, settings=A.settings))
            assert pool.get_handle(full).keep_alive == 9.0, "a client's"
            assert script.loads == ["a"]

    run(body())


def test_a_crashed_model_without_demand_is_unloaded():
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool:
            await use(pool, A)
            script.runner_of("a").fail()
            await wait_until_async(lambda: pool.model_state(A).phase == "unloaded")
            await asyncio.sleep(0.1)  # ten times the delay of a restart
            assert script.loads == ["a"]
            await use(pool, A)
            assert pool.model_state(A).restarts == 1

    run(body())


def test_a_crashed_model_that_is_preloaded_or_pinned_is_restarted():
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool:
            pool.preload(A)
            await wait_until_async(lambda: pool.model_state(A).phase == "ready")
            pinned = make_model("b", pinned=True)
            await use(pool, pinned)
            for name in "ab":
                script.runner_of(name).fail()
            await wait_until_async(lambda: sorted(script.loads) == ["a", "a", "b", "b"])
            await wait_until_async(
                lambda: pool.model_state(A).phase == pool.model_state(pinned).phase == "ready"
            )

    run(body())


def test_a_preload_evicts_nothing():
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool:
            for model in (A, B, C):
                pool.preload(model)
            await wait_until_async(lambda: phases(pool)["b"] == "ready")
            await settle()
            assert phases(pool) == {"a": "ready", "b": "ready", "c": "unloaded"}

    run(body())


def make_crash_error() -> AppError:
    return AppError(ErrorKind.MODEL_FILES, "its process was killed by SIGKILL", code=RUNNER_CRASHED)


def test_a_crashed_load_is_retried_for_waiting_requests():
    async def body() -> None:
        script = make_script()
        script.load_errors["a"] = [make_crash_error(), make_crash_error()]
        async with run_pool(script) as pool:
            await use(pool, A)
            assert script.loads == ["a", "a", "a"]
            assert pool.model_state(A).error is None

    run(body())


def test_a_crashed_estimate_is_retried_for_waiting_requests():
    """Killing the preflight process failed all requests that waited for the model."""

    async def body() -> None:
        script = make_script()
        script.estimate_errors["a"] = [make_crash_error(), make_crash_error()]
        async with run_pool(script) as pool:
            await asyncio.gather(*(use(pool, A) for _ in range(3)))
            assert script.estimated == ["a", "a", "a"]
            assert script.loads == ["a"]
            assert pool.model_state(A).error is None

    run(body())


def test_a_model_is_refused_for_a_while_after_three_crashed_estimates():
    async def body() -> None:
        script = make_script()
        script.estimate_errors["a"] = [make_crash_error() for _ in range(3)]
        async with run_pool(script) as pool:
            with pytest.raises(AppError, match="killed by SIGKILL") as raised:
                await use(pool, A)
            assert (raised.value.code, raised.value.retry_after) == (RUNNER_CRASHED, 1)
            await wait_until_async(lambda: pool.model_state(A).phase == "unloaded")
            await use(pool, A)

    run(body())


def test_a_model_is_refused_for_a_while_after_three_crashed_loads():
    async def body() -> None:
        script = make_script()
        script.load_errors["a"] = [make_crash_error() for _ in range(4)]
        async with run_pool(script) as pool:
            for loads in (3, 4):
                with pytest.raises(AppError, match="killed by SIGKILL") as raised:
                    await use(pool, A)
                assert raised.value.kind is ErrorKind.MODEL_FILES
                assert raised.value.retry_after == 1
                assert len(script.loads) == loads
                await wait_until_async(lambda: pool.model_state(A).phase == "refused")
                await wait_until_async(lambda: pool.model_state(A).phase == "unloaded")
            await use(pool, A)

    run(body())


def test_a_refused_request_has_a_retry_after():
    async def body() -> None:
        script = make_script()
        script.load_errors["a"] = [make_crash_error() for _ in range(3)]
        async with run_pool(script) as pool:
            with pytest.raises(AppError):
                await use(pool, A)
            with pytest.raises(AppError, match="killed by SIGKILL") as raised:
                await use(pool, A)
            assert raised.value.retry_after == 1
            pool.preload(A)
            await use(pool, A)

    run(body())


def test_errors_in_model_files_are_reported_at_once():
    async def body() -> None:
        script = make_script()
        script.load_errors["a"] = [AppError(ErrorKind.MODEL_FILES, "a tensor is missing")]
        script.file_errors["b"] = AppError(ErrorKind.MODEL_FILES, "config.json is gone")
        script.file_errors["c"] = OSError("no such device")
        async with run_pool(script) as pool:
            for model, message in ((A, "a tensor"), (B, "config.json"), (C, "no such device")):
                with pytest.raises(AppError, match=message) as raised:
                    await use(pool, model)
                assert raised.value.kind is ErrorKind.MODEL_FILES
            assert script.loads == ["a"]
            await use(pool, A)

    run(body())


def test_a_failing_load_does_not_delay_other_models():
    async def body() -> None:
        script = make_script()
        script.load_errors["a"] = [make_crash_error() for _ in range(3)]
        slow = RestartPolicy(initial_delay=100 * PATIENCE, max_delay=100 * PATIENCE)
        pool = ModelPool(
            script.make, script.files, script.estimate, total_bytes=10, restart_policy=slow
        )
        await pool.start()
        async with pool.lease(A) as lease:
            await wait_until_async(lambda: pool.model_state(A).phase == "failed")
            async with asyncio.timeout(PATIENCE):
                await use(pool, B)
            assert not lease.is_held
            await pool.stop()

    run(body())


def test_unload_waits_for_running_requests():
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool:
            async with hold(pool, A):
                unloading = asyncio.create_task(pool.unload(A))
                await wait_until_async(lambda: pool.model_state(A).phase == "unloading")
                late = asyncio.create_task(use(pool, A))
                await settle()
                assert not unloading.done()
                assert script.loaded == ["a"]
            await unloading
            await late
            assert script.loads == ["a", "a"], "a later request loads it again"

    run(body())


def test_an_unloading_model_has_no_error():
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool:
            await use(pool, A)
            slow = script.runner_of("a").slow_stop = asyncio.Event()
            unloading = asyncio.create_task(pool.unload(A))
            await wait_until_async(lambda: pool.get_handle(A).phase == "leaving")
            assert (pool.model_state(A).phase, pool.model_state(A).error) == ("unloading", None)
            slow.set()
            await unloading

    run(body())


def test_unload_cancels_a_load_without_demand():
    async def body() -> None:
        script = make_script()
        script.gates["a"] = asyncio.Event()
        async with run_pool(script) as pool:
            pool.preload(A)
            await wait_until_async(lambda: script.loads)
            await pool.unload(A)
            await pool.unload(A)
            assert phases(pool)["a"] == "unloaded"

    run(body())


def test_unload_waits_for_a_load_with_waiting_requests():
    async def body() -> None:
        script = make_script()
        gate = script.gates["a"] = asyncio.Event()
        async with run_pool(script) as pool:
            first = asyncio.create_task(use(pool, A))
            await wait_until_async(lambda: script.loads)
            unloading = asyncio.create_task(pool.unload(A))
            await settle()
            gate.set()
            await asyncio.gather(first, unloading)
            assert script.loads == ["a"]

    run(body())


def test_stop_rejects_waiting_requests_and_drains_running_ones():
    async def body() -> None:
        script = RunnerScript(requirements={name: make_requirement(3) for name in "abc"})
        script.gates["c"] = asyncio.Event()
        stopped = asyncio.Event()
        async with run_pool(script) as pool:
            for model in (A, B):
                await use(pool, model)
                script.runner_of(model.name).slow_stop = stopped
            late = asyncio.create_task(use(pool, C))
            async with hold(pool, A):
                await wait_until_async(lambda: phases(pool)["c"] == "loading")
                stopping = asyncio.create_task(pool.stop(PATIENCE))
                with pytest.raises(AppError) as raised:
                    await late
                assert raised.value.kind is ErrorKind.STOPPING
                with pytest.raises(AppError):
                    await use(pool, A)
                assert script.runner_of("b").state == "ready", "not before the drain is over"
            await wait_until_async(
                lambda: {script.runner_of(name).state for name in "abc"} == {"failed"}
            )
            stopped.set()
            await stopping

    run(body())


def test_stop_waits_no_longer_than_its_drain_time():
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool, hold(pool, A):
            await pool.stop(0.05)
            assert script.loaded == []

    run(body())


def test_an_internal_error_in_plan_does_not_stop_the_pool(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        calls = 0

        def failing_plan(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise AssertionError("planted")
            return real(*arguments)

        real = pool_module.plan
        monkeypatch.setattr(pool_module, "plan", failing_plan)
        async with run_pool(make_script()) as pool:
            await use(pool, A)

    run(body())


def test_an_error_in_the_stop_of_a_runner_is_logged_and_ignored(
    caplog: pytest.LogCaptureFixture,
):
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool:
            await use(pool, A)
            runner, real_stop = script.runner_of("a"), script.runner_of("a").stop

            async def stop() -> None:
                await real_stop()
                raise RuntimeError("planted")

            runner.stop = stop
            await pool.unload(A)
            await use(pool, A)
            assert "planted" in caplog.text

    run(body())


def test_counters_continue_after_a_reload():
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool:
            for steps in (5, 7):
                await use(pool, A)
                script.runner_of("a").stats = EngineStats(
                    steps=steps, running=3, prefix_miss_counts=(("empty", 2),)
                )
                await pool.unload(A)
            stats = pool.model_state(A).stats
            assert (stats.steps, stats.running, stats.prefix_miss_counts) == (
                12,
                0,
                (("empty", 4),),
            )

    run(body())


def test_a_job_after_a_crash_waits_for_the_next_runner():
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool, pool.lease(A) as lease:
            await lease.wait()
            handle, crashed = pool.get_handle(A), script.runner_of("a")
            crashed.fail("killed by SIGKILL")
            async with handle.submit(job("x")) as submission:
                assert [type(update) async for update in flatten(submission)] == [Started, Ended]
            assert crashed.jobs == []
            assert [one.id for one in script.runner_of("a").jobs] == ["x"]

    run(body())


def test_a_job_that_waits_for_a_runner_gets_the_load_error():
    async def body() -> None:
        script = make_script()
        async with run_pool(script) as pool, pool.lease(A) as lease:
            await lease.wait()
            script.file_errors["a"] = AppError(ErrorKind.MODEL_FILES, "its files are gone")
            script.runner_of("a").fail()
            with pytest.raises(AppError, match="its files are gone"):
                async with pool.get_handle(A).submit(job("x")):
                    raise AssertionError("there is no runner")

    run(body())


def test_an_unused_model_has_a_state():
    async def body() -> None:
        async with run_pool(make_script()) as pool:
            state = pool.model_state(make_model("a", pinned=True))
            assert (state.phase, state.pinned, state.leases) == ("unloaded", True, 0)

    run(body())
