"""The slots policy: the shared suite, then each rule of Ollama's slots by name."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from app.core.jobs import CacheMiss
from app.engine.prefix.slots import SlotLease, SlotPrefixCache
from tests.engine.prefix.contract import *  # noqa: F403 - the tests are what is imported
from tests.engine.prefix.contract import ALL, KINDS, NAMES, WEIGHTS, History, MakeCache
from tests.engine.prefix.layers import FakeLayer, layers

Cache = SlotPrefixCache[FakeLayer]


def cache_of(
    kinds: str = "k",
    *,
    slots: int = 2,
    multi_user: bool = True,
    alignment: int = 1,
    context: int = 100,
    evaluate: Callable[[Sequence[FakeLayer]], object] = id,
) -> Cache:
    return SlotPrefixCache(
        lambda: layers(kinds),
        slots=slots,
        context=context,
        multi_user=multi_user,
        evaluate=evaluate,
        alignment=alignment,
    )


@pytest.fixture(scope="module", params=["one user", "many users"])
def make_cache(request: pytest.FixtureRequest) -> MakeCache:
    """The shared histories begin as many leases as they like, so there are slots for all."""
    return lambda kinds, grid: cache_of(
        kinds, slots=40, multi_user=request.param == "many users", alignment=grid
    )


def busy(cache: Cache, ids: Sequence[int]) -> SlotLease[FakeLayer]:
    """A sequence that has evaluated its prompt, and said so."""
    lease = cache.begin(ids)
    for layer in lease.kv:
        assert layer.ids == tuple(ids[: lease.cached])
        layer.feed(ids[lease.cached :])
    lease.publish(ids)
    cache.check()
    return lease


def run(cache: Cache, ids: Sequence[int]) -> int:
    """A sequence from begin to end; how much of it was cached."""
    lease = busy(cache, ids)
    lease.commit(ids, keep=len(ids))
    cache.check()
    return lease.cached


def served(cache: Cache, ids: Sequence[int]) -> int:
    """How much of a prompt is cached, if it is the next one. The slot it takes is then empty."""
    lease = cache.begin(ids)
    assert all(layer.ids == tuple(ids[: lease.cached]) for layer in lease.kv)
    lease.discard()
    cache.check()
    return lease.cached


# one user


def test_one_user_gets_the_idle_slot_with_the_longest_common_prefix() -> None:
    cache = cache_of(multi_user=False, slots=3)
    leases = [busy(cache, ids) for ids in ([1, 2, 3], [1, 2, 4, 5], [6])]
    for lease, ids in zip(leases, ([1, 2, 3], [1, 2, 4, 5], [6]), strict=True):
        lease.commit(ids, keep=4)
    assert run(cache, [1, 2, 4, 9]) == 3
    assert run(cache, [6, 1]) == 1
    assert run(cache, [1, 2, 3, 4]) == 3, "the other slots were left alone"


def test_for_one_user_the_first_slot_wins_ties_even_from_an_empty_one() -> None:
    cache = cache_of(multi_user=False, slots=2)
    run(cache, [1, 2, 3])
    run(cache, [4, 5, 6])
    assert cache.evictions == 1
    assert cache.nbytes == 3 * 8, "the second slot was never needed"


def test_for_one_user_the_first_of_two_slots_that_share_as_much_is_cut() -> None:
    cache = cache_of(multi_user=False)
    leases = [busy(cache, ids) for ids in ([1, 2, 3], [1, 2, 4])]
    for lease, ids in zip(leases, ([1, 2, 3], [1, 2, 4]), strict=True):
        lease.commit(ids, keep=3)
    assert run(cache, [1, 2, 9]) == 2
    assert served(cache, [1, 2, 4, 5]) == 3
    assert served(cache, [1, 2, 3, 5]) == 2


def test_one_user_never_borrows_from_a_busy_slot() -> None:
    cache = cache_of(multi_user=False)
    busy(cache, [1, 2, 3])
    assert served(cache, [1, 2, 3, 4]) == 0


@pytest.mark.parametrize("multi_user", [False, True])
def test_more_sequences_than_slots_are_our_own_mistake(multi_user: bool) -> None:
    cache = cache_of(multi_user=multi_user)
    busy(cache, [1])
    busy(cache, [2])
    with pytest.raises(AssertionError, match="more sequences than slots"):
        cache.begin([3])


# many users


def test_a_prompt_that_goes_on_from_a_whole_idle_slot_uses_that_slot() -> None:
    copies: list[Sequence[FakeLayer]] = []
    cache = cache_of(evaluate=copies.append)
    run(cache, [1, 2, 3])
    run(cache, [7])
    assert run(cache, [1, 2, 3, 4]) == 3
    assert (copies, cache.evictions) == ([], 0)
    assert run(cache, [7, 8]) == 1


def test_an_empty_idle_slot_is_used_before_anything_is_evicted() -> None:
    cache = cache_of(slots=3)
    for ids in ([1, 2], [3, 4], [5, 6]):
        run(cache, ids)
    assert cache.evictions == 0
    assert [run(cache, [*ids, 9]) for ids in ([1, 2], [3, 4], [5, 6])] == [2, 2, 2]


def test_a_slot_that_was_emptied_is_older_than_any_that_has_content() -> None:
    cache = cache_of()
    run(cache, [1, 2])
    cache.begin([3, 4]).discard()
    assert run(cache, [1, 9]) == 1
    assert cache.evictions == 0
    assert run(cache, [1, 2, 3]) == 2


def test_a_prompt_that_parts_from_an_idle_slot_is_forked_and_spares_it() -> None:
    copies: list[Sequence[FakeLayer]] = []
    cache = cache_of(slots=3, evaluate=copies.append)
    run(cache, [1, 2, 3, 4])
    lease = cache.begin([1, 2, 8, 9])
    assert lease.cached == 2
    assert [layer.ids for layer in lease.kv] == [(1, 2)]
    assert copies == [lease.kv], "copies are settled once, before anybody writes to them"
    lease.discard()
    assert run(cache, [1, 2, 3, 4, 5]) == 4


def test_a_fork_takes_the_idle_slot_that_was_used_longest_ago() -> None:
    cache = cache_of(slots=3)
    for ids in ([1, 2, 3], [4, 5], [6, 7]):
        run(cache, ids)
    run(cache, [4, 5, 5])  # now [6, 7] is the oldest but the donor
    run(cache, [1, 2, 3, 3])
    assert run(cache, [1, 2, 9]) == 2
    assert cache.evictions == 1
    assert served(cache, [4, 5, 5, 8]) == 3
    assert served(cache, [6, 7, 8]) == 0


def test_a_slot_s_age_is_that_of_its_last_beginning_not_of_its_end() -> None:
    cache = cache_of()
    first = busy(cache, [1, 2])
    second = busy(cache, [3, 4])
    second.commit([3, 4], keep=2)
    first.commit([1, 2], keep=2)
    assert run(cache, [5]) == 0
    assert served(cache, [3, 4, 5]) == 2, "the slot that began first was to go"


def test_the_oldest_slot_is_cut_in_place_if_it_is_itself_the_best() -> None:
    copies: list[Sequence[FakeLayer]] = []
    cache = cache_of(evaluate=copies.append)
    run(cache, [1, 2, 3])
    run(cache, [7])
    assert run(cache, [1, 2, 9]) == 2
    assert (copies, cache.evictions) == ([], 0)
    assert served(cache, [1, 2, 3, 4]) == 2, "what followed is gone"


def test_what_the_oldest_slot_has_as_well_is_not_copied() -> None:
    copies: list[Sequence[FakeLayer]] = []
    cache = cache_of(slots=3, evaluate=copies.append)
    first, oldest = busy(cache, [5, 1, 1]), busy(cache, [5, 2])
    busy(cache, [8])
    copies.clear()
    oldest.commit([5, 2], keep=2)
    assert cache.begin([5, 3]).cached == 1
    assert copies == []
    assert first.kv[0].ids == (5, 1, 1)


def test_a_busy_slot_lends_what_it_has_reached_and_is_not_written_to() -> None:
    cache = cache_of("kk")
    donor = busy(cache, [1, 2, 3, 4])
    for layer in donor.kv:
        layer.feed([5, 6])  # further along than it has said
    writes = [layer.writes for layer in donor.kv]
    assert served(cache, [1, 2, 3, 4, 5, 6]) == 4
    assert served(cache, [1, 2, 9]) == 2
    assert [layer.writes for layer in donor.kv] == writes


def test_a_busy_slot_lends_at_once_what_it_began_with() -> None:
    cache = cache_of()
    run(cache, [1, 2, 3])
    cache.begin([1, 2, 3, 4, 5])
    assert served(cache, [1, 2, 3, 4, 5, 6]) == 3


def test_an_unwritten_busy_slot_lends_nothing() -> None:
    cache = cache_of()
    cache.begin([1, 2, 3])
    assert served(cache, [1, 2, 3, 4]) == 0


def test_a_prompt_that_a_busy_slot_covers_whole_is_forked_but_for_one_id() -> None:
    cache = cache_of()
    busy(cache, [1, 2, 3])
    assert served(cache, [1, 2, 3]) == 2


# layers that are wholes


def test_a_state_is_lent_only_at_the_position_where_it_is() -> None:
    cache = cache_of("kr")
    busy(cache, [1, 2, 3])
    assert served(cache, [1, 2, 3, 4]) == 3
    lease = cache.begin([1, 2, 9])
    assert (lease.cached, lease.miss) == (0, CacheMiss(position=0, reason="no_state"))


def test_a_state_that_has_moved_on_since_it_was_reached_is_not_lent() -> None:
    cache = cache_of("kr")
    donor = busy(cache, [1, 2, 3])
    for layer in donor.kv:
        layer.feed([4])
    lease = cache.begin([1, 2, 3, 4, 5])
    assert (lease.cached, lease.miss) == (0, CacheMiss(position=0, reason="no_state"))


def test_a_window_is_lent_as_long_as_it_can_be_cut_back() -> None:
    cache = cache_of("kw")  # a window of 4
    donor = busy(cache, [1, 2, 3])
    for layer in donor.kv:
        layer.feed([4])
    assert served(cache, [1, 2, 9]) == 2
    for layer in donor.kv:
        layer.feed([5])
    assert served(cache, [1, 2, 9]) == 0
    assert [layer.ids for layer in donor.kv] == [(1, 2, 3, 4, 5)] * 2


def test_where_nothing_can_be_lent_the_oldest_slot_serves_what_it_has_itself() -> None:
    cache = cache_of("kr")
    run(cache, [1, 2])
    donor = busy(cache, [1, 2, 3])
    donor.commit([1, 2, 3], keep=3)
    other = busy(cache, [1])
    other.commit([1], keep=1)
    busy(cache, [1, 2, 3, 4])
    lease = cache.begin([1, 2, 9])
    assert lease.cached == 1
    assert lease.miss == CacheMiss(position=1, reason="no_state")


def test_an_idle_slot_that_cannot_be_cut_is_cleared_and_begun_afresh() -> None:
    cache = cache_of("kr", slots=1)
    run(cache, [1, 2, 3])
    assert run(cache, [1, 2, 9]) == 0
    assert cache.evictions == 1


# what a miss says, and what is given up


def test_a_miss_tells_what_the_best_slot_has_instead() -> None:
    cache = cache_of()
    run(cache, list(range(20)))
    run(cache, [0, 5])
    assert cache.begin([0, 1, 2, 7, 7]).miss == CacheMiss(
        position=3, reason="diverged", cached_ids=(3, 4, 5, 6, 7, 8, 9, 10)
    )


def test_a_prompt_that_goes_on_from_what_is_cached_has_nothing_else_to_blame() -> None:
    cache = cache_of()
    run(cache, [1, 2, 3])
    assert cache.begin([1, 2, 3, 4, 5]).miss == CacheMiss(position=3, reason="diverged")


def test_on_a_grid_the_miss_tells_where_the_ids_part_not_where_the_cell_begins() -> None:
    cache = cache_of(alignment=4)
    run(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    lease = cache.begin([1, 2, 3, 4, 5, 6, 9, 9, 9, 9])
    assert (lease.cached, lease.miss) == (
        4,
        CacheMiss(position=6, reason="diverged", cached_ids=(7, 8)),
    )


def test_on_a_grid_a_busy_slot_lends_whole_cells() -> None:
    cache = cache_of(alignment=4)
    busy(cache, [1, 2, 3, 4, 5, 6])
    assert served(cache, [1, 2, 3, 4, 5, 6, 7]) == 4
    assert served(cache, [1, 2, 3, 7, 7]) == 0


def test_an_unwanted_prefix_is_neither_served_nor_copied() -> None:
    copies: list[Sequence[FakeLayer]] = []
    cache = cache_of(evaluate=copies.append)
    run(cache, [1, 2, 3])
    busy(cache, [1, 2, 3, 4])
    lease = cache.begin([1, 2, 3, 4], reuse=False)
    assert (lease.cached, lease.miss, copies) == (0, CacheMiss(position=0, reason="unwanted"), [])


def test_content_that_gives_way_to_another_prompt_is_an_eviction_and_a_cut_is_none() -> None:
    cache = cache_of(slots=1)
    run(cache, [1, 2, 3])
    run(cache, [1, 2, 4])
    assert cache.evictions == 0
    run(cache, [5])
    assert cache.evictions == 1
    cache.begin([5, 6]).discard()
    assert cache.evictions == 1


def test_shrinking_gives_up_whole_slots_oldest_first_and_no_more_than_needed() -> None:
    cache = cache_of(slots=4)
    for ids in ([1, 1], [2, 2], [3, 3]):
        run(cache, ids)
    run(cache, [2, 2, 2])
    lease = busy(cache, [1, 1, 1])  # so [3, 3] is the oldest idle one
    assert cache.evict(0) == 0
    assert cache.evict(2 * 8) == 2 * 8
    assert cache.evictions == 1
    assert served(cache, [2, 2, 2, 2]) == 3
    assert cache.nbytes == 0
    run(cache, [4])
    assert cache.evict(ALL) == 8
    assert lease.kv[0].ids == (1, 1, 1), "what is on loan stays"


@dataclass
class Cramped(FakeLayer):
    """Has no room for more than four positions."""

    def reserve(self, length: int) -> None:
        if length > 4:
            raise MemoryError


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 5], [1, 2, 9, 9, 9], [7, 7, 7, 7, 7]])
def test_a_begin_that_fails_for_want_of_memory_leaves_its_slot_free(prompt: list[int]) -> None:
    """Whether it was to go on, to be cut or to begin afresh."""
    cache = SlotPrefixCache(
        lambda: list[FakeLayer]([Cramped()]), slots=1, context=9, multi_user=True
    )
    run(cache, [1, 2, 3, 4])
    with pytest.raises(MemoryError):
        cache.begin(prompt)
    cache.check()
    assert run(cache, [1, 2, 9]) == (0 if prompt[0] == 7 else 2)


def test_a_fork_that_fails_for_want_of_memory_leaves_both_slots_as_good_as_before() -> None:
    def full(kv: Sequence[FakeLayer]) -> None:
        raise MemoryError

    cache = cache_of(evaluate=full)
    lease = busy(cache, [1, 2, 3])
    with pytest.raises(MemoryError):
        cache.begin([1, 2, 4])
    cache.check()
    assert served(cache, [7]) == 0
    lease.commit([1, 2, 3], keep=3)
    assert run(cache, [1, 2, 3, 4]) == 3


@dataclass
class Crowded(History):
    """Begins nothing while every slot is taken, as the scheduler does."""

    slots: int = 0

    def begin(self, a: int, b: int, c: int) -> None:
        if len(self.running) < self.slots:
            super().begin(a, b, c)


@pytest.mark.no_cover
@pytest.mark.parametrize("multi_user", [False, True])
@pytest.mark.parametrize("kinds", KINDS)
def test_few_slots_under_any_history_keep_every_promise(kinds: str, multi_user: bool) -> None:
    for seed in range(150):
        draw = random.Random(seed)
        names = draw.choices(NAMES, WEIGHTS, k=80)
        a, b, c = (draw.choices(range(10_000), k=80) for _ in range(3))
        slots, grid = 1 + seed % 4, 1 + seed % 3
        cache = cache_of(kinds, slots=slots, multi_user=multi_user, alignment=grid)
        try:
            Crowded(cache, grid, slots=slots).play(list(zip(names, a, b, c, strict=True)))
        except Exception as failure:
            failure.add_note(f"seed {seed}, {slots} slots, grid {grid}")
            raise


def test_a_lease_that_ended_does_nothing_more() -> None:
    cache = cache_of()
    lease = busy(cache, [1, 2])
    lease.commit([1, 2], keep=2)
    for again in (
        lambda: lease.publish([1, 2]),
        lambda: lease.shift([1, 2], num_keep=0, remove=lambda kv, start, end: True),
        lambda: lease.commit([1, 2], keep=2),
        lease.discard,
    ):
        with pytest.raises(AssertionError, match="the lease has ended"):
            again()
    assert run(cache, [1, 2, 3]) == 2
