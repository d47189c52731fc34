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
class Shifted:
    """What a sequence goes on with after its context was shifted. evaluated: how many of `ids` its
    caches stand for: all, or none where the layers could not be shifted, so that all of them must
    be evaluated again."""

    ids: tuple[int, ...]
    evaluated: int


def kept(keep: int, *, length: int, context: int) -> int:
    """How many ids at the beginning are never forgotten. keep: as the request says; negative means
    the whole prompt, which has `length` ids. A beginning-of-sequence id that the caller puts in
    front must be counted by the caller. At least one position of `context` stays free to shift."""
    assert context > 0
    return min(length if keep < 0 else keep, context - 1)


def truncated(ids: Sequence[int], *, context: int, keep: int) -> Sequence[int]:
    """A prompt that leaves room for one more id: `ids` if they do, else the first `keep` of them
    (as `kept` reads it) and as many of the last as fit behind.

    The last id always stays, whatever `keep` says: it is where the answer begins.
    """
    assert context > 1, "a context of one position has no room for an answer"
    room = context - 1
    excess = len(ids) - room
    if excess <= 0:
        return ids
    start = min(kept(keep, length=len(ids), context=context), room - 1)
    return [*ids[:start], *ids[start + excess :]]


def shift_discard(*, context: int, length: int, keep: int) -> int:
    """How many ids behind the first `keep` to discard, so that half of what is not kept becomes
    free (at least one position). Zero while that much is free already. length: ids held now; the
    result never exceeds length - keep."""
    assert 0 <= keep < context, "nothing could ever be discarded"
    assert length <= context
    wanted_free = max((context - keep) // 2, 1)
    return max(wanted_free - (context - length), 0)
