"""The memory policy: pure functions of bytes, buffers and pressure."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.memory_policy import (
    WIRED_STEP,
    DeviceMemory,
    MemoryPressure,
    adjust_prefix_limit,
    choose_max_cached_layers,
    choose_pool_limit,
    choose_prefix_limit,
    choose_rules,
    reserve_bytes,
    unified_budget,
    wirable_bytes,
    wired_target,
)

GIB = 1 << 30
sizes = st.integers(0, 1 << 42)
macs = st.builds(
    lambda installed, share: DeviceMemory(
        physical=installed * GIB,
        recommended=int(share * installed * GIB),
        max_buffers=499_000,
    ),
    st.sampled_from([8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512]),
    st.floats(0.5, 0.97),
)


@pytest.mark.parametrize(("installed", "reserve"), [(8, 4), (16, 4), (24, 6), (512, 128)])
def test_a_quarter_and_at_least_4_gib_are_reserved(installed: int, reserve: int) -> None:
    assert reserve_bytes(installed * GIB) == reserve * GIB


@given(memory=macs, needed=sizes)
def test_wired_memory_leaves_the_reserve_and_stays_in_the_recommended_size(
    memory: DeviceMemory, needed: int
) -> None:
    assert memory.physical is not None
    wired = wired_target(needed, wirable_bytes(memory))
    assert wired <= memory.recommended
    assert wired <= memory.physical - reserve_bytes(memory.physical)
    assert wired < needed + WIRED_STEP
    assert wired >= min(needed, wirable_bytes(memory))
    assert unified_budget(memory) <= min(0.9 * memory.recommended, wirable_bytes(memory))


def test_a_device_that_cannot_wire_memory_wires_nothing() -> None:
    assert wirable_bytes(DeviceMemory(physical=64 * GIB)) == 0
    assert wirable_bytes(DeviceMemory()) == 0
    assert wired_target(5 * GIB, 0) == 0


@given(kv_budget=sizes, conversation=sizes)
def test_cached_prefixes_get_a_quarter_or_one_conversation(
    kv_budget: int, conversation: int
) -> None:
    limit = choose_prefix_limit(kv_budget, conversation)
    assert limit <= kv_budget
    assert limit >= min(kv_budget, conversation)
    assert limit <= max(kv_budget / 4, conversation)


@given(budget=sizes, working=sizes)
def test_the_pool_holds_a_step_and_is_bounded(budget: int, working: int) -> None:
    limit = choose_pool_limit(budget, working)
    assert working <= limit <= max(working, 0.05 * budget, 0)
    assert limit <= max(working, 2 * GIB)


@given(
    max_buffers=st.integers(1, 10**6),
    weights=st.integers(0, 5000),
    running=st.integers(0, 5000),
    each=st.integers(1, 6),
)
def test_buffers_of_weights_sequences_and_prefixes_leave_room_for_a_step_and_the_pool(
    max_buffers: int, weights: int, running: int, each: int
) -> None:
    cached = choose_max_cached_layers(
        max_buffers, weights=weights, running_layers=running, buffers_per_layer=each
    )
    assert cached >= 0
    if cached:
        assert weights + each * (2 * running + cached) <= 0.6 * max_buffers


def test_a_layer_with_many_buffers_counts_as_many() -> None:
    def most(each: int) -> int:
        return choose_max_cached_layers(
            499_000, weights=300, running_layers=8 * 28, buffers_per_layer=each
        )

    assert most(2) == (299_400 - 300) // 2 - 448
    assert most(6) == (299_400 - 300) // 6 - 448


limits = st.integers(0, 1 << 40)


@given(full=limits, used=limits, start=limits, levels=st.lists(st.sampled_from(MemoryPressure)))
def test_the_prefix_limit_follows_the_pressure(
    full: int, used: int, start: int, levels: list[MemoryPressure]
) -> None:
    limit = min(start, full)
    for level in levels:
        before = limit
        limit = adjust_prefix_limit(before, used=used, full=full, pressure=level)
        assert 0 <= limit <= full
        match level:
            case MemoryPressure.CRITICAL:
                assert limit == 0
            case MemoryPressure.WARNING:
                assert limit <= before
                assert limit <= max(min(before, used) / 2, full / 8)
            case MemoryPressure.NORMAL:
                assert limit > before or limit == full
    for _ in range(32):
        limit = adjust_prefix_limit(limit, used=used, full=full, pressure=MemoryPressure.NORMAL)
    assert limit == full


def rules_for(
    memory: DeviceMemory,
    *,
    has_limit: bool = False,
    may_shrink: bool = True,
    experimental_metal: bool = True,
):
    return choose_rules(
        memory,
        kv_budget=8 * GIB,
        conversation=GIB,
        has_limit=has_limit,
        may_shrink=may_shrink,
        experimental_metal=experimental_metal,
        weight_buffers=300,
        running_layers=224,
        buffers_per_layer=2,
    )


def test_each_kind_of_device_has_its_rules() -> None:
    mac = DeviceMemory(physical=32 * GIB, recommended=21 * GIB, max_buffers=499_000)
    rules = rules_for(mac)
    assert (rules.prefix_limit, rules.wirable) == (2 * GIB, 21 * GIB)
    assert rules.shrinks_under_pressure
    assert rules.max_cached_layers is not None

    untested = rules_for(mac, experimental_metal=False)
    assert untested == replace(rules, wirable=0, shrinks_under_pressure=False)
    assert rules_for(DeviceMemory(physical=32 * GIB), experimental_metal=False) == rules_for(
        DeviceMemory(physical=32 * GIB)
    )

    cpu = rules_for(DeviceMemory(physical=32 * GIB))
    assert (cpu.prefix_limit, cpu.wirable, cpu.max_cached_layers) == (2 * GIB, 0, None)
    assert cpu.shrinks_under_pressure

    cuda = rules_for(DeviceMemory())
    assert (cuda.prefix_limit, cuda.wirable, cuda.max_cached_layers) == (None, 0, None)
    assert not cuda.shrinks_under_pressure


def test_a_memory_limit_replaces_the_share_and_ranks_never_shrink_on_their_own() -> None:
    memory = DeviceMemory(physical=32 * GIB)
    assert rules_for(memory, has_limit=True).prefix_limit is None
    assert rules_for(memory, may_shrink=False) == replace(
        rules_for(memory), shrinks_under_pressure=False
    )
