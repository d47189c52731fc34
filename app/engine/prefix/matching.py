"""How much two sequences of ids have in common.

Knows: ids. Must not know: what lies behind them.

Cutting a sequence's layer caches back, all or none of them.
"""

from collections.abc import Sequence

from app.core.ports import Layer


def can_trim_to(kv: Sequence[Layer], length: int) -> bool:
    return all(layer.can_trim(layer.offset - length) for layer in kv)


def trim_to(kv: Sequence[Layer], length: int) -> None:
    for layer in kv:
        layer.trim(layer.offset - length)


def common_prefix_length(a: tuple[int, ...], b: tuple[int, ...], offset: int = 0) -> int:
    """How many of the first ids of `a` are also those of `b` from position `offset` on.

    By halving: slices are compared at the speed of C, and no id more than three times. A prompt of
    32,000 ids takes about half a millisecond; a loop over them would take several.
    """
    # invariant: the first `low` are the same, the first `high` are not
    low, high = 0, min(len(a), len(b) - offset)
    if a[:high] == b[offset : offset + high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[offset + low : offset + middle]:
            low = middle
        else:
            high = middle
    return low
