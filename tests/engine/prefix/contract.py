"""The contract of all prefix cache policies. A test module binds `make_cache`, of module scope (the
property tests use it many times), and imports these tests. Up to PARALLEL leases run at once.

The layers hold the ids themselves. The content is compared at every lease, which detects a wrong
trim and a write into the caches of another lease.
"""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.jobs import PrefixSnapshot
from tests.engine.prefix.harness import (
    GARBAGE,
    MakeCache,
    assert_holds,
    begin,
    evaluate,
    fail_after,
    feed,
    prefill,
)
from tests.engine.prefix.histories import ALL, NAMES, History, Operation, random_operations
from tests.engine.prefix.histories import WEIGHTS as WEIGHTS  # for histories of a policy

KINDS = ("k", "kk", "kw", "kr", "kwr")
ALIGNMENTS = (1, 2, 4)

every_kind = pytest.mark.parametrize("kinds", KINDS)
every_alignment = pytest.mark.parametrize("alignment", ALIGNMENTS)


@every_alignment
@every_kind
def test_a_committed_prefix_is_reused_by_a_longer_prompt(
    make_cache: MakeCache, kinds: str, alignment: int
) -> None:
    cache = make_cache(kinds, alignment)
    assert evaluate(cache, [1, 2, 3, 4, 5, 6, 7, 8], alignment=alignment) == 0
    assert evaluate(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9], alignment=alignment) == 8


@pytest.mark.parametrize("kinds", ["k", "kk"])
@every_alignment
def test_the_longest_common_prefix_is_shared(
    make_cache: MakeCache, kinds: str, alignment: int
) -> None:
    cache = make_cache(kinds, alignment)
    evaluate(cache, [1, 2, 3, 4, 5, 6, 7, 8], alignment=alignment)
    assert (
        evaluate(cache, [1, 2, 3, 4, 5, 6, 0, 0], alignment=alignment) == 6 // alignment * alignment
    )


@pytest.mark.parametrize("kinds", ["k", "kk"])
def test_at_least_one_id_is_left_to_evaluate(make_cache: MakeCache, kinds: str) -> None:
    cache = make_cache(kinds, 1)
    evaluate(cache, [1, 2, 3])
    assert evaluate(cache, [1, 2, 3]) == 2
    assert evaluate(cache, [1, 2]) == 1
    assert evaluate(cache, [1]) == 0


