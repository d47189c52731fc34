"""The radix prefix cache when memory is short: evictions and failing copies."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from app.engine.prefix import radix_tree
from app.engine.prefix.cache import Lease
from tests.engine.prefix.contract import (
    ALL,
    assert_holds,
    begin,
    evaluate,
    prefill,
)
from tests.engine.prefix.harness import fail_after, feed
from tests.engine.prefix.layers import PER_POSITION, PER_STATE, FakeLayer
from tests.engine.prefix.radix_content import Cache, assert_consistent, cache_of, idle_positions
from tests.line_count import count_lines


def test_leaves_are_evicted_first_in_lru_order() -> None:
    cache = cache_of()
    for last in (10, 11, 12):
        evaluate(cache, [*range(5), last, last, last])
    evaluate(cache, [*range(5), 10, 10, 10])
    cache.evict(1)
    cached = [begin(cache, [*range(5), n, n, n, n]).cached for n in (10, 11, 12)]
    assert cached == [8, 5, 8]


def test_many_small_prompts_do_not_evict_the_long_prompt_of_their_session() -> None:
    """An agent's session runs titles and sub-agents while its own next turn waits."""
    cache = cache_of(max_bytes=24_000 * PER_POSITION)
    session = list(range(20_000))
    evaluate(cache, session)
    for small in range(1, 60):
        evaluate(cache, [-small] * 200)
    assert evaluate(cache, [*session, 1]) == len(session)


def test_a_long_prompt_that_is_not_used_again_is_evicted_eventually() -> None:
    cache = cache_of(max_bytes=24_000 * PER_POSITION)
    evaluate(cache, list(range(20_000)))
    for small in range(1, 500):
        evaluate(cache, [-small] * 200)
    assert begin(cache, list(range(20_001))).cached == 0
    assert cache.evictions > 0


def test_a_matched_prefix_counts_as_used_at_once() -> None:
    cache = cache_of()
    evaluate(cache, [1, 2, 3, 4])
    evaluate(cache, [5, 6, 7, 8])
    lease = begin(cache, [1, 2, 3, 9])
    cache.evict(1)
    lease.commit([1, 2, 3], keep=3)
    assert begin(cache, [1, 2, 3, 4, 5]).cached == 4
    assert begin(cache, [5, 6, 7, 8, 9]).cached == 0


def test_inner_states_are_evicted_before_their_leaf() -> None:
    cache = cache_of("kr")
    ids = list(range(20))
    for length, turn_ends in ((10, [4]), (20, [4, 15])):
        lease = begin(cache, ids[:length], turn_ends=turn_ends)
        prefill(lease, ids[:length])
        lease.commit(ids[:length], keep=length)
    before = cache.nbytes
    for nth, left in enumerate((10, 15), 1):
        assert cache.evict(1) == PER_STATE
        assert cache.evictions == nth
        cache.check()
        assert min(n.end for n in cache._tree.root.subtree()[1:] if n.checkpoint) == left
    assert cache.evict(before) == before - 2 * PER_STATE


def test_bytes_of_a_leaf_are_free_when_its_store_has_to_stay() -> None:
    cache = cache_of()
    evaluate(cache, [1, 2, 3, 4, 5, 6])
    evaluate(cache, [1, 2, 3, 7])
    before = cache.nbytes
    assert cache.evict(1) == before - cache.nbytes > 0
    assert idle_positions(cache) == 4
    assert_consistent(cache)


def test_evicting_a_prefix_of_a_running_sequence_loses_nothing() -> None:
    cache = cache_of()
    first = begin(cache, [*range(50), 1])
    prefill(first, [*range(50), 1])
    first.publish([*range(50), 1])
    lease = begin(cache, [*range(50), 3, 3])
    prefill(lease, [*range(50), 3, 3])
    first.commit([*range(50), 1], keep=51)
    evictions = cache.evictions
    assert cache.evict(50 * PER_POSITION) >= 50 * PER_POSITION
    assert cache.evictions == evictions
    assert_consistent(cache)
    assert begin(cache, [*range(50), 1, 1]).cached == 51


