"""The radix prefix cache: the contract of all policies, and its own rules."""

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.prefix.cache import Lease, common_prefix_length
from app.engine.prefix.radix import RadixPrefixCache
from tests.engine.prefix.contract import *  # noqa: F403  # the suite that every policy passes
from tests.engine.prefix.contract import (
    ALIGNMENTS,
    GARBAGE,
    History,
    MakeCache,
    begin,
    evaluate,
    feed,
    prefill,
    random_operations,
)
from tests.engine.prefix.layers import PER_POSITION, FakeLayer
from tests.engine.prefix.radix_content import assert_consistent, cache_of, idle_positions
from tests.line_count import count_lines


@pytest.fixture(scope="module")
def make_cache() -> MakeCache:
    return cache_of


@pytest.mark.no_cover
@pytest.mark.parametrize("kinds", ["k", "kwr", "r", "w"])
def test_in_any_history_every_node_is_backed_by_its_ids(kinds: str) -> None:
    for seed in range(1000, 1150):
        alignment = ALIGNMENTS[seed % len(ALIGNMENTS)]
        cache = cache_of(
            kinds, alignment, checkpoint_every=3, max_bytes=(None, 400, 4000)[seed % 4 % 3]
        )
        try:
            History(cache, alignment, lambda: assert_consistent(cache)).play(  # noqa: B023  # used at once
                random_operations(random.Random(seed))
            )
        except Exception as failure:
            failure.add_note(f"seed {seed}, alignment {alignment}")
            raise


Prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(0, 5)), max_size=20
)