@every_kind
def test_ids_evaluated_before_a_cancel_stay_cached(make_cache: MakeCache, kinds: str) -> None:
    cache = make_cache(kinds, 1)
    evaluate(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9], upto=6)
    assert evaluate(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 6


@every_kind
def test_a_lease_that_evaluates_nothing_removes_nothing(make_cache: MakeCache, kinds: str) -> None:
    cache = make_cache(kinds, 1)
    evaluate(cache, [1, 2, 3])
    lease = begin(cache, [1, 2, 3, 4])
    lease.commit([1, 2, 3], keep=3)
    assert evaluate(cache, [1, 2, 3, 4]) == 3


def test_keep_trims_layers_that_can_be_trimmed(make_cache: MakeCache) -> None:
    for kinds, cached in (("k", 2), ("kk", 2), ("kr", 8), ("kw", 8)):
        cache = make_cache(kinds, 1)
        lease = begin(cache, [1, 2, 3, 4, 5, 6, 7, 8])
        feed(lease, [1, 2, 3, 4, 5, 6, 7, 8])
        lease.commit([1, 2, 3, 4, 5, 6, 7, 8], keep=2)
        assert evaluate(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == cached


def test_only_ids_evaluated_by_every_layer_are_cached(make_cache: MakeCache) -> None:
    """A step that fails midway leaves layers of different lengths."""
    cache = make_cache("kk", 1)
    lease = begin(cache, [1, 2, 3, 4])
    lease.kv[0].feed([1, 2, 3])
    lease.kv[1].feed([1, 2])
    lease.commit([1, 2, 3, 4], keep=4)
    cache.check()
    assert evaluate(cache, [1, 2, 3, 4]) == 2


def test_an_id_evaluated_after_the_known_ones_is_not_cached(make_cache: MakeCache) -> None:
    """The engine evaluates one token before it knows its value."""
    cache = make_cache("kk", 1)
    lease = begin(cache, [1, 2, 3])
    feed(lease, [1, 2, 3, GARBAGE])
    lease.commit([1, 2, 3], keep=3)
    assert evaluate(cache, [1, 2, 3, GARBAGE, 5]) == 3


@every_kind
def test_discarded_caches_are_not_reused_and_a_lease_ends_once(
    make_cache: MakeCache, kinds: str
) -> None:
    cache = make_cache(kinds, 1)
    lease = begin(cache, [1, 2, 3])
    feed(lease, [1, 2, 3])
    lease.discard()
    cache.check()
    assert len(lease.kv) == 0
    with pytest.raises(AssertionError):
        lease.commit([1, 2, 3], keep=3)
    assert evaluate(cache, [1, 2, 3]) == 0
    assert cache.nbytes > 0


@pytest.mark.parametrize("num_trims", [0, 1])
def test_a_lease_ends_even_if_its_caches_cannot_be_stored(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, num_trims: int
) -> None:
    """The slots and the radix tree used to count such a lease as running for good."""
    cache = make_cache("kk", 1)
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    for _ in range(5):  # more often than there are slots
        lease = begin(cache, ids)
        feed(lease, ids)
        with monkeypatch.context() as patch:
            fail_after(patch, "trim", num_trims)
            with pytest.raises(MemoryError):
                lease.commit(ids, keep=6)
        cache.check()
        assert len(lease.kv) == 0
        with pytest.raises(AssertionError):
            lease.commit(ids, keep=6)
        assert cache.nbytes == 0
    evaluate(cache, ids)
    assert evaluate(cache, [*ids, 9]) == 8


@every_kind
def test_a_discard_after_a_hit_leaves_no_wrong_content(make_cache: MakeCache, kinds: str) -> None:
    cache = make_cache(kinds, 1)
    evaluate(cache, [1, 2, 3])
    lease = begin(cache, [1, 2, 3, 4, 5])
    feed(lease, [GARBAGE])
    lease.discard()
    evaluate(cache, [1, 2, 3, 4, 5])
    assert evaluate(cache, [1, 2, 3, 4, 5, 6]) == 5


@every_kind
def test_reuse_false_skips_the_lookup_and_still_caches(make_cache: MakeCache, kinds: str) -> None:
    cache = make_cache(kinds, 1)
    evaluate(cache, [1, 2, 3])
    lease = begin(cache, [1, 2, 3, 4], reuse=False)
    assert lease.cached == 0
    assert lease.miss is not None
    assert lease.miss.reason == "unwanted"
    prefill(lease, [1, 2, 3, 4])
    lease.commit([1, 2, 3, 4], keep=4)
    assert evaluate(cache, [1, 2, 3, 4, 5]) == 4


@pytest.mark.parametrize("kinds", ["k", "kk"])
def test_a_miss_has_a_position_and_a_reason(make_cache: MakeCache, kinds: str) -> None:
    cache = make_cache(kinds, 1)
    lease = begin(cache, [1, 2, 3])
    assert lease.miss is not None
    assert (lease.miss.position, lease.miss.reason, lease.miss.cached_ids) == (0, "empty", ())
    prefill(lease, [1, 2, 3])
    lease.commit([1, 2, 3], keep=3)
    evaluate(cache, [1, 2, 3, 4, 5, 6])
    lease = begin(cache, [1, 2, 3, 7, 8])
    assert lease.miss is not None
    assert (lease.miss.position, lease.miss.reason, lease.miss.cached_ids) == (
        3,
        "diverged",
        (4, 5, 6),
    )
    lease.commit([1, 2, 3], keep=3)


def test_a_miss_without_a_state_has_its_own_reason(make_cache: MakeCache) -> None:
    cache = make_cache("kr", 1)
    evaluate(cache, [1, 2, 3, 4, 5, 6])
    lease = begin(cache, [1, 2, 3, 7, 8])
    assert lease.cached == 0
    assert lease.miss is not None
    assert (lease.miss.position, lease.miss.reason) == (0, "no_state")
    lease.discard()


@every_kind
def test_capacity_for_the_prompt_is_reserved_before_it_is_evaluated(
    make_cache: MakeCache, kinds: str
) -> None:
    cache = make_cache(kinds, 1)
    for ids in ([1, 2, 3], [1, 2, 3, *range(20)], [1, 2, 3, *range(30)]):
        lease = begin(cache, ids)
        assert all(layer.reserved >= len(ids) for layer in lease.kv if layer.sliceable)
        prefill(lease, ids)
        lease.commit(ids, keep=len(ids))


@every_kind
def test_continued_bytes_are_taken_out_of_the_cache_by_the_next_lease(
    make_cache: MakeCache, kinds: str
) -> None:
    cache = make_cache(kinds, 1)
    assert cache.continued_bytes([1, 2, 3]) == 0
    turns = [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8]]
    evaluate(cache, turns[0])
    for turn in turns[1:]:
        before, taken = cache.nbytes, cache.continued_bytes(turn)
        assert 0 < taken <= before
        lease = begin(cache, turn)
        assert cache.nbytes <= before - taken
        prefill(lease, turn)
        lease.commit(turn, keep=len(turn))
        cache.check()


@every_kind
def test_leased_bytes_do_not_count_and_evicted_bytes_are_free(
    make_cache: MakeCache, kinds: str
) -> None:
    cache = make_cache(kinds, 1)
    assert cache.nbytes == 0
    lease = begin(cache, [1, 2, 3])
    prefill(lease, [1, 2, 3])
    assert cache.nbytes == 0
    lease.commit([1, 2, 3], keep=3)
    before = cache.nbytes
    assert before >= 3 * 8
    assert cache.evictions == 0
    assert cache.evict(1) == before - cache.nbytes > 0
    assert cache.evictions > 0
    cache.check()
    before = cache.nbytes
    assert cache.evict(ALL) == before
    assert (cache.nbytes, cache.evict(ALL)) == (0, 0)
    assert evaluate(cache, [1, 2, 3, 4]) == 0


@every_kind
def test_clear_removes_everything_and_is_not_an_eviction(make_cache: MakeCache, kinds: str) -> None:
    cache = make_cache(kinds, 1)
    evaluate(cache, [1, 2, 3])
    cache.clear()
    cache.check()
    assert (cache.nbytes, cache.evictions) == (0, 0)
    assert evaluate(cache, [1, 2, 3]) == 0


@every_kind
def test_leases_with_a_common_prefix_never_write_into_each_other(
    make_cache: MakeCache, kinds: str
) -> None:
    cache = make_cache(kinds, 1)
    evaluate(cache, [1, 2, 3, 4])
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5, 7]]
    leases = [begin(cache, prompt) for prompt in prompts]
    layer_ids = [id(layer) for lease in leases for layer in lease.kv]
    assert len(set(layer_ids)) == len(layer_ids)
    for lease, prompt in zip(leases, prompts, strict=True):
        prefill(lease, prompt)
    for lease, prompt in zip(leases, prompts, strict=True):
        assert_holds(lease, prompt)
        lease.commit(prompt, keep=len(prompt))
        cache.check()
    assert evaluate(cache, [*prompts[-1], 8]) >= 5


