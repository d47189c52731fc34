"""Who runs, who gives way, and how many prompt tokens each gets, in the next step.

Knows: counts and bytes. Must not know: tensors, ids, requests. Pure: asks nothing, changes nothing.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """max_running: sequences that may be in memory at once. max_prefill_tokens: prompt tokens that
    a step may evaluate, which bounds how long a step takes, and so the gaps of running streams and
    the time until a cancellation is seen. align_chunks: prompts advance by `max_prefill_tokens`
    tokens or not at all, so that they are always cut at the same positions (see `--exact`)."""

    max_running: int = 1
    max_prefill_tokens: int = 512
    align_chunks: bool = False


def count_admissible(*, waiting: int, running: int, limits: SchedulerLimits) -> int:
    """How many of those who wait may start now, first come first."""
    return max(0, min(waiting, limits.max_running - running))


def fair_order(
    waiting: Sequence[str], running: Sequence[str], last_started: Mapping[str, int]
) -> list[int]:
    """In which order those who wait are taken. waiting, running: callers of sequences, in order of
    arrival. last_started: when one of a caller was taken last; any clock.

    The caller of whom fewest run is first; among equals the one that was taken longest ago, or
    never; each caller's own in their order. So nobody waits behind sixty sequences of another.
    """
    places = Counter(running)
    turn: list[tuple[int, float, int]] = []
    for i, caller in enumerate(waiting):
        turn.append((places[caller], last_started.get(caller, -math.inf), i))
        places[caller] += 1
    return [i for *_, i in sorted(turn)]


def should_defer(*, shared_prefix: int, num_computed: int, min_gain: int, length: int) -> bool:
    """Whether a prompt of `length` ids had better start later, since another one, of which
    `num_computed` ids are done, is on its way through `shared_prefix` ids that both begin with.
    min_gain: fewer are not worth it, unless they are all but the one that must be evaluated anyway
    (choices of one request)."""
    return shared_prefix - num_computed >= (1 if shared_prefix >= length - 1 else min_gain)


def split_prefill_budget(remaining: Sequence[int], limits: SchedulerLimits) -> list[int]:
    """Prompt tokens to evaluate for each prefilling sequence, oldest first.

    Half of the budget is the oldest prompt's, so that it always advances; the other half goes to
    the shortest, so that a short prompt is never behind a long one; what nobody else needs is the
    oldest's again. Each piece is a forward pass, and a small one takes almost as long as a large
    one: so no piece is smaller than a quarter of the budget unless it ends its prompt, and a prompt
    that would have less than that left gets it too, which may pass the budget by a quarter.
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
    """One chunk for the oldest and one for the shortest of the others."""
    chosen = {0, *_shortest_first(remaining)[:1]} if remaining else set[int]()
    return [min(wanted, chunk) if i in chosen else 0 for i, wanted in enumerate(remaining)]


def _shortest_first(remaining: Sequence[int]) -> list[int]:
    """All but the oldest; of equally short ones the older first."""
    return sorted(range(1, len(remaining)), key=lambda i: remaining[i])


def count_preemptions(*, reserved: Sequence[int], growth: Sequence[int], free: int) -> int:
    """How many of the youngest must give their bytes back, so that those who stay can grow.

    reserved, growth: bytes of each running sequence, and bytes that it is about to need more;
    oldest first. The oldest always stays: it makes progress, whatever happens to the others.
    """
    for count in range(len(reserved)):
        stay = len(reserved) - count
        if sum(growth[:stay]) <= free + sum(reserved[stay:]):
            return count
    return max(0, len(reserved) - 1)


def choose_growing(left: Sequence[int], *, ahead: int) -> set[int]:
    """Which sequences get more room now. left: positions that each still has room for.

    Growing copies a sequence's caches, and sequences that came together grow together: then all
    streams wait for all copies. So in each step one that will need it soon grows ahead of time.
    """
    must = {i for i, positions in enumerate(left) if positions <= 0}
    if must or not left:
        return must
    first = min(range(len(left)), key=lambda i: left[i])
    return {first} if left[first] < ahead else set()