@settings(max_examples=300)
@given(prompts=Prompts, alignment=st.sampled_from(ALIGNMENTS))
def test_without_evictions_every_evaluated_prefix_is_found(
    prompts: list[tuple[list[int], int]], alignment: int
) -> None:
    """Up to five sequences overlap; published prefixes of running ones count as well."""
    cache, known = cache_of(alignment=alignment), list[tuple[int, ...]]()
    running: list[tuple[Lease[FakeLayer], list[int]]] = []
    for ids, num_running in prompts:
        lease = begin(cache, ids, alignment=alignment)
        best = max((common_prefix_length(k, tuple(ids)) for k in known), default=0)
        assert lease.cached == min(best, len(ids) - 1) // alignment * alignment
        prefill(lease, ids)
        known.append(tuple(ids)[: len(ids) // alignment * alignment])
        running.append((lease, ids))
        while len(running) > num_running:
            ended, ended_ids = running.pop(num_running // 2)
            ended.commit(ended_ids, keep=len(ended_ids))
            cache.check()
            assert_consistent(cache)


def test_a_chat_that_continues_is_never_copied() -> None:
    cache = cache_of("kk")
    ids = [1, 2, 3]
    lease = begin(cache, ids)
    layer = lease.kv[0]
    for turn in range(5):
        prefill(lease, ids)
        lease.commit(ids, keep=len(ids))
        ids = [*ids, 10 + turn, 20 + turn]
        lease = begin(cache, ids)
        assert lease.cached == len(ids) - 2
        assert lease.kv[0] is layer
    assert cache.nbytes == 0


def test_a_repeated_prompt_continues_in_the_same_caches() -> None:
    cache = cache_of()
    evaluate(cache, [1, 2, 3, 4])
    lease = begin(cache, [1, 2, 3, 4])
    assert (lease.cached, cache.nbytes) == (3, 0)


def test_leased_caches_serve_other_sequences() -> None:
    cache = cache_of()
    evaluate(cache, [1, 2, 3, 4])
    one = begin(cache, [1, 2, 3, 4, 5])
    two = begin(cache, [1, 2, 3, 6])
    assert two.cached == 3
    prefill(one, [1, 2, 3, 4, 5])
    assert begin(cache, [1, 2, 3, 4, 5, 7]).cached == 5
    assert_consistent(cache)


def test_a_shared_prefix_of_idle_conversations_is_held_once() -> None:
    cache = cache_of()
    system = list(range(100))
    leases = [(begin(cache, [*system, n]), [*system, n, n]) for n in range(200, 204)]
    assert [lease.cached for lease, _ in leases] == [0] * 4, "nothing is published yet"
    for lease, ids in leases:
        feed(lease, ids)
        lease.publish(ids)
    for lease, ids in leases:
        lease.commit(ids, keep=len(ids))
        cache.check()
    assert_consistent(cache)
    assert idle_positions(cache) == 100 + 4 * 2


def test_a_running_conversation_holds_a_shared_prefix_once() -> None:
    """The prefix used to be copied, on the way to the first token."""
    cache = cache_of()
    evaluate(cache, [*range(100), 1, 1, 1])
    evaluate(cache, [*range(100), *range(200, 250)])
    assert idle_positions(cache) == 103 + 50
    lease = begin(cache, [*range(100), *range(200, 251)])
    assert lease.cached == 150
    assert idle_positions(cache) == 3, "the prefix is backed by the running caches"
    assert begin(cache, [*range(100), *range(200, 260)]).cached == 150
    lease.commit([*range(100), *range(200, 250)], keep=150)
    assert_consistent(cache)
    assert idle_positions(cache) == 103 + 50
    assert begin(cache, [*range(100), 1, 1, 1, 1]).cached == 103


@pytest.mark.parametrize("kinds", ["k", "kk", "kr"])
def test_the_first_reuse_of_a_prefix_copies_only_what_follows_it(kinds: str) -> None:
    """The answer to the same prompt, or the rest of another one, moves to a separate store."""
    cache = cache_of(kinds)
    prompt, answer = list(range(100)), list(range(500, 520))
    turn_ends = [len(prompt) - 1]
    lease = begin(cache, prompt, turn_ends=turn_ends)
    prefill(lease, prompt[:-1])
    lease.publish(prompt[:-1])
    feed(lease, [prompt[-1], *answer])
    lease.commit([*prompt, *answer], keep=120)
    buffers, before, taken = stored_layers(cache), cache.nbytes, cache.continued_bytes(prompt)
    again = begin(cache, prompt, turn_ends=turn_ends)
    assert again.cached == 99
    assert taken > before / 2
    assert cache.nbytes <= before - taken, "the rest is still in the cache"
    assert buffers & {id(layer) for layer in again.kv}, "the caches were copied"
    assert_consistent(cache)
    # the old answer remains, also while the prefix is in use
    assert begin(cache, [*prompt, *answer, 1]).cached == 120
    feed(again, [prompt[-1], *range(700, 705)])
    again.commit([*prompt, *range(700, 705)], keep=105)
    assert_consistent(cache)
    assert begin(cache, [*prompt, *answer, 1]).cached == 120
    assert begin(cache, [*prompt, *range(700, 705), 1]).cached == 105


def test_a_short_prefix_is_copied_rather_than_what_follows_it() -> None:
    cache = cache_of()
    evaluate(cache, list(range(100)))
    buffers = stored_layers(cache)
    lease = begin(cache, [*range(30), 7, 7])
    assert lease.cached == 30
    assert not buffers & {id(layer) for layer in lease.kv}
    assert idle_positions(cache) == 100


def stored_layers(cache: RadixPrefixCache[FakeLayer]) -> set[int]:
    nodes = cache._tree.root.subtree()[1:]
    return {id(layer) for node in nodes for layer in node.store.layers}


def test_a_mostly_unused_buffer_is_not_kept() -> None:
    cache = cache_of()
    lease = begin(cache, list(range(1000)))
    feed(lease, range(10))
    lease.commit(list(range(10)), keep=10)
    assert cache.nbytes == 10 * PER_POSITION


def test_after_a_mostly_unused_buffer_the_chat_continues_without_copies() -> None:
    cache = cache_of()
    lease = begin(cache, list(range(1000)))
    feed(lease, range(10))
    lease.commit(list(range(10)), keep=10)
    lease = begin(cache, list(range(12)))
    (layer,) = lease.kv
    prefill(lease, list(range(12)))
    lease.commit(list(range(12)), keep=12)
    assert begin(cache, list(range(14))).kv[0] is layer


def test_keep_removes_nothing_that_was_published() -> None:
    cache = cache_of("kw")
    lease = begin(cache, [1, 2, 3, 4])
    prefill(lease, [1, 2, 3, 4])
    lease.commit([1, 2, 3, 4], keep=2)
    assert evaluate(cache, [1, 2, 3, 4, 5]) == 4


def test_a_state_is_kept_until_its_positions_are_evaluated_again() -> None:
    """The last state cannot be trimmed by one id, so the previous one is used; then a cancel."""
    cache = cache_of("kr")
    evaluate(cache, [1, 2, 3, 4], turn_ends=[2])
    lease = begin(cache, [1, 2, 3, 4])
    assert lease.cached == 2
    lease.commit([1, 2], keep=2)
    assert evaluate(cache, [1, 2, 3, 4, 5]) == 4


def test_a_discard_leaves_the_positions_of_other_sequences() -> None:
    cache = cache_of()
    one = begin(cache, [1, 2, 3, 4])
    prefill(one, [1, 2, 3, 4])
    two = begin(cache, [1, 2, 3, 5])
    prefill(two, [1, 2, 3, 5])
    one.discard()
    cache.check()
    assert_consistent(cache)
    three = begin(cache, [1, 2, 3, 4])
    assert three.cached == 3
    two.discard()
    assert begin(cache, [1, 2, 3, 4]).cached == 0, (
        "the only sequence with this prefix was discarded"
    )


def test_a_discard_removes_the_dependent_nodes() -> None:
    cache = cache_of()
    evaluate(cache, [1, 2, 3, 4])
    evaluate(cache, [1, 2, 5, 6])
    lease = begin(cache, [1, 2, 3, 4, 7])
    lease.discard()
    cache.check()
    assert cache.nbytes == 0
    assert begin(cache, [1, 2, 5, 6]).cached == 0


def test_states_are_kept_at_the_first_and_the_last_two_turn_ends() -> None:
    cache = cache_of("kr")
    ids = list(range(20))
    lease = begin(cache, ids, turn_ends=[3, 5, 7, 9, 12, 15, 17])
    assert lease.checkpoint_positions == (3, 7, 9, 12, 15, 17)
    prefill(lease, ids)
    lease.commit(ids, keep=20)
    for position in (3, 7, 9, 12, 15, 17):
        assert evaluate(cache, [*range(position), 99]) == position
    assert_consistent(cache)


def test_a_state_is_kept_where_prompts_diverged() -> None:
    cache = cache_of("kr")
    evaluate(cache, [1, 2, 3, 4, 5])
    lease = begin(cache, [1, 2, 3, 6, 7])
    assert (lease.cached, lease.checkpoint_positions) == (0, (3,))
    prefill(lease, [1, 2, 3, 6, 7])
    lease.commit([1, 2, 3, 6, 7], keep=5)
    assert evaluate(cache, [1, 2, 3, 8]) == 3


def test_long_prompts_keep_a_state_at_regular_intervals() -> None:
    cache = cache_of("kr", checkpoint_every=10)
    lease = begin(cache, list(range(35)))
    assert lease.checkpoint_positions == (10, 20, 30)
    prefill(lease, list(range(35)))
    lease.discard()
    assert begin(cache_of("k", checkpoint_every=10), list(range(35))).checkpoint_positions == ()


def test_checkpoint_positions_are_aligned_and_include_the_last() -> None:
    cache = cache_of("kr", alignment=4)
    ids = list(range(19))
    lease = begin(cache, ids, alignment=4, turn_ends=[6, 11])
    assert lease.checkpoint_positions == (4, 8, 16)
    prefill(lease, ids)
    feed(lease, [GARBAGE])
    lease.commit(ids, keep=19)
    assert begin(cache, [*ids, 19, 20], alignment=4).cached == 16


def test_a_window_that_has_not_slid_is_trimmed_to_the_common_prefix() -> None:
    cache = cache_of("kw")  # a window of four
    evaluate(cache, [1, 2, 3, 4])
    assert evaluate(cache, [1, 2, 5]) == 2
    evaluate(cache, [6, 7, 8, 9, 10, 11])
    assert evaluate(cache, [6, 7, 8, 12]) == 0


IDS = 32_000


@pytest.mark.no_cover
def test_a_lookup_is_as_fast_as_a_comparison_of_the_prompt() -> None:
    """Ten conversations of 32,000 ids: it compares slices, and not one id after the other."""
    cache, shared = cache_of(), list(range(IDS // 2))
    prompts = [[*shared, *range(100_000 * n, 100_000 * n + IDS // 2)] for n in range(1, 11)]
    for prompt in prompts:
        evaluate(cache, prompt)
    for prompt in prompts:
        query = [*(int(str(n)) for n in prompt[:-2]), -1, -1]  # the same numbers, other objects
        _, matched = cache._tree.match(tuple(query))
        assert matched == IDS - 2
        assert count_lines(partial(cache._tree.match, tuple(query))) < 1000