numbers = st.integers(0, 10_000)
operations = st.lists(st.tuples(st.sampled_from(NAMES), numbers, numbers, numbers), max_size=40)


@every_kind
@settings(max_examples=40)
@given(operations=operations, alignment=st.sampled_from(ALIGNMENTS))
def test_any_history_keeps_the_contract(
    make_cache: MakeCache, kinds: str, operations: list[Operation], alignment: int
) -> None:
    History(make_cache(kinds, alignment), alignment).play(operations)


@pytest.mark.no_cover
@pytest.mark.exhaustive
@every_kind
def test_many_long_histories_keep_the_contract(make_cache: MakeCache, kinds: str) -> None:
    """Longer histories than hypothesis draws, and more: 400 for each kind of layers."""
    for seed in range(400):
        history = random_operations(random.Random(seed))
        alignment = ALIGNMENTS[seed % len(ALIGNMENTS)]
        try:
            History(make_cache(kinds, alignment), alignment).play(history)
        except Exception as failure:
            failure.add_note(f"seed {seed}, alignment {alignment}")
            raise


@every_kind
def test_a_snapshot_shows_lengths_and_no_ids(make_cache: MakeCache, kinds: str) -> None:
    cache = make_cache(kinds, 1)
    assert cache.snapshot(200) == PrefixSnapshot()
    evaluate(cache, [1, 2, 3, 4, 5])
    snapshot = cache.snapshot(200)
    cache.check()
    assert sum(node.tokens for node in snapshot.nodes) == 5
    assert all(node.running == 0 for node in snapshot.nodes)
    assert all(abs(node.last_used - time.time()) < 60 for node in snapshot.nodes)
    assert len(snapshot.nodes) == snapshot.total_nodes
    assert len(cache.snapshot(0).nodes) == 0
