"""What to forget when a context is full: whole numbers, pure.

Knows: lengths and ids. Must not know: layer caches, models, requests.

    prompt too long   [ kept | dropped ... | tail ................. ]   before it is evaluated
    context full      [ kept | discarded . | the newer half ....... ]   while it grows

The arithmetic is that of Ollama's llamarunner (ShiftDiscard in runner/llamarunner/cache.go of
February 2025, numKeep in runner.go beside it). One number differs: its prompts may fill the
context, ours leave room for the id that is sampled next.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftResult:
    """What a sequence goes on with after its context was shifted. num_computed: how many of `ids`
    its caches stand for: all, or none where the layers could not be shifted, so that all of them
    must be evaluated again."""

    ids: tuple[int, ...]
    num_computed: int


def resolve_num_keep(num_keep: int, *, length: int, context: int) -> int:
    """How many ids at the beginning are never forgotten. num_keep: as the request says; negative
    means the whole prompt, which has `length` ids. A beginning-of-sequence id that the caller puts
    in front must be counted by the caller. At least one position of `context` stays free to
    shift."""
    assert context > 0
    return min(length if num_keep < 0 else num_keep, context - 1)


def truncate_prompt(ids: Sequence[int], *, context: int, num_keep: int) -> Sequence[int]:
    """A prompt that leaves room for one more id: `ids` if they do, else the first `num_keep` of
    them (as `kept` reads it) and as many of the last as fit behind.

    The last id always stays, whatever `num_keep` says: it is where the answer begins.
    """
    assert context > 1, "a context of one position has no room for an answer"
    room = context - 1
    excess = len(ids) - room
    if excess <= 0:
        return ids
    start = min(resolve_num_keep(num_keep, length=len(ids), context=context), room - 1)
    return [*ids[:start], *ids[start + excess :]]


def count_discarded(*, context: int, length: int, num_keep: int) -> int:
    """How many ids behind the first `num_keep` to discard, so that half of what is not kept becomes
    free (at least one position). Zero while that much is free already. length: ids held now; the
    result never exceeds length - keep."""
    assert 0 <= num_keep < context, "nothing could ever be discarded"
    assert length <= context
    wanted_free = max((context - num_keep) // 2, 1)
    return max(wanted_free - (context - length), 0)