def test_leased_caches_are_not_evicted() -> None:
    cache = cache_of("kr")
    evaluate(cache, [1, 2, 3])
    lease = begin(cache, [1, 2, 3, 4, 5, 6], turn_ends=[4])
    prefill(lease, [1, 2, 3, 4, 5, 6])
    cache.evict(ALL)
    cache.check()
    assert cache.nbytes == 0
    assert_holds(lease, [1, 2, 3, 4, 5, 6])
    lease.commit([1, 2, 3, 4, 5, 6], keep=6)
    assert evaluate(cache, [1, 2, 3, 4, 5, 6, 7]) == 6


def test_max_bytes_holds_after_every_commit() -> None:
    cache = cache_of(max_bytes=20 * PER_POSITION)
    for first in range(10):
        evaluate(cache, [first, *range(100, 108)])
        assert cache.nbytes <= 20 * PER_POSITION
    assert cache.evictions > 0
    assert evaluate(cache, [9, *range(100, 109)]) == 9


class Memory:
    """Evaluates copies until memory runs out."""

    def __init__(self) -> None:
        self.left = 1000

    def evaluate(self, copies: Sequence[FakeLayer]) -> None:
        self.left -= 1
        if self.left < 0:
            raise MemoryError


def test_a_store_shrinks_without_waiting_unless_it_is_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its layers used to be copied one by one, and each one waited for the device."""
    for limit, groups in ((1 << 30, 0), (2 * PER_POSITION, 2)):
        monkeypatch.setattr(radix_tree, "MAX_COPY_BYTES", limit)
        waits, dispatches = list[int](), list[int]()
        cache = cache_of(
            "kkkkkk",
            evaluate=lambda layers, waits=waits: waits.append(len(layers)),
            dispatch=lambda layers, all_=dispatches: all_.append(len(layers)),
        )
        ids = list(range(50))
        lease = begin(cache, ids)
        prefill(lease, ids)
        lease.publish(ids)
        other = begin(cache, [*ids, 1])
        prefill(other, [*ids, 1])
        waits.clear()
        other.commit([*ids, 1], keep=51)  # its copy of the prefix is not needed
        assert (len(waits), len(dispatches)) == (groups, 1)
        assert sum(waits) + sum(dispatches) == 6
        assert_consistent(cache)


@pytest.mark.parametrize("num_copies", range(4))
def test_the_tree_stays_consistent_when_any_copy_fails(num_copies: int) -> None:
    """After a failed allocation, running sequences continue and no memory is leaked."""
    memory = Memory()
    cache = cache_of("kkr", evaluate=memory.evaluate, dispatch=memory.evaluate)
    evaluate(cache, [1, 2, 3, 4, 5, 6], turn_ends=[2, 4])
    evaluate(cache, [1, 2, 3, 4, 7], turn_ends=[2, 4])
    lease = begin(cache, [1, 2, 3, 4, 8, 9])
    memory.left = num_copies
    steps = (
        lambda: cache.begin([1, 2, 3, 4, 7, 8]),
        lambda: cache.begin([1, 2, 3, 4, 5, 6, 7]),
        lambda: prefill(lease, [1, 2, 3, 4, 8, 9]),
        lambda: lease.commit([1, 2, 3, 4, 8, 9], keep=6),
        lambda: cache.evict(1),
        lambda: cache.begin([1, 2, 3, 4, 8, 9, 10]),
    )
    done: list[Lease[FakeLayer] | int | None] = [lease]
    with pytest.raises(MemoryError):
        done.extend(step() for step in steps)
    cache.check()
    assert_consistent(cache)
    assert len(cache._tree.live) == len([d for d in done if d and not isinstance(d, int) and d.kv])


@dataclass(frozen=True, kw_only=True)
class Ending:
    """An operation that ends a lease, or fails to begin one. prepare: returns the operation."""

    kinds: str
    prepare: Callable[[Cache], Callable[[], object]]


def _end_in_a_branch(cache: Cache) -> Callable[[], object]:
    """The tree has the prefix already, so only the rest of the store is kept."""
    evaluate(cache, [1, 2, 3, 4, 5, 6], turn_ends=[2, 4])
    lease = begin(cache, [1, 2, 3, 4, 8, 9])
    feed(lease, [1, 2, 3, 4, 8, 9][lease.cached :])
    return lambda: lease.commit([1, 2, 3, 4, 8, 9], keep=5)


def _end_of_a_leaf(cache: Cache) -> Callable[[], object]:
    lease = begin(cache, [1, 2, 3, 4, 5, 6])
    feed(lease, [1, 2, 3, 4, 5, 6])
    return lambda: lease.commit([1, 2, 3, 4, 5, 6], keep=5)


def _discard_below_an_idle_store(cache: Cache) -> Callable[[], object]:
    """Only the part of the idle store up to the checkpoint remains useful."""
    evaluate(cache, [1, 2, 3, 4, 5, 6, 7, 8], turn_ends=[2])
    lease = begin(cache, [1, 2, 3, 4, 9, 9])
    feed(lease, [1, 2, 3, 4, 9, 9][lease.cached :])
    lease.publish([1, 2, 3, 4, 9, 9])
    assert cache._tree._evict_leaves(1) == 1
    cache._tree.free_unused()
    return lease.discard


def _begin_in_a_shared_store(cache: Cache) -> Callable[[], object]:
    """The new lease takes over a leaf, so another store shrinks."""
    for ids in ([2, 1, 2], [2, 2, 2], [2, 2, 1, 2]):
        evaluate(cache, ids)
    return lambda: cache.begin([2, 2, 2])


ENDINGS = {
    "branch": Ending(kinds="kkr", prepare=_end_in_a_branch),
    "leaf": Ending(kinds="kkw", prepare=_end_of_a_leaf),
    "discard": Ending(kinds="kr", prepare=_discard_below_an_idle_store),
    "begin": Ending(kinds="k", prepare=_begin_in_a_shared_store),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_lease_leaves_nothing_in_the_tree_when_any_call_fails(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A failed copy or trim used to leave the store in the tree as that of a running sequence, so
    it was never evicted."""
    failures = 0
    for method in ("evaluate", "slice", "trim"):
        for num_calls in itertools.count():
            memory = Memory()
            ending = ENDINGS[name]
            cache = cache_of(ending.kinds, evaluate=memory.evaluate, dispatch=memory.evaluate)
            operation = ending.prepare(cache)
            with monkeypatch.context() as patch:
                if method == "evaluate":
                    memory.left = num_calls
                else:
                    fail_after(patch, method, num_calls)
                try:
                    operation()
                except MemoryError:
                    failures += 1
                else:
                    break
            cache.check()
            assert_consistent(cache)
            assert not cache._tree.live
            memory.left = 1000
            assert evaluate(cache, [2, 2, 2, 2]) <= 3
            assert evaluate(cache, [1, 2, 3, 4, 5, 6, 7]) <= 6
            assert evaluate(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == 7
            cache.clear()
            assert cache.nbytes == 0
    assert failures > 0


def test_every_copy_is_evaluated_before_a_write_to_the_original() -> None:
    evaluated: list[FakeLayer] = []
    cache = cache_of("kwr", evaluate=evaluated.extend)
    lease = begin(cache, [1, 2, 3, 4, 5, 6], turn_ends=[3])
    prefill(lease, [1, 2, 3, 4, 5, 6])
    kept = [layer for n in cache._tree.root.subtree() for layer in n.checkpoint or ()]
    assert len(kept) == 2
    assert {id(layer) for layer in kept} <= {id(layer) for layer in evaluated}
    one = begin(cache, [1, 2, 3, 7])
    assert {id(layer) for layer in one.kv} <= {id(layer) for layer in evaluated}


@pytest.mark.no_cover
def test_an_eviction_does_not_scan_the_whole_tree() -> None:
    """Four times the leaves may take little more than four times as much work."""

    def count_work(leaves: int) -> int:
        cache = cache_of()
        for n in range(leaves):
            evaluate_unchecked(cache, [1, 2, 3, 10 + n, 4])

        def evict_all() -> None:
            while cache.evict(1):
                pass

        return count_lines(evict_all)

    assert count_work(1000) < 4 * 1.5 * count_work(250)


def evaluate_unchecked(cache: Cache, ids: Sequence[int]) -> None:
    lease = cache.begin(ids)
    prefill(lease, ids)
    lease.commit(ids, keep=len(ids))
