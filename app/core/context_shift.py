"""Which tokens to discard when the context is full: pure integer arithmetic.

Knows: lengths, token IDs. Must not know: layer caches, models, requests.

    prompt too long   [ kept | dropped ... | tail ................. ]   before prefill
    context full      [ kept | discarded . | the newer half ....... ]   during decoding

The arithmetic follows Ollama's llamarunner (ShiftDiscard in runner/llamarunner/cache.go of February
2025, and numKeep in runner.go in the same folder), with one difference: in Ollama, a prompt may
fill the context, while a prompt here must leave one position free for the next sampled token.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftResult:
    """The tokens with which a sequence continues after a context shift.

    num_computed: the number of tokens in `ids` that are in the layer caches. If the layers could
    not be shifted, it is 0, and all tokens must be prefilled again.
    """

    ids: tuple[int, ...]
    num_computed: int


def resolve_num_keep(num_keep: int, *, length: int, context: int) -> int:
    """Returns the number of leading tokens that are never discarded. It is less than `context`, so
    that at least one position can be shifted.

    num_keep: the value from the request; a negative value means the whole prompt, which has
    `length` tokens. If the caller prepends a beginning-of-sequence token, num_keep must include it.
    """
    assert context > 0
    return min(length if num_keep < 0 else num_keep, context - 1)


def truncate_prompt(ids: Sequence[int], *, context: int, num_keep: int) -> Sequence[int]:
    """Truncates a prompt in the middle, so that one more token fits in the context.

    Returns `ids` unchanged if they fit. Otherwise it returns the first `num_keep` tokens (see
    `resolve_num_keep`) and as many of the last tokens as fit. The last token is always kept,
    because the output follows it.
    """
    assert context > 1, "a context of one position has no room for output"
    room = context - 1
    excess = len(ids) - room
    if excess <= 0:
        return ids
    start = min(resolve_num_keep(num_keep, length=len(ids), context=context), room - 1)
    return [*ids[:start], *ids[start + excess :]]


def count_discarded(*, context: int, length: int, num_keep: int) -> int:
    """Returns the number of tokens to discard after the first `num_keep`, so that half of the
    remaining positions (at least one) become free. Returns 0 if enough positions are already free.

    length: the number of tokens held now; the result never exceeds length - num_keep.
    """
    assert 0 <= num_keep < context, "no token could be discarded"
    assert length <= context
    wanted_free = max((context - num_keep) // 2, 1)
    return max(wanted_free - (context - length), 0)
