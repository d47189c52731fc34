"""Which tokens to discard when the context is full: pure integer arithmetic.

Knows: lengths, ids. Must not know: layer caches, models, requests.

    prompt too long   [ kept | dropped ... | tail ................. ]   before it is evaluated
    context full      [ kept | discarded . | the newer half ....... ]   while it grows

The arithmetic is that of Ollama's llamarunner (ShiftDiscard in runner/llamarunner/cache.go of
February 2025, and numKeep in runner.go of the same folder). One number differs: Ollama's prompts
may fill the context, while prompts here leave one position free for the next sampled id.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftResult:
    """The ids with which a sequence continues after a context shift.

    num_computed: number of `ids` that its caches hold: all, or 0 if the layers could not be
    shifted, so that all ids must be evaluated again."""

    ids: tuple[int, ...]
    num_computed: int


def resolve_num_keep(num_keep: int, *, length: int, context: int) -> int:
    """The number of leading ids that are never discarded; less than `context`, so that at least one
    position can be shifted.

    num_keep: value from the request; negative means the whole prompt, which has `length` ids. The
    caller must count a beginning-of-sequence id that it prepends."""
    assert context > 0
    return min(length if num_keep < 0 else num_keep, context - 1)


def truncate_prompt(ids: Sequence[int], *, context: int, num_keep: int) -> Sequence[int]:
    """Truncates a prompt in the middle, so that one more id fits in the context.

    Returns `ids` if they fit; else the first `num_keep` ids (see `resolve_num_keep`) and as many of
    the last ids as fit. The last id is always kept, whatever `num_keep` is: the output follows it.
    """
    assert context > 1, "a context of one position has no room for an answer"
    room = context - 1
    excess = len(ids) - room
    if excess <= 0:
        return ids
    start = min(resolve_num_keep(num_keep, length=len(ids), context=context), room - 1)
    return [*ids[:start], *ids[start + excess :]]


def count_discarded(*, context: int, length: int, num_keep: int) -> int:
    """The number of ids to discard after the first `num_keep`, so that half of the remaining
    positions, and at least one, become free. 0 if that many are free already.

    length: number of ids held now; the result never exceeds length - num_keep."""
    assert 0 <= num_keep < context, "nothing could ever be discarded"
    assert length <= context
    wanted_free = max((context - num_keep) // 2, 1)
    return max(wanted_free - (context - length), 0)
