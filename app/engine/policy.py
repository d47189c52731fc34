"""The scheduling policy: which sequences start, which sequences are preempted, and how many prompt
tokens are prefilled per sequence in the next step.

Knows: counts, bytes and durations. Must not know: tensors, token IDs, requests, clocks. All
functions are pure.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.core.settings import MAX_DEFAULT_PARALLEL


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The limits of the scheduler.

    max_running: the maximum number of running sequences.
    max_prefill_tokens: the number of prompt tokens per round. It bounds the duration of a round,
        and therefore the latency of a cancellation.
    align_chunks: whether prompt chunks end at multiples of `max_prefill_tokens`, so that a prompt
        is always split at the same positions, whatever else the engine does.
    step_seconds: the duration of a step up to which it takes more than one round of prompt chunks.
        It bounds the inter-token latency of running sequences. None for one round per step.
    decode_seconds: the duration of a decode step up to which more than MIN_RUNNING sequences run.
        None for no limit.
    """

    max_running: int = 1
    max_prefill_tokens: int = 512
    align_chunks: bool = False
    step_seconds: float | None = None
    decode_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPrompt:
    """A prompt that is being prefilled. computed, remaining: numbers of tokens."""

    computed: int
    remaining: int


# The number of sequences that may run however long a decode step takes.
MIN_RUNNING = 8


def count_admissible(
    *,
    waiting: int,
    running: int,
    limits: SchedulerLimits,
    seconds_per_row: float | None = None,
) -> int:
    """Returns the number of waiting sequences that may start now. seconds_per_row: the duration of
    a decode step per sequence; None if unknown."""
    most = limits.max_running
    if limits.decode_seconds is not None and seconds_per_row:
        fast = int(min(limits.decode_seconds / seconds_per_row, most))
        most = min(most, max(MIN_RUNNING, fast))
    return max(0, min(waiting, most - running))


def count_slots(*, free_bytes: int, bytes_per_sequence: int) -> int:
    """Returns the default number of sequences that may run at the same time: as many as fit in
    memory, at least 1 and at most MAX_DEFAULT_PARALLEL."""
    return max(1, min(MAX_DEFAULT_PARALLEL, free_bytes // max(1, bytes_per_sequence)))


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


# The default numbers of prompt tokens per round. Kernels of mixtures of experts read the weights of
# each expert once per chunk, and neural accelerators compute small products no faster than large
# ones. A fast CPU is busy with few tokens.
_CPU_CHUNK, _DENSE_CHUNK, _LARGE_CHUNK = 128, 1024, 2048

# A shorter chunk on a GPU would save little memory.
_MIN_GPU_CHUNK = 256


def choose_chunk_length(
    *, on_gpu: bool, experts: bool, accelerators: bool, working: Callable[[int], int], limit: int
) -> int:
    """Returns the default number of prompt tokens per round (docs/decisions/engine.md).

    experts: whether the model has a mixture of experts. accelerators: whether the GPU has neural
    accelerators. working: returns the bytes that a chunk of a given length holds, including the
    scores of its attention. limit: the bytes that it may hold.
    """
    if not on_gpu:
        return _CPU_CHUNK
    length = _LARGE_CHUNK if experts or accelerators else _DENSE_CHUNK
    while length > _MIN_GPU_CHUNK and working(length) > limit:
        length //= 2
    return length


# The maximum number of rounds per step. It bounds the effect of a clock that jumps.
MAX_ROUNDS = 32

# The weight of the last step in the measured pace.
_PACE_WEIGHT = 0.25


def count_prefill_rounds(seconds_per_token: float | None, limits: SchedulerLimits) -> int:
    """Returns how many rounds of prompt chunks a step takes.

    seconds_per_token: the pace of earlier steps, see `update_pace`. None before the first one.

    The time decides only this number. It never decides where a chunk begins or ends.
    """
    if limits.step_seconds is None or seconds_per_token is None:
        return 1
    round_seconds = seconds_per_token * limits.max_prefill_tokens
    if round_seconds * MAX_ROUNDS <= limits.step_seconds:
        return MAX_ROUNDS
    return max(1, int(limits.step_seconds / round_seconds))


def update_pace(pace: float | None, *, count: int, seconds: float) -> float | None:
    """Returns the moving average of a step's seconds per prompt token, or per row, after a step of
    `seconds` with `count` of them. The seconds per prompt token include the decoding of the running
    sequences, so a step with many of them takes fewer prompt tokens."""
    if count <= 0 or not 0 <= seconds < math.inf:
        return pace
    if pace is None:
        return seconds / count
    return pace + _PACE_WEIGHT * (seconds / count - pace)


def choose_aligned_chunk(
    prompts: Sequence[PendingPrompt], limits: SchedulerLimits, *, turn: int
) -> tuple[int, int] | None:
    """Returns the index of the prompt to prefill in this round, and the number of its tokens.
    Returns None if there are no prompts.

    prompts: the oldest first. turn: the number of earlier rounds.

    Rounds alternate between the oldest prompt, so that it always advances, and the shortest other
    prompt, so that a long prompt never delays a short one by more than a chunk. The end of a chunk
    depends only on its own prompt.
    """
    if not prompts:
        return None
    remaining = [prompt.remaining for prompt in prompts]
    index = next(iter(_shortest_first(remaining)), 0) if turn % 2 else 0
    chosen, size = prompts[index], limits.max_prefill_tokens
    return index, min(chosen.remaining, size - chosen.computed % size)


def choose_aligned_round(
    prompts: Sequence[PendingPrompt], limits: SchedulerLimits, *, turn: int, pack: bool
) -> list[tuple[int, int]]:
    """Returns the prompts to prefill in this round, and the numbers of their tokens: the prompt of
    `choose_aligned_chunk` and, with `pack`, other prompts, shortest first, whose last chunks fit in
    the rest of the round. The end of a chunk still depends only on its own prompt."""
    first = choose_aligned_chunk(prompts, limits, turn=turn)
    if first is None or not pack:
        return [] if first is None else [first]
    chosen, size = [first], limits.max_prefill_tokens
    left = size - first[1]
    for index in sorted(range(len(prompts)), key=lambda i: prompts[i].remaining):
        prompt = prompts[index]
        last = prompt.remaining <= size - prompt.computed % size
        if index != first[0] and last and prompt.remaining <= left:
            chosen.append((index, prompt.remaining))
            left -= prompt.remaining
    return chosen


def split_prefill_budget(remaining: Sequence[int], limits: SchedulerLimits) -> list[int]:
    """Returns the number of prompt tokens to prefill for each sequence in this round, oldest first.
    For models whose results do not depend on the split.

    Half of the budget is reserved for the oldest prompt, so that it always advances. The other half
    goes to the shortest prompts, so that a long prompt never delays a short one. The oldest prompt
    also gets the rest of the budget.

    Each chunk has at least a quarter of the budget, unless it completes its prompt. To complete
    prompts, the budget may be exceeded by up to an eighth in total.
    """
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
