"""The slots policy: the shared contract, then each rule of Ollama's slots."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from app.core.jobs import CacheMiss
from app.engine.prefix.slots import SlotLease, SlotPrefixCache
from tests.engine.prefix.contract import *  # noqa: F403  # the suite that every policy passes
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
    """The shared histories begin any number of leases, so there are slots for all."""
    return lambda kinds, alignment: cache_of(
        kinds, slots=40, multi_user=request.param == "many users", alignment=alignment
    )


def begin_and_publish(cache: Cache, ids: Sequence[int]) -> SlotLease[FakeLayer]:
    """A lease whose prompt is evaluated and published."""
    lease = cache.begin(ids)
    for layer in lease.kv:
        assert layer.ids == tuple(ids[: lease.cached])
        layer.feed(ids[lease.cached :])
    lease.publish(ids)
    cache.check()
    return lease


def run(cache: Cache, ids: Sequence[int]) -> int:
    """Run a sequence from begin to end. Returns the number of cached ids."""
    lease = begin_and_publish(cache, ids)
    lease.commit(ids, keep=len(ids))
    cache.check()
    return lease.cached


def count_cached(cache: Cache, ids: Sequence[int]) -> int:
    """The number of cached ids of the next prompt. Its slot is empty afterwards."""
    lease = cache.begin(ids)
    assert all(layer.ids == tuple(ids[: lease.cached]) for layer in lease.kv)
    lease.discard()
    cache.check()
    return lease.cached


# one user


def test_one_user_gets_the_idle_slot_with_the_longest_common_prefix() -> None:
    cache = cache_of(multi_user=False, slots=3)
    leases = [begin_and_publish(cache, ids) for ids in ([1, 2, 3], [1, 2, 4, 5], [6])]
    for lease, ids in zip(leases, ([1, 2, 3], [1, 2, 4, 5], [6]), strict=True):
        lease.commit(ids, keep=4)
    assert run(cache, [1, 2, 4, 9]) == 3
    assert run(cache, [6, 1]) == 1
    assert run(cache, [1, 2, 3, 4]) == 3, "the other slots are unchanged"


def test_for_one_user_the_first_slot_wins_ties_even_against_an_empty_one() -> None:
    cache = cache_of(multi_user=False, slots=2)
    run(cache, [1, 2, 3])
    run(cache, [4, 5, 6])
    assert cache.evictions == 1
    assert cache.nbytes == 3 * 8, "the second slot was never needed"


def test_for_one_user_the_first_of_two_equal_slots_is_trimmed() -> None:
    cache = cache_of(multi_user=False)
    leases = [begin_and_publish(cache, ids) for ids in ([1, 2, 3], [1, 2, 4])]
    for lease, ids in zip(leases, ([1, 2, 3], [1, 2, 4]), strict=True):
        lease.commit(ids, keep=3)
    assert run(cache, [1, 2, 9]) == 2
    assert count_cached(cache, [1, 2, 4, 5]) == 3
    assert count_cached(cache, [1, 2, 3, 5]) == 2


def test_for_one_user_busy_slots_lend_nothing() -> None:
    cache = cache_of(multi_user=False)
    begin_and_publish(cache, [1, 2, 3])
    assert count_cached(cache, [1, 2, 3, 4]) == 0


@pytest.mark.parametrize("multi_user", [False, True])
def test_more_sequences_than_slots_are_an_internal_error(multi_user: bool) -> None:
    cache = cache_of(multi_user=multi_user)
    begin_and_publish(cache, [1])
    begin_and_publish(cache, [2])
    with pytest.raises(AssertionError, match="more sequences than slots"):
        cache.begin([3])


# many users


def test_a_prompt_that_continues_an_idle_slot_uses_that_slot() -> None:
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


def test_an_emptied_slot_counts_as_the_oldest() -> None:
    cache = cache_of()
    run(cache, [1, 2])
    cache.begin([3, 4]).discard()
    assert run(cache, [1, 9]) == 1
    assert cache.evictions == 0
    assert run(cache, [1, 2, 3]) == 2


def test_a_prompt_that_diverges_from_an_idle_slot_is_forked() -> None:
    copies: list[Sequence[FakeLayer]] = []
    cache = cache_of(slots=3, evaluate=copies.append)
    run(cache, [1, 2, 3, 4])
    lease = cache.begin([1, 2, 8, 9])
    assert lease.cached == 2
    assert [layer.ids for layer in lease.kv] == [(1, 2)]
    assert copies == [lease.kv], "copies are evaluated once, before a write to them"
    lease.discard()
    assert run(cache, [1, 2, 3, 4, 5]) == 4


def test_a_fork_takes_the_least_recently_used_idle_slot() -> None:
    cache = cache_of(slots=3)
    for ids in ([1, 2, 3], [4, 5], [6, 7]):
        run(cache, ids)
    run(cache, [4, 5, 5])  # now [6, 7] is the oldest but the donor
    run(cache, [1, 2, 3, 3])
    assert run(cache, [1, 2, 9]) == 2
    assert cache.evictions == 1
    assert count_cached(cache, [4, 5, 5, 8]) == 3
    assert count_cached(cache, [6, 7, 8]) == 0


def test_the_age_of_a_slot_counts_from_the_begin_of_its_last_lease() -> None:
    cache = cache_of()
    first = begin_and_publish(cache, [1, 2])
    second = begin_and_publish(cache, [3, 4])
    second.commit([3, 4], keep=2)
    first.commit([1, 2], keep=2)
    assert run(cache, [5]) == 0
    assert count_cached(cache, [3, 4, 5]) == 2, "the slot whose lease began first is replaced"


def test_the_oldest_slot_is_trimmed_in_place_if_it_matches_best() -> None:
    copies: list[Sequence[FakeLayer]] = []
    cache = cache_of(evaluate=copies.append)
    run(cache, [1, 2, 3])
    run(cache, [7])
    assert run(cache, [1, 2, 9]) == 2
    assert (copies, cache.evictions) == ([], 0)
    assert count_cached(cache, [1, 2, 3, 4]) == 2, "the rest was trimmed"


def test_a_prefix_that_the_oldest_slot_has_too_is_not_copied() -> None:
    copies: list[Sequence[FakeLayer]] = []
    cache = cache_of(slots=3, evaluate=copies.append)
    first, oldest = begin_and_publish(cache, [5, 1, 1]), begin_and_publish(cache, [5, 2])
    begin_and_publish(cache, [8])
    copies.clear()
    oldest.commit([5, 2], keep=2)
    assert cache.begin([5, 3]).cached == 1
    assert copies == []
    assert first.kv[0].ids == (5, 1, 1)


def test_a_busy_slot_lends_its_published_prefix_and_is_not_written_to() -> None:
    cache = cache_of("kk")
    donor = begin_and_publish(cache, [1, 2, 3, 4])
    for layer in donor.kv:
        layer.feed([5, 6])  # beyond the published prefix
    writes = [layer.writes for layer in donor.kv]
    assert count_cached(cache, [1, 2, 3, 4, 5, 6]) == 4
    assert count_cached(cache, [1, 2, 9]) == 2
    assert [layer.writes for layer in donor.kv] == writes


def test_a_busy_slot_lends_its_cached_prefix_at_once() -> None:
    cache = cache_of()
    run(cache, [1, 2, 3])
    cache.begin([1, 2, 3, 4, 5])
    assert count_cached(cache, [1, 2, 3, 4, 5, 6]) == 3


def test_an_unwritten_busy_slot_lends_nothing() -> None:
    cache = cache_of()
    cache.begin([1, 2, 3])
    assert count_cached(cache, [1, 2, 3, 4]) == 0


def test_a_prompt_within_a_busy_slot_is_forked_except_for_one_id() -> None:
    cache = cache_of()
    begin_and_publish(cache, [1, 2, 3])
    assert count_cached(cache, [1, 2, 3]) == 2


# layers with a state


def test_a_state_is_lent_only_at_its_own_position() -> None:
    cache = cache_of("kr")
    begin_and_publish(cache, [1, 2, 3])
    assert count_cached(cache, [1, 2, 3, 4]) == 3
    lease = cache.begin([1, 2, 9])
    assert (lease.cached, lease.miss) == (0, CacheMiss(position=0, reason="no_state"))


def test_a_state_that_advanced_after_the_publish_is_not_lent() -> None:
    cache = cache_of("kr")
    donor = begin_and_publish(cache, [1, 2, 3])
    for layer in donor.kv:
        layer.feed([4])
    lease = cache.begin([1, 2, 3, 4, 5])
    assert (lease.cached, lease.miss) == (0, CacheMiss(position=0, reason="no_state"))


def test_a_window_is_lent_as_long_as_it_can_be_trimmed() -> None:
    cache = cache_of("kw")  # a window of 4
    donor = begin_and_publish(cache, [1, 2, 3])
    for layer in donor.kv:
        layer.feed([4])
    assert count_cached(cache, [1, 2, 9]) == 2
    for layer in donor.kv:
        layer.feed([5])
    assert count_cached(cache, [1, 2, 9]) == 0
    assert [layer.ids for layer in donor.kv] == [(1, 2, 3, 4, 5)] * 2


def test_if_nothing_can_be_lent_the_oldest_slot_serves_its_own_prefix() -> None:
    cache = cache_of("kr")
    run(cache, [1, 2])
    donor = begin_and_publish(cache, [1, 2, 3])
    donor.commit([1, 2, 3], keep=3)
    other = begin_and_publish(cache, [1])
    other.commit([1], keep=1)
    begin_and_publish(cache, [1, 2, 3, 4])
    lease = cache.begin([1, 2, 9])
    assert lease.cached == 1
    assert lease.miss == CacheMiss(position=1, reason="no_state")


def test_an_idle_slot_that_cannot_be_trimmed_is_cleared() -> None:
    cache = cache_of("kr", slots=1)
    run(cache, [1, 2, 3])
    assert run(cache, [1, 2, 9]) == 0
    assert cache.evictions == 1


# misses and evictions


def test_a_miss_contains_the_ids_of_the_best_slot() -> None:
    cache = cache_of()
    run(cache, list(range(20)))
    run(cache, [0, 5])
    assert cache.begin([0, 1, 2, 7, 7]).miss == CacheMiss(
        position=3, reason="diverged", cached_ids=(3, 4, 5, 6, 7, 8, 9, 10)
    )


def test_a_miss_of_a_continued_prompt_contains_no_ids() -> None:
    cache = cache_of()
    run(cache, [1, 2, 3])
    assert cache.begin([1, 2, 3, 4, 5]).miss == CacheMiss(position=3, reason="diverged")


def test_with_alignment_a_miss_reports_the_position_where_ids_differ() -> None:
    cache = cache_of(alignment=4)
    run(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    lease = cache.begin([1, 2, 3, 4, 5, 6, 9, 9, 9, 9])
    assert (lease.cached, lease.miss) == (
        4,
        CacheMiss(position=6, reason="diverged", cached_ids=(7, 8)),
    )


def test_a_busy_slot_lends_aligned_prefixes() -> None:
    cache = cache_of(alignment=4)
    begin_and_publish(cache, [1, 2, 3, 4, 5, 6])
    assert count_cached(cache, [1, 2, 3, 4, 5, 6, 7]) == 4
    assert count_cached(cache, [1, 2, 3, 7, 7]) == 0


def test_reuse_false_neither_serves_nor_copies_a_prefix() -> None:
    copies: list[Sequence[FakeLayer]] = []
    cache = cache_of(evaluate=copies.append)
    run(cache, [1, 2, 3])
    begin_and_publish(cache, [1, 2, 3, 4])
    lease = cache.begin([1, 2, 3, 4], reuse=False)
    assert (lease.cached, lease.miss, copies) == (0, CacheMiss(position=0, reason="unwanted"), [])


def test_replaced_content_is_an_eviction_and_a_trim_is_not() -> None:
    cache = cache_of(slots=1)
    run(cache, [1, 2, 3])
    run(cache, [1, 2, 4])
    assert cache.evictions == 0
    run(cache, [5])
    assert cache.evictions == 1
    cache.begin([5, 6]).discard()
    assert cache.evictions == 1


def test_evict_frees_the_oldest_slots_and_no_more_than_needed() -> None:
    cache = cache_of(slots=4)
    for ids in ([1, 1], [2, 2], [3, 3]):
        run(cache, ids)
    run(cache, [2, 2, 2])
    lease = begin_and_publish(cache, [1, 1, 1])  # so [3, 3] is the oldest idle one
    assert cache.evict(0) == 0
    assert cache.evict(2 * 8) == 2 * 8
    assert cache.evictions == 1
    assert count_cached(cache, [2, 2, 2, 2]) == 3
    assert cache.nbytes == 0
    run(cache, [4])
    assert cache.evict(ALL) == 8
    assert lease.kv[0].ids == (1, 1, 1), "leased caches stay"


@dataclass
class LimitedLayer(FakeLayer):
    """Cannot reserve more than four positions."""

    def reserve(self, length: int) -> None:
        if length > 4:
            raise MemoryError


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 5], [1, 2, 9, 9, 9], [7, 7, 7, 7, 7]])
def test_a_begin_that_runs_out_of_memory_leaves_its_slot_free(prompt: list[int]) -> None:
    """For a continued, a trimmed and a cleared slot."""
    cache = SlotPrefixCache(
        lambda: list[FakeLayer]([LimitedLayer()]), slots=1, context=9, multi_user=True
    )
    run(cache, [1, 2, 3, 4])
    with pytest.raises(MemoryError):
        cache.begin(prompt)
    cache.check()
    assert run(cache, [1, 2, 9]) == (0 if prompt[0] == 7 else 2)


def test_a_fork_that_runs_out_of_memory_changes_neither_slot() -> None:
    def full(kv: Sequence[FakeLayer]) -> None:
        raise MemoryError

    cache = cache_of(evaluate=full)
    lease = begin_and_publish(cache, [1, 2, 3])
    with pytest.raises(MemoryError):
        cache.begin([1, 2, 4])
    cache.check()
    assert count_cached(cache, [7]) == 0
    lease.commit([1, 2, 3], keep=3)
    assert run(cache, [1, 2, 3, 4]) == 3


@dataclass
class LimitedHistory(History):
    """Begins no lease while all slots are busy, as the scheduler does."""

    slots: int = 0

    def begin(self, a: int, b: int, c: int) -> None:
        if len(self.running) < self.slots:
            super().begin(a, b, c)


@pytest.mark.no_cover
@pytest.mark.parametrize("multi_user", [False, True])
@pytest.mark.parametrize("kinds", KINDS)
def test_few_slots_keep_the_contract_in_any_history(kinds: str, multi_user: bool) -> None:
    for seed in range(150):
        draw = random.Random(seed)
        names = draw.choices(NAMES, WEIGHTS, k=80)
        a, b, c = (draw.choices(range(10_000), k=80) for _ in range(3))
        slots, alignment = 1 + seed % 4, 1 + seed % 3
        cache = cache_of(kinds, slots=slots, multi_user=multi_user, alignment=alignment)
        try:
            LimitedHistory(cache, alignment, slots=slots).play(
                list(zip(names, a, b, c, strict=True))
            )
        except Exception as failure:
            failure.add_note(f"seed {seed}, {slots} slots, alignment {alignment}")
            raise


def test_an_ended_lease_rejects_calls() -> None:
    cache = cache_of()
    lease = begin_and_publish(cache, [1, 2])
    lease.commit([1, 2], keep=2)
    for call in (
        lambda: lease.publish([1, 2]),
        lambda: lease.shift([1, 2], num_keep=0, remove=lambda kv, start, end: True),
        lambda: lease.commit([1, 2], keep=2),
        lease.discard,
    ):
        with pytest.raises(AssertionError, match="the lease has ended"):
            call()
    assert run(cache, [1, 2, 3]) == 2
