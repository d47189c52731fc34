"""The pool, with runners that do as they are told."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.events import ModelLoading
from app.core.jobs import Ended, EngineStats, Started
from app.core.model_state import ServedModel
from app.runners import lease as lease_module
from app.runners import pool as pool_module
from app.runners.pool import ModelPool
from app.runners.restart_policy import RUNNER_CRASHED, RestartPolicy
from tests.runners.scripted import (
    PATIENCE,
    House,
    job,
    need,
    pooled,
    served,
    settled,
    until,
)

A, B, C = served("a"), served("b"), served("c")


def small() -> House:
    """Three models of which two fit."""
    return House(needs={"a": need(4), "b": need(5), "c": need(6)})


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


async def use(pool: ModelPool, model: ServedModel, keep_alive: float | None = None) -> None:
    async with pool.lease(model) as lease:
        await lease.wait()
        if keep_alive is not None:
            pool.set_keep_alive(model, keep_alive, admin=True)


@asynccontextmanager
async def held(
    pool: ModelPool, model: ServedModel, keep_alive: float | None = None
) -> AsyncGenerator[None]:
    async with pool.lease(model) as lease:
        await lease.wait()
        if keep_alive is not None:
            pool.set_keep_alive(model, keep_alive, admin=True)
        yield


def phases(pool: ModelPool) -> dict[str, str]:
    return {model.name: pool.model_state(model).phase for model in (A, B, C)}


def test_a_request_waits_for_its_model_and_the_next_one_does_not():
    async def body() -> None:
        house = small()
        gate = house.gates["a"] = asyncio.Event()
        async with pooled(house) as pool:
            async with pool.lease(A) as lease:
                assert not lease.is_held
                assert lease.loading_event() == ModelLoading(progress=0, queued=True)
                await until(lambda: house.loads)
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
            assert (pool.context_length(A), pool.context_length(B)) == (64, None)
            assert pool.get_handle(A) is pool.get_handle(A)
            assert house.loads == ["a"]

    run(body())


def test_a_model_that_is_loaded_does_not_wait_behind_a_load():
    async def body() -> None:
        house = small()
        house.gates["b"] = asyncio.Event()
        async with pooled(house) as pool:
            await use(pool, A)
            async with pool.lease(B):
                await until(lambda: phases(pool)["b"] == "loading")
                async with pool.lease(A) as lease:
                    assert lease.is_held

    run(body())


def test_models_are_loaded_one_at_a_time_in_the_order_in_which_they_were_asked_for():
    async def body() -> None:
        house = House(needs={name: need(3) for name in "abc"})
        house.gates = {name: asyncio.Event() for name in "abc"}
        async with pooled(house) as pool, AsyncExitStack() as stack:
            for model in (C, A, B):
                await stack.enter_async_context(pool.lease(model))
                await asyncio.sleep(0.001)
            for loaded in ("c", "ca", "cab"):
                await until(lambda loaded=loaded: len(house.loads) == len(loaded))
                await settled()
                assert "".join(house.loads) == loaded
                assert phases(pool)[loaded[-1]] == "loading"
                house.gates[loaded[-1]].set()
            await until(lambda: set(phases(pool).values()) == {"ready"})

    run(body())


def test_the_least_recently_used_one_leaves_and_whoever_listens_is_told():
    async def body() -> None:
        house, told = small(), list[str]()
        async with pooled(house) as pool:
            pool.on_unloaded = lambda model: told.append(model.name)
            for model in (A, B, A, C):
                await use(pool, model)
            assert phases(pool) == {"a": "ready", "b": "unloaded", "c": "ready"}
            assert told == ["b"]

    run(body())


def test_a_busy_model_ends_its_requests_before_it_leaves_and_new_ones_wait():
    async def body() -> None:
        house = House(needs={"a": need(9), "b": need(9)})
        async with pooled(house) as pool:
            waits = asyncio.Event()

            async def old() -> None:
                async with held(pool, A):
                    await waits.wait()

            before = asyncio.create_task(old())
            await until(lambda: pool.model_state(A).phase == "ready")
            async with pool.lease(B) as lease:
                await settled()
                async with held(pool, A):
                    # admitted: b cannot be served before the old request ends anyway
                    waits.set()
                    await before
                    await until(lambda: pool.model_state(A).phase == "unloading")
                    late = asyncio.create_task(use(pool, A))
                    await settled()
                    assert not lease.is_held
                    assert not late.done(), "it found the model closed"
                await lease.wait()
                assert house.here == ["b"]
            await late
            assert house.loads == ["a", "b", "a"]

    run(body())


def test_each_runner_is_told_its_share_and_shares_leave_room_for_those_who_return():
    async def body() -> None:
        house = House(needs={"a": need(4, 9), "b": need(5, 9)})
        async with pooled(house) as pool:
            for model in (A, B, A):
                await use(pool, model)
            assert [runner.settings.memory for runner in house.runners] == [9, 6, 4]
            assert phases(pool) == {"a": "ready", "b": "ready", "c": "unloaded"}

    run(body())


def test_a_models_own_memory_bounds_its_share():
    async def body() -> None:
        house = House(needs={"a": need(4, 9)})
        async with pooled(house) as pool:
            await use(pool, served("a", memory=6))
            assert house.runners[0].settings.memory == 6

    run(body())


def test_the_only_model_gets_what_the_settings_say_and_is_not_measured():
    async def body() -> None:
        house = House()
        pool = ModelPool(house.make, house.files, None, total_bytes=10)
        await pool.start()
        await use(pool, A)
        assert house.runners[0].settings == A.settings
        assert pool.model_state(A).allocation is None
        assert house.asked == []
        await pool.stop()

    run(body())


def test_what_a_model_needs_is_asked_again_only_where_the_device_has_to_be():
    async def body() -> None:
        for total, asked in ((10, 1), (None, 2)):
            house = House(needs={"a": need(4, budget=10)})
            async with pooled(house, total=total) as pool:
                for _ in range(2):
                    await use(pool, A)
                    await pool.unload(A)
            assert house.asked == ["a"] * asked

    run(body())


def test_a_model_that_takes_long_to_measure_gives_way_when_nobody_waits_for_it():
    async def body() -> None:
        house = small()
        house.gates["need of a"] = asyncio.Event()
        async with pooled(house) as pool:
            async with pool.lease(A):
                await until(lambda: house.asked == ["a"])
                assert pool.model_state(A).phase == "queued"
            await use(pool, B)
            assert house.loads == ["b"]

    run(body())


def test_without_a_total_there_is_what_the_device_has_left_and_what_our_models_hold():
    """a may use 6, and holds 4 of these: so 7 that are free make 11, of which 5 are left for b."""

    async def body() -> None:
        house = House(needs={"a": need(6, budget=10), "b": need(3, 9, budget=7)})
        async with pooled(house, total=None) as pool:
            async with held(pool, A):
                house.of("a").stats = EngineStats(allocated_bytes=4)
                await use(pool, B)
            assert house.of("b").settings.memory == 5

    run(body())


def test_what_was_measured_while_another_one_left_is_measured_again():
    """What it held may have been free by then, or not: either way the total would be wrong."""

    async def body() -> None:
        house = House(needs={"a": need(6, budget=10), "b": need(6, budget=10)})
        gate = house.gates["need of b"] = asyncio.Event()
        async with pooled(house, total=None) as pool:
            await use(pool, A)
            house.of("a").stats = EngineStats(allocated_bytes=6)
            async with pool.lease(B) as lease:
                await until(lambda: house.asked == ["a", "b"])
                house.of("a").die()
                await until(lambda: pool.model_state(A).phase == "unloaded")
                gate.set()
                await lease.wait()
            assert house.asked == ["a", "b", "b"]
            assert pool.model_state(B).allocation == 6

    run(body())


def test_what_does_not_fit_is_refused_with_the_figures_and_others_go_on():
    async def body() -> None:
        house = House(needs={"a": need(11), "b": need(5)})
        async with pooled(house) as pool:
            [refused, served] = await asyncio.gather(
                use(pool, A), use(pool, B), return_exceptions=True
            )
            assert isinstance(refused, AppError)
            assert refused.kind is ErrorKind.MODEL_FILES
            assert "a needs 11 B" in refused.message
            assert served is None
            assert pool.model_state(A).error == refused.message

    run(body())


def test_a_model_leaves_when_nobody_asked_for_it_for_as_long_as_it_stays():
    async def body() -> None:
        async with pooled(small()) as pool:
            model = served("a", keep_alive=0.5)
            async with held(pool, model):
                await asyncio.sleep(0.6)
                assert pool.model_state(model).expires_at is None
                before = time.time()
            after, expires = time.time(), pool.model_state(model).expires_at
            assert expires is not None
            assert before + 0.49 <= expires <= after + 0.51
            await until(lambda: pool.model_state(model).phase == "unloaded")
            assert time.time() >= expires - 0.01

    run(body())


def test_a_request_that_says_nothing_leaves_what_was_said_and_unloading_forgets_it():
    async def body() -> None:
        async with pooled(small()) as pool:
            await use(pool, A, keep_alive=500)
            await use(pool, A)
            expires = pool.model_state(A).expires_at
            assert expires is not None
            assert 400 < expires - time.time() < 600
            await pool.unload(A)
            await use(pool, A)
            assert pool.model_state(A).expires_at is None, "for ever, as it was served"

    run(body())


def test_only_an_admin_may_have_a_model_leave_earlier_than_the_operator_says():
    """One request with 0 unloaded it under all others."""

    async def body() -> None:
        async with pooled(small()) as pool:
            model = served("a", keep_alive=300.0)

            def asked(seconds: float, *, admin: bool = False) -> float:
                pool.set_keep_alive(model, seconds, admin=admin)
                return pool.get_handle(model).keep_alive

            await use(pool, model)
            assert asked(0.0) == 300.0
            assert asked(900.0) == 900.0
            assert asked(400.0) == 400.0
            assert asked(math.inf, admin=True) == math.inf
            assert asked(400.0) == math.inf
            assert asked(60.0, admin=True) == 60.0
            assert asked(0.0) == 60.0
            assert asked(90.0) == 90.0
            # forgotten when it is gone
            await pool.unload(model)
            await use(pool, model)
            assert asked(90.0) == 300.0
            asked(0.0, admin=True)
            await until(lambda: pool.model_state(model).phase == "unloaded")

    run(body())


def test_a_pinned_model_stays_whatever_is_said():
    async def body() -> None:
        pinned = served("a", pinned=True, keep_alive=0.0)
        async with pooled(small()) as pool:
            await use(pool, pinned, keep_alive=0)
            for model in (B, C, B):
                await use(pool, model)
            assert pool.model_state(pinned).phase == "ready"
            with pytest.raises(AppError, match="is pinned"):
                await pool.unload(pinned)

    run(body())


def test_whoever_leaves_while_a_model_is_loaded_lets_it_be_loaded():
    async def body() -> None:
        house = small()
        gate = house.gates["a"] = asyncio.Event()
        async with pooled(house) as pool:
            async with pool.lease(A):
                await until(lambda: house.loads)
            await settled()
            gate.set()
            await until(lambda: pool.model_state(A).phase == "ready")

    run(body())


def test_whoever_waits_for_a_lease_that_was_left_does_not_wait_for_ever():
    async def body() -> None:
        house = small()
        house.gates["a"] = asyncio.Event()
        async with pooled(house) as pool:
            async with pool.lease(A) as lease:
                waiting = asyncio.create_task(lease.wait())
                await settled()
            with pytest.raises(AppError, match="the request has ended"):
                await waiting

    run(body())


def test_a_load_that_nobody_waits_for_gives_way():
    async def body() -> None:
        house = small()
        house.gates["a"] = asyncio.Event()
        async with pooled(house) as pool:
            async with pool.lease(A):
                await until(lambda: house.loads)
            await use(pool, B)
            assert phases(pool) == {"a": "unloaded", "b": "ready", "c": "unloaded"}

    run(body())


async def give_up(pool: ModelPool, model: ServedModel) -> None:
    """As a client does that cannot be kept waiting, and is told to come again."""
    with suppress(AppError):
        async with pool.lease(model) as lease:
            await settled()
            assert lease.is_waiting
            raise AppError(ErrorKind.LOADING, "come again", retry_after=1)


def test_whoever_was_told_to_come_again_keeps_its_place_and_finds_its_model():
    """Or it would wait behind everybody else each time, and among enough others for ever."""

    async def body() -> None:
        house = House(needs={name: need(8) for name in "abc"})
        async with pooled(house) as pool:
            async with held(pool, A):
                await give_up(pool, B)
                assert (pool.model_state(B).phase, pool.model_state(B).leases) == ("queued", 0)
                behind = asyncio.create_task(use(pool, C))
                await settled()
            await until(lambda: pool.get_handle(B).phase == "ready")
            await settled()
            assert house.loads == ["a", "b"], "and it does not go for the one behind it"
            async with pool.lease(B) as lease, pool.lease(B) as another:
                assert (lease.is_held, another.is_held) == (True, False), "it was to go afterwards"
            await behind
            assert house.loads == ["a", "b", "c"]

    run(body())


def test_a_load_goes_on_for_whoever_was_told_to_come_again():
    """One that takes longer than a client waits would be given up for others each time."""

    async def body() -> None:
        house = House(needs={name: need(8) for name in "abc"})
        gate = house.gates["a"] = asyncio.Event()
        async with pooled(house) as pool:
            await give_up(pool, A)
            await until(lambda: house.loads)
            other = asyncio.create_task(use(pool, B))
            await settled()
            assert house.here == ["a"]
            gate.set()
            await use(pool, A)
            await other
            assert house.loads == ["a", "b"]

    run(body())


def test_whoever_does_not_come_again_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease_module, "_RETRY_GRACE", -0.9)

    async def body() -> None:
        house = House(needs={name: need(8) for name in "abc"})
        async with pooled(house) as pool:
            before, after = held(pool, B), held(pool, B)
            await before.__aenter__()
            await give_up(pool, A)
            await after.__aenter__()
            await before.__aexit__(None, None, None)
            await until(lambda: pool.model_state(B).phase == "unloading")
            # when it is clear that nobody comes, it is there for others as before
            await use(pool, B)
            await after.__aexit__(None, None, None)
            house.gates["a"] = asyncio.Event()
            await give_up(pool, A)
            await until(lambda: "a" in house.loads)
            await use(pool, C)
            assert house.loads == ["b", "a", "c"]
            assert pool.model_state(A).loads == 0

    run(body())


@pytest.mark.parametrize("end", ["unload", "stop"])
def test_an_end_does_not_wait_for_those_who_were_told_to_come_again(end: str):
    async def body() -> None:
        house = small()
        gate = house.gates["a"] = asyncio.Event()
        async with pooled(house) as pool:
            await give_up(pool, A)
            gate.set()
            await until(lambda: pool.model_state(A).phase == "ready")
            async with asyncio.timeout(PATIENCE):
                await (pool.unload(A) if end == "unload" else pool.stop(drain=2 * PATIENCE))
            assert not house.here

    run(body())


def test_those_who_were_told_to_come_again_take_no_place_of_others():
    async def body() -> None:
        house = small()
        house.gates["a"] = asyncio.Event()
        narrow = served("a", max_queue=1)
        async with pooled(house) as pool:
            for _ in range(3):
                await give_up(pool, narrow)
            async with pool.lease(narrow) as lease:
                assert lease.is_waiting
                assert pool.model_state(narrow).leases == 1

    run(body())


def test_no_more_may_wait_for_a_model_than_the_settings_say():
    async def body() -> None:
        house = small()
        gate = house.gates["a"] = asyncio.Event()
        model = served("a", max_queue=2)
        async with pooled(house) as pool:
            two = [asyncio.create_task(use(pool, model)) for _ in range(2)]
            await until(lambda: pool.model_state(model).leases == 2)
            with pytest.raises(
                AppError, match="2 requests are already waiting for a to load"
            ) as raised:
                await use(pool, model)
            assert raised.value.kind is ErrorKind.BUSY
            assert raised.value.retry_after
            assert pool.model_state(model).rejected == 1
            gate.set()
            await asyncio.gather(*two)

    run(body())


def test_where_nobody_may_wait_for_a_place_one_still_has_the_model_loaded():
    async def body() -> None:
        house = small()
        house.gates["a"] = asyncio.Event()
        model = served("a", max_queue=0)
        async with pooled(house) as pool:
            first = asyncio.create_task(use(pool, model))
            await until(lambda: house.loads)
            with pytest.raises(AppError, match="1 requests are already waiting"):
                await use(pool, model)
            house.gates["a"].set()
            await first

    run(body())


def test_a_broken_model_is_started_again_for_those_who_wait_and_the_others_do_not_notice():
    async def body() -> None:
        house = small()
        async with pooled(house) as pool:
            async with held(pool, B):
                async with pool.lease(A) as lease:
                    await lease.wait()
                    house.of("a").die("killed by SIGKILL")
                    await until(lambda: not lease.is_held)
                    assert "killed by SIGKILL" in (pool.model_state(A).error or "")
                    await lease.wait()
                state = pool.model_state(A)
                assert (state.phase, state.restarts, state.error) == ("ready", 1, None)
            assert house.loads == ["b", "a", "a"]

    run(body())


def test_a_broken_model_that_nobody_asks_for_is_just_unloaded():
    async def body() -> None:
        house = small()
        async with pooled(house) as pool:
            await use(pool, A)
            house.of("a").die()
            await until(lambda: pool.model_state(A).phase == "unloaded")
            await asyncio.sleep(0.1)
            assert house.loads == ["a"]
            await use(pool, A)
            assert pool.model_state(A).restarts == 1

    run(body())


def test_a_broken_model_that_is_to_be_there_is_started_again():
    async def body() -> None:
        house = small()
        async with pooled(house) as pool:
            pool.preload(A)
            await until(lambda: pool.model_state(A).phase == "ready")
            pinned = served("b", pinned=True)
            await use(pool, pinned)
            for name in "ab":
                house.of(name).die()
            await until(lambda: sorted(house.loads) == ["a", "a", "b", "b"])
            await until(
                lambda: pool.model_state(A).phase == pool.model_state(pinned).phase == "ready"
            )

    run(body())


def test_nobody_leaves_for_what_is_loaded_in_good_time():
    async def body() -> None:
        house = small()
        async with pooled(house) as pool:
            for model in (A, B, C):
                pool.preload(model)
            await until(lambda: phases(pool)["b"] == "ready")
            await settled()
            assert phases(pool) == {"a": "ready", "b": "ready", "c": "unloaded"}

    run(body())


def crash() -> AppError:
    return AppError(ErrorKind.MODEL_FILES, "its process was killed by SIGKILL", code=RUNNER_CRASHED)


def test_a_load_that_crashes_is_tried_again_for_those_who_wait():
    async def body() -> None:
        house = small()
        house.problems["a"] = [crash(), crash()]
        async with pooled(house) as pool:
            await use(pool, A)
            assert house.loads == ["a", "a", "a"]
            assert pool.model_state(A).error is None

    run(body())


def test_a_model_that_crashes_on_three_loads_is_refused_for_a_while_and_then_tried_once():
    async def body() -> None:
        house = small()
        house.problems["a"] = [crash() for _ in range(4)]
        async with pooled(house) as pool:
            for loads in (3, 4):
                with pytest.raises(AppError, match="killed by SIGKILL") as raised:
                    await use(pool, A)
                assert raised.value.kind is ErrorKind.MODEL_FILES
                assert len(house.loads) == loads
                await until(lambda: pool.model_state(A).phase == "refused")
                await until(lambda: pool.model_state(A).phase == "unloaded")
            await use(pool, A)

    run(body())


def test_a_refused_request_is_told_when_to_come_again():
    async def body() -> None:
        house = small()
        house.problems["a"] = [crash() for _ in range(3)]
        async with pooled(house) as pool:
            with pytest.raises(AppError):
                await use(pool, A)
            with pytest.raises(AppError, match="killed by SIGKILL") as raised:
                await use(pool, A)
            assert raised.value.retry_after == 1
            pool.preload(A)
            await use(pool, A)

    run(body())


def test_who_waits_is_told_at_once_what_is_wrong_with_a_models_files():
    async def body() -> None:
        house = small()
        house.problems["a"] = [AppError(ErrorKind.MODEL_FILES, "a tensor is missing")]
        house.unreadable["b"] = AppError(ErrorKind.MODEL_FILES, "config.json is gone")
        house.unreadable["c"] = OSError("no such device")
        async with pooled(house) as pool:
            for model, said in ((A, "a tensor"), (B, "config.json"), (C, "no such device")):
                with pytest.raises(AppError, match=said) as raised:
                    await use(pool, model)
                assert raised.value.kind is ErrorKind.MODEL_FILES
            assert house.loads == ["a"]
            await use(pool, A)

    run(body())


def test_a_model_that_cannot_be_loaded_does_not_delay_others():
    async def body() -> None:
        house = small()
        house.problems["a"] = [crash() for _ in range(3)]
        slow = RestartPolicy(initial_delay=PATIENCE, max_delay=PATIENCE)
        pool = ModelPool(house.make, house.files, house.need, total_bytes=10, restart_policy=slow)
        await pool.start()
        async with pool.lease(A) as lease:
            await until(lambda: pool.model_state(A).phase == "failed")
            async with asyncio.timeout(PATIENCE / 4):
                await use(pool, B)
            assert not lease.is_held
            await pool.stop()

    run(body())


def test_unloading_waits_for_the_requests_that_are_here():
    async def body() -> None:
        house = small()
        async with pooled(house) as pool:
            async with held(pool, A):
                unloading = asyncio.create_task(pool.unload(A))
                await until(lambda: pool.model_state(A).phase == "unloading")
                late = asyncio.create_task(use(pool, A))
                await settled()
                assert not unloading.done()
                assert house.here == ["a"]
            await unloading
            await late
            assert house.loads == ["a", "a"], "whoever came later has it loaded again"

    run(body())


def test_a_model_that_leaves_has_nothing_wrong_with_it():
    async def body() -> None:
        house = small()
        async with pooled(house) as pool:
            await use(pool, A)
            slow = house.of("a").slow_stop = asyncio.Event()
            unloading = asyncio.create_task(pool.unload(A))
            await until(lambda: pool.get_handle(A).phase == "leaving")
            assert (pool.model_state(A).phase, pool.model_state(A).error) == ("unloading", None)
            slow.set()
            await unloading

    run(body())


def test_unloading_what_is_being_loaded_for_nobody_ends_the_load():
    async def body() -> None:
        house = small()
        house.gates["a"] = asyncio.Event()
        async with pooled(house) as pool:
            pool.preload(A)
            await until(lambda: house.loads)
            await pool.unload(A)
            await pool.unload(A)
            assert phases(pool)["a"] == "unloaded"

    run(body())


def test_unloading_what_is_being_loaded_for_somebody_serves_it_first():
    async def body() -> None:
        house = small()
        gate = house.gates["a"] = asyncio.Event()
        async with pooled(house) as pool:
            first = asyncio.create_task(use(pool, A))
            await until(lambda: house.loads)
            unloading = asyncio.create_task(pool.unload(A))
            await settled()
            gate.set()
            await asyncio.gather(first, unloading)
            assert house.loads == ["a"]

    run(body())


def test_stopping_refuses_who_waits_lets_the_others_end_and_ends_all_at_once():
    async def body() -> None:
        house = House(needs={name: need(3) for name in "abc"})
        house.gates["c"] = asyncio.Event()
        gone = asyncio.Event()
        async with pooled(house) as pool:
            for model in (A, B):
                await use(pool, model)
                house.of(model.name).slow_stop = gone
            late = asyncio.create_task(use(pool, C))
            async with held(pool, A):
                await until(lambda: phases(pool)["c"] == "loading")
                stopping = asyncio.create_task(pool.stop(PATIENCE))
                with pytest.raises(AppError) as raised:
                    await late
                assert raised.value.kind is ErrorKind.STOPPING
                with pytest.raises(AppError):
                    await use(pool, A)
                assert house.of("b").state == "ready", "not before all is over"
            await until(lambda: {house.of(name).state for name in "abc"} == {"failed"})
            gone.set()
            await stopping

    run(body())


def test_stopping_does_not_wait_longer_than_it_is_told():
    async def body() -> None:
        house = small()
        async with pooled(house) as pool, held(pool, A):
            await pool.stop(0.05)
            assert house.here == []

    run(body())


def test_a_mistake_in_a_plan_does_not_end_the_supervision(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        calls = 0

        def mistaken(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise AssertionError("ours")
            return real(*arguments)

        real = pool_module.plan
        monkeypatch.setattr(pool_module, "plan", mistaken)
        async with pooled(small()) as pool:
            await use(pool, A)

    run(body())


def test_a_runner_that_does_not_stop_as_it_should_is_logged_and_left(
    caplog: pytest.LogCaptureFixture,
):
    async def body() -> None:
        house = small()
        async with pooled(house) as pool:
            await use(pool, A)
            runner, ended = house.of("a"), house.of("a").stop

            async def stop() -> None:
                await ended()
                raise RuntimeError("it bites")

            runner.stop = stop
            await pool.unload(A)
            await use(pool, A)
            assert "it bites" in caplog.text

    run(body())


def test_counters_go_on_where_a_runner_is_started_again():
    async def body() -> None:
        house = small()
        async with pooled(house) as pool:
            for steps in (5, 7):
                await use(pool, A)
                house.of("a").stats = EngineStats(
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


def test_a_job_that_comes_when_a_runner_was_lost_waits_for_the_next_one():
    async def body() -> None:
        house = small()
        async with pooled(house) as pool, pool.lease(A) as lease:
            await lease.wait()
            handle, lost = pool.get_handle(A), house.of("a")
            lost.die("killed by SIGKILL")
            async with handle.submit(job("x")) as submission:
                assert [type(update) async for update in submission] == [Started, Ended]
            assert lost.jobs == []
            assert [one.id for one in house.of("a").jobs] == ["x"]

    run(body())


def test_a_job_that_waits_for_a_runner_is_told_why_there_will_be_none():
    async def body() -> None:
        house = small()
        async with pooled(house) as pool, pool.lease(A) as lease:
            await lease.wait()
            house.unreadable["a"] = AppError(ErrorKind.MODEL_FILES, "its files are gone")
            house.of("a").die()
            with pytest.raises(AppError, match="its files are gone"):
                async with pool.get_handle(A).submit(job("x")):
                    raise AssertionError("there is none")

    run(body())


def test_a_model_nobody_asked_for_has_a_state():
    async def body() -> None:
        async with pooled(small()) as pool:
            state = pool.model_state(served("a", pinned=True))
            assert (state.phase, state.pinned, state.leases) == ("unloaded", True, 0)

    run(body())
