"""The scheduling policy: pure functions, so every case is one line."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.settings import MAX_DEFAULT_PARALLEL
from app.engine.policy import (
    MAX_ROUNDS,
    MIN_RUNNING,
    PendingPrompt,
    SchedulerLimits,
    choose_aligned_chunk,
    choose_aligned_round,
    choose_chunk_length,
    choose_growing,
    count_admissible,
    count_preemptions,
    count_prefill_rounds,
    count_slots,
    fair_order,
    should_defer,
    split_prefill_budget,
    update_pace,
)

Counts = st.integers(0, 50)
Remaining = st.lists(st.integers(1, 400), max_size=8)
Budget = st.integers(1, 200)


@given(waiting=Counts, running=Counts, slots=st.integers(1, 50))
def test_admission_fills_the_free_slots_and_no_more(waiting: int, running: int, slots: int) -> None:
    count = count_admissible(
        waiting=waiting, running=running, limits=SchedulerLimits(max_running=slots)
    )
    assert 0 <= count <= waiting
    assert count == 0 or running + count <= slots
    assert count == waiting or running + count >= slots


@given(
    waiting=Counts,
    running=Counts,
    slots=st.integers(1, 64),
    limit=st.floats(1e-3, 1),
    row=st.floats(1e-6, 1),
)
def test_admission_bounds_the_duration_of_a_decode_step(
    waiting: int, running: int, slots: int, limit: float, row: float
) -> None:
    limits = SchedulerLimits(max_running=slots, decode_seconds=limit)
    free = count_admissible(waiting=waiting, running=running, limits=limits)
    count = count_admissible(waiting=waiting, running=running, limits=limits, seconds_per_row=row)
    assert 0 <= count <= free
    after = running + count
    assert count == 0 or after <= MIN_RUNNING or after * row <= limit * 1.001
    # no fewer than necessary
    assert count == free or after >= MIN_RUNNING
    assert count == free or (after + 1) * row > limit * 0.999
    unlimited = SchedulerLimits(max_running=slots)
    assert free == count_admissible(
        waiting=waiting, running=running, limits=unlimited, seconds_per_row=row
    )


@given(free=st.integers(0, 10**12), size=st.integers(1, 10**10))
def test_slots_fit_in_memory(free: int, size: int) -> None:
    slots = count_slots(free_bytes=free, bytes_per_sequence=size)
    assert 1 <= slots <= MAX_DEFAULT_PARALLEL
    assert slots == 1 or slots * size <= free
    assert slots == MAX_DEFAULT_PARALLEL or (slots + 1) * size > free


Callers = st.lists(st.sampled_from("abcd"), max_size=12)


LastServed = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20))


@given(waiting=Callers, running=Callers, last_served=LastServed)
def test_fair_order_keeps_the_order_of_each_caller(
    waiting: list[str], running: list[str], last_served: dict[str, int]
) -> None:
    order = fair_order(waiting, running, last_served)
    assert sorted(order) == list(range(len(waiting)))
    for caller in set(waiting):
        own = [i for i in order if waiting[i] == caller]
        assert own == sorted(own)


@given(waiting=Callers.filter(bool), running=Callers, last_served=LastServed)
def test_the_caller_with_the_fewest_running_requests_is_first(
    waiting: list[str], running: list[str], last_served: dict[str, int]
) -> None:
    first = waiting[fair_order(waiting, running, last_served)[0]]
    fewest = min(running.count(caller) for caller in waiting)
    equals = {caller for caller in waiting if running.count(caller) == fewest}
    assert first in equals
    assert last_served.get(first, -1) == min(last_served.get(caller, -1) for caller in equals)


def test_a_single_caller_is_served_in_order() -> None:
    assert fair_order(["", "", ""], [""], {"": 3}) == [0, 1, 2]


def test_one_request_does_not_wait_behind_sixty_of_another_caller() -> None:
    assert fair_order(["a"] * 60 + ["b"], ["a"] * 4, {"a": 7})[0] == 60
    assert fair_order(["a"] * 60 + ["b"], [], {"a": 7})[0] == 60
    assert fair_order(["a", "a", "b", "b", "a"], [], {}) == [0, 2, 1, 3, 4]


@given(slots=st.integers(1, 4), flood=st.integers(0, 30), seed=st.integers(0, 1 << 30))
def test_a_caller_is_served_while_others_flood(slots: int, flood: int, seed: int) -> None:
    """Three callers send two new requests for each that ends, and a fourth caller sends one: it
    starts before any of the others gets a second turn. With one slot nothing runs when the next
    is chosen; requests once started in order of arrival, and sixty of one caller came first."""
    rng = random.Random(seed)
    running = [rng.choice("abc") for _ in range(slots)]
    waiting = [rng.choice("abc") for _ in range(flood)] + ["z"]
    last_served = {caller: n for n, caller in enumerate(running)}
    for turn in range(4):
        running.pop(rng.randrange(slots))
        caller = waiting.pop(fair_order(waiting, running, last_served)[0])
        if caller == "z":
            return
        running.append(caller)
        last_served[caller] = slots + turn
        waiting += rng.choices("abc", k=2)
    raise AssertionError("its request was not scheduled")


@given(remaining=Remaining, budget=Budget)
def test_the_budget_is_exceeded_by_an_eighth_at_most(remaining: list[int], budget: int) -> None:
    shares = split_prefill_budget(remaining, SchedulerLimits(max_prefill_tokens=budget))
    assert sum(shares) <= budget + budget // 8
    assert all(0 <= share <= length for share, length in zip(shares, remaining, strict=True))
    # the remainder is too small for a separate chunk
    assert sum(shares) >= min(sum(remaining), budget - (budget + 3) // 4)


@given(remaining=Remaining.filter(bool), budget=Budget)
def test_the_oldest_prompt_always_gets_half(remaining: list[int], budget: int) -> None:
    shares = split_prefill_budget(remaining, SchedulerLimits(max_prefill_tokens=budget))
    assert shares[0] >= min(remaining[0], (budget + 1) // 2)


@given(remaining=Remaining, budget=Budget)
def test_no_chunk_is_small_unless_it_ends_its_prompt(remaining: list[int], budget: int) -> None:
    for share, length in zip(
        split_prefill_budget(remaining, SchedulerLimits(max_prefill_tokens=budget)),
        remaining,
        strict=True,
    ):
        assert share in (0, length) or share >= (budget + 3) // 4


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    assert split_prefill_budget([4000, 64], SchedulerLimits(max_prefill_tokens=128)) == [64, 64]
    assert split_prefill_budget([4000, 3000, 20, 30], SchedulerLimits(max_prefill_tokens=128)) == [
        78,
        0,
        20,
        30,
    ]
    assert split_prefill_budget([4000, 70], SchedulerLimits(max_prefill_tokens=128)) == [64, 70]
    assert split_prefill_budget([140], SchedulerLimits(max_prefill_tokens=128)) == [140]
    assert split_prefill_budget([150], SchedulerLimits(max_prefill_tokens=128)) == [128]


def test_a_single_prompt_gets_the_whole_budget() -> None:
    assert split_prefill_budget([4000], SchedulerLimits(max_prefill_tokens=128)) == [128]
    assert split_prefill_budget([], SchedulerLimits(max_prefill_tokens=128)) == []


ALIGNED = SchedulerLimits(max_prefill_tokens=64, align_chunks=True)


def make_pending(*remaining: int, computed: int = 0) -> list[PendingPrompt]:
    return [PendingPrompt(computed=computed, remaining=count) for count in remaining]


def test_aligned_chunks_go_to_the_oldest_and_the_shortest_in_turn() -> None:
    assert choose_aligned_chunk(make_pending(500, 400, 30, 200), ALIGNED, turn=0) == (0, 64)
    assert choose_aligned_chunk(make_pending(500, 400, 30, 200), ALIGNED, turn=1) == (2, 30)
    assert choose_aligned_chunk(make_pending(500), ALIGNED, turn=1) == (0, 64)
    assert choose_aligned_chunk([], ALIGNED, turn=1) is None


def test_an_aligned_chunk_after_a_cached_prefix_ends_at_the_next_multiple() -> None:
    assert choose_aligned_chunk(make_pending(500, computed=100), ALIGNED, turn=0) == (0, 28)
    assert choose_aligned_chunk(make_pending(20, computed=100), ALIGNED, turn=0) == (0, 20)


Prompts = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 400)), min_size=1, max_size=8)


@given(prompts=Prompts, size=st.integers(1, 128), turns=st.lists(st.integers(0, 9), max_size=12))
def test_aligned_chunks_do_not_depend_on_the_load(
    prompts: list[tuple[int, int]], size: int, turns: list[int]
) -> None:
    """Each prompt's chunks end at the multiples of the size, in any company and order."""
    limits = SchedulerLimits(max_prefill_tokens=size, align_chunks=True)
    left = [PendingPrompt(computed=computed, remaining=count) for computed, count in prompts]
    ends = [computed + count for computed, count in prompts]
    for turn in [*turns, *range(10_000)]:
        waiting = [i for i, prompt in enumerate(left) if prompt.remaining]
        chosen = choose_aligned_chunk([left[i] for i in waiting], limits, turn=turn)
        if chosen is None:
            break
        i, count = waiting[chosen[0]], chosen[1]
        assert 0 < count <= left[i].remaining
        end = left[i].computed + count
        assert end == min(ends[i], (left[i].computed // size + 1) * size)
        left[i] = PendingPrompt(computed=end, remaining=left[i].remaining - count)
    assert not any(prompt.remaining for prompt in left)


@given(prompts=Prompts, size=st.integers(1, 128), turns=st.lists(st.integers(0, 9), max_size=12))
def test_packed_chunks_end_where_they_would_alone(
    prompts: list[tuple[int, int]], size: int, turns: list[int]
) -> None:
    limits = SchedulerLimits(max_prefill_tokens=size, align_chunks=True)
    left = [PendingPrompt(computed=computed, remaining=count) for computed, count in prompts]
    for turn in [*turns, *range(10_000)]:
        waiting = [i for i, prompt in enumerate(left) if prompt.remaining]
        chosen = choose_aligned_round([left[i] for i in waiting], limits, turn=turn, pack=True)
        alone = choose_aligned_round([left[i] for i in waiting], limits, turn=turn, pack=False)
        assert chosen[:1] == alone
        if not chosen:
            break
        assert sum(count for _, count in chosen) <= size
        assert len({index for index, _ in chosen}) == len(chosen)
        for index, count in chosen:
            computed, remaining = left[waiting[index]].computed, left[waiting[index]].remaining
            assert count == min(remaining, size - computed % size)
            left[waiting[index]] = PendingPrompt(
                computed=computed + count, remaining=remaining - count
            )
    assert not any(prompt.remaining for prompt in left)


def test_short_prompts_fill_a_round() -> None:
    """Each one used to be a separate pass on a GPU."""
    prompts = make_pending(20, 30, 10, 200, 9)
    assert choose_aligned_round(prompts, ALIGNED, turn=0, pack=True) == [
        (0, 20),
        (4, 9),
        (2, 10),
    ]
    assert choose_aligned_round(prompts, ALIGNED, turn=0, pack=False) == [(0, 20)]
    assert choose_aligned_round(make_pending(200, 9), ALIGNED, turn=0, pack=True) == [(0, 64)]
    assert choose_aligned_round([], ALIGNED, turn=0, pack=True) == []


ONE_GB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "megabytes_per_token", "expected"),
    [
        ({"on_gpu": False, "experts": True, "accelerators": False}, 99, 128),
        ({"on_gpu": True, "experts": False, "accelerators": False}, 0.1, 1024),
        ({"on_gpu": True, "experts": True, "accelerators": False}, 0.1, 2048),
        ({"on_gpu": True, "experts": False, "accelerators": True}, 0.1, 2048),
        ({"on_gpu": True, "experts": True, "accelerators": True}, 0.6, 1024),
        ({"on_gpu": True, "experts": False, "accelerators": False}, 1.5, 512),
        ({"on_gpu": True, "experts": True, "accelerators": True}, 99, 256),
    ],
)
def test_the_chunk_suits_the_device_the_model_and_the_memory(
    kind: dict[str, bool], megabytes_per_token: float, expected: int
) -> None:
    def working(chunk: int) -> int:
        return int(megabytes_per_token * chunk * 1_000_000)

    assert choose_chunk_length(**kind, working=working, limit=ONE_GB) == expected


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12), size=st.integers(1, 64))
def test_no_aligned_prompt_starves(lengths: list[int], size: int) -> None:
    """Short prompts keep coming, and the oldest one still gets every other round."""
    limits = SchedulerLimits(max_prefill_tokens=size, align_chunks=True)
    computed, turn = 0, 0
    while computed < 1000:
        first = PendingPrompt(computed=computed, remaining=1000 - computed)
        chosen = choose_aligned_chunk([first, *make_pending(*lengths)], limits, turn=turn)
        assert chosen is not None
        computed += chosen[1] if chosen[0] == 0 else 0
        turn += 1
    assert turn <= 2 * -(-1000 // size)


Seconds = st.floats(0, 1e6)


@given(pace=st.none() | Seconds, size=Budget, budget=st.none() | st.floats(1e-3, 10))
def test_rounds_fit_into_the_time_of_a_step(
    pace: float | None, size: int, budget: float | None
) -> None:
    limits = SchedulerLimits(max_prefill_tokens=size, step_seconds=budget)
    rounds = count_prefill_rounds(pace, limits)
    assert 1 <= rounds <= MAX_ROUNDS
    if rounds > 1:
        assert pace is not None
        assert budget is not None
        assert rounds * pace * size <= budget * 1.001


def test_a_fast_step_takes_more_rounds() -> None:
    limits = SchedulerLimits(max_prefill_tokens=100, step_seconds=0.1)
    paces = (None, 1.0, 1e-3, 5e-4, 1e-4, 0.0)
    assert [count_prefill_rounds(pace, limits) for pace in paces] == [1, 1, 1, 2, 10, MAX_ROUNDS]


@given(decode=st.floats(0, 0.3), token=st.floats(1e-6, 1e-2), first=st.none() | st.floats(1e-7, 1))
def test_the_pace_settles_at_steps_within_the_time(
    decode: float, token: float, first: float | None
) -> None:
    """Steps take as many rounds as fit in addition to decoding the running sequences."""
    limits = SchedulerLimits(max_prefill_tokens=128, step_seconds=0.1)
    pace, steps = first, list[float]()
    for _ in range(200):
        tokens = 128 * count_prefill_rounds(pace, limits)
        steps.append(decode + tokens * token)
        pace = update_pace(pace, count=tokens, seconds=steps[-1])
    shortest = decode + 128 * token
    assert all(step <= max(shortest, 0.2) * 1.001 for step in steps[100:])
    # not much shorter than the time, unless the number of rounds is at its limit
    assert max(steps[100:]) >= min(0.05, decode + MAX_ROUNDS * 128 * token) * 0.999


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_clock_that_jumps_does_not_change_the_pace(seconds: float) -> None:
    assert update_pace(0.5, count=10, seconds=seconds) == 0.5
    assert update_pace(0.5, count=0, seconds=1.0) == 0.5


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12), budget=st.integers(1, 64))
def test_no_prompt_starves(lengths: list[int], budget: int) -> None:
    """Short prompts keep coming, and the oldest one still gets half of each step."""
    first, steps, others = 1000, 0, [*lengths]
    waiting = [first, *others]
    while first:
        shares = split_prefill_budget(waiting, SchedulerLimits(max_prefill_tokens=budget))
        waiting = [w - s for w, s in zip(waiting, shares, strict=True)]
        first = waiting[0]
        # each finished prompt is followed by another short one
        waiting = [first, *(w or lengths[0] for w in waiting[1:])]
        steps += 1
    assert steps <= 1 + 1000 // ((budget + 1) // 2)


