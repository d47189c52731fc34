"""The scheduling policy: which sequences start, which sequences are preempted, and how many prompt
tokens are prefilled per sequence in the next step.

Knows: counts and bytes. Must not know: tensors, token IDs, requests. All functions are pure.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The limits of the scheduler.

    max_running: the maximum number of running sequences.
    max_prefill_tokens: the maximum number of prompt tokens per step. It bounds the duration of a
        step, and therefore the inter-token latency of running sequences and the latency of a
        cancellation.
    align_chunks: whether every prompt chunk has exactly `max_prefill_tokens` tokens, so that
        prompts are always split at the same positions (see `--exact`). The last chunk of a prompt
        may be shorter.
    """

    max_running: int = 1
    max_prefill_tokens: int = 512
    align_chunks: bool = False


def count_admissible(*, waiting: int, running: int, limits: SchedulerLimits) -> int:
    """Returns the number of waiting sequences that may start now."""
    return max(0, min(waiting, limits.max_running - running))


def fair_order(
    waiting: Sequence[str], running: Sequence[str], last_started: Mapping[str, int]
) -> list[int]:
    """Returns the order in which waiting sequences start, as indices into `waiting`.

    waiting, running: the callers of the sequences, in order of arrival.
    last_started: the time of each caller's last start, in any unit.

    The caller with the fewest running sequences comes first. Ties are broken by the least recent
    start; a caller that has never started a sequence comes first. Sequences of one caller keep
    their order. A caller therefore never waits behind sixty sequences of another caller.
    """
    places = Counter(running)
    turn: list[tuple[int, float, int]] = []
    for i, caller in enumerate(waiting):
        turn.append((places[caller], last_started.get(caller, -math.inf), i))
        places[caller] += 1
    return [i for *_, i in sorted(turn)]


def should_defer(*, shared_prefix: int, num_computed: int, min_gain: int, length: int) -> bool:
    """Returns whether to defer the start of a prompt with `length` tokens, because a running
    sequence is prefilling a prefix that both prompts share.

    shared_prefix: the length of the shared prefix in tokens.
    num_computed: the number of tokens that the running sequence has prefilled.
    min_gain: the minimum number of saved tokens that justifies deferring. It is 1 if the shared
        prefix contains all tokens except the last one, as for the choices of one request.
    """
    return shared_prefix - num_computed >= (1 if shared_prefix >= length - 1 else min_gain)


def split_prefill_budget(remaining: Sequence[int], limits: SchedulerLimits) -> list[int]:
    """Returns the number of prompt tokens to prefill for each sequence, oldest first.

    Half of the budget is reserved for the oldest prompt, so that it always advances. The other half
    goes to the shortest prompts, so that a long prompt never delays a short one. The oldest prompt
    also gets the rest of the budget.

    Each chunk is a forward pass, and a small pass takes almost as long as a large one. Each chunk
    therefore has at least a quarter of the budget, unless it completes its prompt. To complete
    prompts, the budget may be exceeded by up to an eighth in total.
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
    """Assigns one chunk to the oldest prompt, and one chunk to the shortest other prompt."""
    chosen = {0, *_shortest_first(remaining)[:1]} if remaining else set[int]()
    return [min(count, chunk) if i in chosen else 0 for i, count in enumerate(remaining)]


def _shortest_first(remaining: Sequence[int]) -> list[int]:
    """Returns the indices of all prompts except the oldest, shortest first. Among prompts of equal
    length, the older one comes first."""
    return sorted(range(1, len(remaining)), key=lambda i: remaining[i])


def count_preemptions(*, reserved: Sequence[int], growth: Sequence[int], free: int) -> int:
    """Returns how many of the youngest sequences to preempt, so that the remaining sequences can
    grow.

    reserved: the reserved bytes of each running sequence, oldest first.
    growth: the additional bytes that each running sequence needs.
    free: the number of free bytes.

    The oldest sequence is never preempted, so the engine always makes progress.
    """
    for count in range(len(reserved)):
        stay = len(reserved) - count
        if sum(growth[:stay]) <= free + sum(reserved[stay:]):
            return count
    return max(0, len(reserved) - 1)


def choose_growing(left: Sequence[int], *, ahead: int) -> set[int]:
    """Returns the indices of the sequences whose caches grow now.

    left: the number of free positions of each sequence.
    ahead: the number of free positions below which a sequence may grow ahead of time.

    Growing copies the caches of a sequence. Sequences that started together also fill up together,
    and all streams would then wait for all copies in a single step. Each step therefore grows at
    most one sequence ahead of time.
    """
    must = {i for i, positions in enumerate(left) if positions <= 0}
    if must or not left:
        return must
    first = min(range(len(left)), key=lambda i: left[i])
    return {first} if left[first] < ahead else set()
