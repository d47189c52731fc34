"""Scheduling policy for the next step: which sequences start, which are preempted, and how many
prompt tokens each evaluates.

Knows: counts and bytes. Must not know: tensors, ids, requests. Pure functions: no side effects.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """max_running: sequences that may be in memory at once. max_prefill_tokens: prompt tokens that
    a step may evaluate; this bounds the duration of a step, and with it the gaps in running streams
    and the delay of a cancellation. align_chunks: prompts advance by exactly `max_prefill_tokens`
    tokens, so that they are always split at the same positions (see `--exact`)."""

    max_running: int = 1
    max_prefill_tokens: int = 512
    align_chunks: bool = False


def count_admissible(*, waiting: int, running: int, limits: SchedulerLimits) -> int:
    """How many waiting sequences may start now."""
    return max(0, min(waiting, limits.max_running - running))


def fair_order(
    waiting: Sequence[str], running: Sequence[str], last_started: Mapping[str, int]
) -> list[int]:
    """The order in which waiting sequences start, as indices into `waiting`.

    waiting, running: the callers of sequences, in order of arrival. last_started: when a sequence
    of each caller last started, on any clock.

    The caller with the fewest running sequences comes first; among equals the one whose last start
    is longest ago, or who never started one. Sequences of one caller keep their order. So no caller
    waits behind sixty sequences of another.
    """
    places = Counter(running)
    turn: list[tuple[int, float, int]] = []
    for i, caller in enumerate(waiting):
        turn.append((places[caller], last_started.get(caller, -math.inf), i))
        places[caller] += 1
    return [i for *_, i in sorted(turn)]


def should_defer(*, shared_prefix: int, num_computed: int, min_gain: int, length: int) -> bool:
    """Whether a prompt of `length` ids should start later, because a running prompt evaluates a
    prefix that both share.

    shared_prefix: ids that both prompts begin with. num_computed: ids that the other prompt has
    evaluated. min_gain: least number of ids that is worth the wait; 1 if the shared prefix is all
    but the last id, as for the choices of one request.
    """
    return shared_prefix - num_computed >= (1 if shared_prefix >= length - 1 else min_gain)


def split_prefill_budget(remaining: Sequence[int], limits: SchedulerLimits) -> list[int]:
    """Prompt tokens to evaluate for each prefilling sequence, oldest first.

    Half of the budget goes to the oldest prompt, so that it always advances. The other half goes to
    the shortest prompts, so that a short prompt is never delayed by a long one; the rest goes to
    the oldest again. Each piece is a forward pass, and a small pass takes almost as long as a large
    one. So no piece is smaller than a quarter of the budget, unless it completes its prompt. Small
    remainders of prompts, up to an eighth of the budget in total, are evaluated beyond the budget.
    """
    if limits.align_chunks:
        return _split_aligned(remaining, limits.max_prefill_tokens)
    shares = [0] * len(remaining)
    if not remaining:
        return shares
    left, least, spare = (
        limits.max_prefill_tokens,
        -(-limits.max_prefill_tokens // 4),
        limits.max_prefill_tokens // 8,
    )
    half = min(remaining[0], -(-left // 2))
    for i in (*_shortest_first(remaining), 0):
        budget = left if i == 0 else left - half
        share = min(remaining[i], budget)
        if remaining[i] - share <= spare and share:
            spare -= remaining[i] - share
            share = remaining[i]
        elif share < least:
            continue
        shares[i] = share
        left = max(0, left - share) if i == 0 else max(half, left - share)
    return shares


def _split_aligned(remaining: Sequence[int], chunk: int) -> list[int]:
    """One chunk for the oldest, and one for the shortest of the others."""
    chosen = {0, *_shortest_first(remaining)[:1]} if remaining else set[int]()
    return [min(wanted, chunk) if i in chosen else 0 for i, wanted in enumerate(remaining)]


def _shortest_first(remaining: Sequence[int]) -> list[int]:
    """Indices of all but the oldest, shortest first; among equals the older first."""
    return sorted(range(1, len(remaining)), key=lambda i: remaining[i])


def count_preemptions(*, reserved: Sequence[int], growth: Sequence[int], free: int) -> int:
    """How many of the youngest sequences must free their memory so that the others can grow.

    reserved, growth: bytes of each running sequence, and the additional bytes that it needs; oldest
    first. free: bytes that are free. The oldest is never preempted, so there is always progress.
    """
    for count in range(len(reserved)):
        stay = len(reserved) - count
        if sum(growth[:stay]) <= free + sum(reserved[stay:]):
            return count
    return max(0, len(reserved) - 1)


def choose_growing(left: Sequence[int], *, ahead: int) -> set[int]:
    """Indices of the sequences that grow now.

    left: free positions of each. ahead: a sequence with fewer free positions may grow before it has
    to.

    Growing copies a sequence's caches, and sequences that started together fill up together: then
    all streams would wait for all copies in one step. So each step grows at most one sequence ahead
    of time.
    """
    must = {i for i, positions in enumerate(left) if positions <= 0}
    if must or not left:
        return must
    first = min(range(len(left)), key=lambda i: left[i])
    return {first} if left[first] < ahead else set()