Bytes = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=8)


@given(sequences=Bytes, free=st.integers(0, 60))
def test_preemptions_are_minimal_and_spare_the_oldest(
    sequences: list[tuple[int, int]], free: int
) -> None:
    reserved, growth = ([s[i] for s in sequences] for i in (0, 1))
    count = count_preemptions(reserved=reserved, growth=growth, free=free)
    assert 0 <= count < len(reserved)

    def fits(preempted: int) -> bool:
        stay = len(reserved) - preempted
        return sum(growth[:stay]) <= free + sum(reserved[stay:])

    assert not any(fits(fewer) for fewer in range(count))
    assert fits(count) or count == len(reserved) - 1


@pytest.mark.parametrize(
    ("growth", "free", "count"), [((0, 0, 0), 0, 0), ((5, 0, 0), 5, 0), ((5, 0, 0), 4, 1)]
)
def test_no_sequence_is_preempted_without_need(
    growth: tuple[int, ...], free: int, count: int
) -> None:
    assert count_preemptions(reserved=(10, 10, 10), growth=growth, free=free) == count


@given(left=st.lists(st.integers(0, 100), max_size=8), ahead=st.integers(1, 64))
def test_all_full_sequences_grow_and_otherwise_at_most_one(left: list[int], ahead: int) -> None:
    chosen = choose_growing(left, ahead=ahead)
    full = {i for i, positions in enumerate(left) if positions == 0}
    assert full <= chosen
    if not full:
        assert len(chosen) <= 1
        assert all(left[i] == min(left) < ahead for i in chosen)


def test_streams_that_started_together_grow_one_at_a_time() -> None:
    left, choices = [40] * 8, list[set[int]]()
    for _ in range(40):
        choices.append(choose_growing(left, ahead=32))
        left = [1000 if i in choices[-1] else positions - 1 for i, positions in enumerate(left)]
    assert max(map(len, choices)) == 1
    assert sorted(i for chosen in choices for i in chosen) == list(range(8))


@pytest.mark.parametrize(
    ("shared", "computed", "length", "waits"),
    [
        (600, 0, 900, True),  # another sequence is computing a chunk's worth
        (100, 0, 900, False),
        (600, 500, 900, False),
        (40, 0, 40, True),  # another choice of the same request: all but one id
        (39, 10, 40, True),
        (40, 40, 40, False),
        (38, 0, 40, False),
    ],
)
def test_a_prompt_waits_for_one_that_computes_its_prefix(
    shared: int, computed: int, length: int, waits: bool
) -> None:
    assert (
        should_defer(shared_prefix=shared, num_computed=computed, min_gain=512, length=length)
        == waits
    )
