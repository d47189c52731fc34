"""The memory policy on simulated Macs of 8 to 512 GB, through chats, long prompts, short prompts,
idle times, memory pressure and the end. `Simulation.check` asserts the rules after every step:
wired memory is never above the rule, and cached prefixes are never above their limit."""

import itertools
import queue
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from app.core.jobs import EngineReady, StepOutput
from app.engine.memory_budget import UNWIRE_AFTER
from app.engine.memory_policy import MemoryPressure
from app.engine.thread import EngineThread
from tests.engine.harness import job
from tests.engine.simulated_mac import GIB, MACS, Mac, Simulation
from tests.waiting import LIMIT

every_mac = pytest.mark.parametrize("size", sorted(MACS))


def prompt(number: int, length: int) -> list[int]:
    """A prompt that shares no prefix with another number."""
    return [number % 251, number // 251 % 251, number // 251**2 % 251] + [7] * (length - 3)


def run(simulation: Simulation, prompts: Sequence[Sequence[int]], tokens: int = 2) -> None:
    """Runs the prompts, as many at a time as the engine admits."""
    for number, ids in enumerate(prompts):
        options = {"top_logprobs": None, "stop_token_ids": frozenset[int]()}
        simulation.loop.submit(job(f"job-{number}", ids, max_tokens=tokens, **options))
        while simulation.loop.stats().waiting > 8:
            simulation.step()
    while not simulation.loop.idle:
        simulation.step()
    assert simulation.loop.exceptions == 0


def chat(simulation: Simulation, number: int, turns: int, turn_tokens: int) -> None:
    """Runs the turns of one conversation, each of which continues the turn before."""
    for turn in range(1, turns + 1):
        run(simulation, [prompt(number, turn * turn_tokens)], tokens=20)


@every_mac
def test_a_day_on_a_mac(size: int) -> None:
    simulation = Simulation(MACS[size])
    metal, loop = simulation.metal, simulation.loop
    context = loop.capacity.context_length
    assert metal.limits, "the weights are wired when the model is loaded"

    for number in range(4):
        chat(simulation, number, turns=5, turn_tokens=min(600, context // 6))
    run(simulation, [prompt(n, context - 30) for n in (10, 11)], tokens=20)
    run(simulation, [prompt(12, context // 4)], tokens=20)
    busy = metal.wired_limit
    assert busy >= simulation.loop.stats().ledger.in_use

    assert simulation.maintain(UNWIRE_AFTER - 1) is False
    assert metal.wired_limit == busy
    assert simulation.maintain(UNWIRE_AFTER)
    assert (metal.wired, metal.wired_limit) == (0, 0)
    assert metal.pool_bytes == 0
    assert loop.stats().ledger.prefix > 0, "prefixes survive an idle time"

    cached = loop.stats().cached_tokens
    run(simulation, [[*prompt(12, context // 4), *[0] * 19, 7]], tokens=5)  # the next turn
    assert loop.stats().cached_tokens == cached + context // 4 + 19
    assert metal.wired > 0

    before, full = loop.stats().ledger.prefix, loop.stats().ledger.prefix_limit
    metal.pressure = MemoryPressure.WARNING
    assert simulation.maintain()
    assert loop.stats().ledger.prefix <= max(before / 2, full / 8)
    for _ in range(5):
        simulation.maintain()
    assert loop.stats().ledger.prefix <= full / 8
    assert metal.pool_bytes == 0
    metal.pressure = MemoryPressure.CRITICAL
    simulation.maintain()
    assert loop.stats().ledger.prefix == 0
    assert metal.active < loop.stats().ledger.in_use
    metal.pressure = MemoryPressure.NORMAL
    for _ in range(40):
        simulation.maintain()
    assert loop.stats().ledger.prefix_limit == simulation.rules.prefix_limit
    chat(simulation, 20, turns=2, turn_tokens=100)
    assert loop.stats().ledger.prefix > 0


@every_mac
def test_a_conversation_that_fills_the_memory_is_continued(size: int) -> None:
    """The next turn evicted the turn before, to make room for all of its tokens, and computed them
    again: on a small Mac from half of the context on, in each turn."""
    simulation = Simulation(MACS[size])
    loop = simulation.loop
    chat(simulation, 1, turns=2, turn_tokens=200)
    first = [*prompt(10, loop.capacity.context_length - 300), *[0] * 19]
    run(simulation, [first[:-19]], tokens=20)
    cached = loop.stats().cached_tokens
    run(simulation, [[*first, 7]], tokens=20)
    assert loop.stats().cached_tokens == cached + len(first)


@every_mac
def test_weights_that_remain_are_wired_again_after_pressure(size: int) -> None:
    """MLX chooses what it wires after an idle time, so prefixes may take the place of weights. Once
    the prefixes are gone, all that remains is wired."""
    simulation = Simulation(MACS[size])
    run(simulation, [prompt(n, 3000) for n in range(6)])
    simulation.maintain(UNWIRE_AFTER)
    run(simulation, [prompt(100, 10)])
    simulation.metal.pressure = MemoryPressure.CRITICAL
    simulation.maintain()
    metal = simulation.metal
    assert metal.wired == metal.active


def test_a_memory_limit_lets_prefixes_use_all_of_it_and_does_not_change_what_is_wired() -> None:
    mac = MACS[16]
    limited = Simulation(mac, memory=14 * GIB)
    assert limited.loop.stats().ledger.prefix_limit == limited.loop.capacity.kv_budget
    run(limited, [prompt(n, 20_000) for n in range(8)])
    assert limited.loop.stats().ledger.prefix > 8 * GIB
    assert limited.metal.peak_wired <= limited.mac.recommended * GIB


def test_buffers_never_reach_the_limit() -> None:
    """Many short prompts on a large Mac filled Metal's 499,000 buffers at a fraction of its bytes,
    and from then on, every request failed."""
    mac = replace(MACS[512], max_buffers=10_000)
    simulation = Simulation(mac)
    run(simulation, [prompt(n, 40) for n in range(240)], tokens=1)
    stats = simulation.loop.stats()
    assert stats.prefix_evictions > 0
    assert stats.ledger.prefix < stats.ledger.prefix_limit / 100
    assert simulation.metal.peak_buffers < 0.8 * mac.max_buffers
    unlimited = replace(simulation.rules, max_cached_layers=None)
    assert _buffers_after(mac, unlimited, 240) > mac.max_buffers


def _buffers_after(mac: Mac, rules: Any, count: int) -> int:
    """The buffers that the same prompts need without a limit."""
    simulation = Simulation(replace(mac, max_buffers=10**9))
    simulation.loop._scheduler._budget._rules = rules  # pyright: ignore[reportPrivateUsage]
    run(simulation, [prompt(n, 40) for n in range(count)], tokens=1)
    return simulation.metal.peak_buffers


@pytest.mark.exhaustive
def test_buffers_never_reach_the_limit_of_metal() -> None:
    simulation = Simulation(MACS[512])
    run(simulation, [prompt(n, 40) for n in range(6000)], tokens=1)
    assert simulation.loop.stats().prefix_evictions > 0
    assert 250_000 < simulation.metal.peak_buffers < 400_000


def test_the_pool_keeps_freed_buffers_within_its_limit() -> None:
    """Every freed buffer was returned to the system at once, and allocated again by the next
    request."""
    simulation = Simulation(MACS[16])
    metal = simulation.metal
    for number in range(30):
        run(simulation, [prompt(number, 5000)])
        assert metal.pool_bytes <= metal.pool_limit + GIB
    assert simulation.loop.stats().prefix_evictions > 0
    assert metal.pool_bytes > 0


@every_mac
def test_nothing_is_wired_or_allocated_when_the_engine_has_ended(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulations = [Simulation(MACS[size])]
    metal = simulations[0].metal
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_wired_limit", metal.set_wired_limit)
    messages: queue.Queue[Any] = queue.Queue()
    thread = EngineThread(lambda _: simulations.pop().loop, messages.put)
    thread.start()
    assert isinstance(messages.get(timeout=LIMIT), EngineReady)
    thread.submit(job("a", prompt(1, 2000), max_tokens=3, stop_token_ids=frozenset[int]()))
    while (stats := messages.get(timeout=LIMIT).stats).generated_tokens < 3:
        pass
    assert stats.ledger.wired > 0
    active = metal.active
    set_limit = metal.set_wired_limit

    def unwire(num_bytes: int) -> None:
        if metal.wired:
            assert metal.active >= active / 2, "the memory is unwired before it is freed"
        set_limit(num_bytes)

    monkeypatch.setattr(mx, "set_wired_limit", unwire)
    thread.stop()
    assert thread.join(LIMIT)
    assert (metal.wired, metal.wired_limit, metal.active, metal.buffers) == (0, 0, 0, 0)


def test_an_idle_engine_is_maintained_and_reports_the_change() -> None:
    simulations = [Simulation(MACS[8])]
    metal = simulations[0].metal
    run(simulations[0], [prompt(n, 2000) for n in range(4)])
    messages: queue.Queue[Any] = queue.Queue()
    thread = EngineThread(lambda _: simulations.pop().loop, messages.put, maintenance_interval=0.01)
    thread.start()
    ready = messages.get(timeout=LIMIT)
    assert ready.stats.ledger.prefix > 0
    metal.pressure = MemoryPressure.CRITICAL
    output = messages.get(timeout=LIMIT)
    assert isinstance(output, StepOutput)
    assert output.updates == ()
    assert output.stats.ledger.prefix == 0
    thread.stop()
    assert thread.join(LIMIT)


SMALL = Mac(
    installed=16,
    recommended=10.7,
    weights=0.6,
    position_kib=1024,
    layers=4,
    context=4096,
    parallel=3,
    max_buffers=600,
)


@examples(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_rules_hold_in_every_history(data: st.DataObject) -> None:
    """`Simulation.check` asserts the rules after each operation."""
    simulation = Simulation(SMALL, memory=data.draw(st.sampled_from([None, 9 * GIB, 12 * GIB])))
    numbers = itertools.count()
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["submit", "step", "run", "pressure", "idle"])):
            case "submit":
                ids = prompt(data.draw(st.integers(0, 5)), data.draw(st.integers(3, 3000)))
                simulation.loop.submit(
                    job(f"{next(numbers)}", ids, max_tokens=4, top_logprobs=None)
                )
            case "step":
                simulation.step()
            case "run":
                while not simulation.loop.idle:
                    simulation.step()
            case "pressure":
                simulation.metal.pressure = data.draw(st.sampled_from(MemoryPressure))
                before = simulation.loop.stats().ledger
                simulation.maintain()
                after = simulation.loop.stats().ledger
                if simulation.metal.pressure is MemoryPressure.CRITICAL:
                    assert after.prefix == 0
                if simulation.metal.pressure is not MemoryPressure.NORMAL:
                    assert after.prefix_limit <= before.prefix_limit
                    assert simulation.metal.pool_bytes == 0
            case _ if simulation.loop.idle:
                simulation.maintain(UNWIRE_AFTER)
                assert simulation.metal.wired == 0
            case _:
                pass
        simulation.loop.check()
    assert simulation.metal.peak_buffers < SMALL.max_buffers
    assert simulation.loop.exceptions == 0
