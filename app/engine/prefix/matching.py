"""Compares sequences of token IDs, and trims all layer caches of a sequence together.

Knows: token IDs, layer caches as `LayerKV`. Must not know: the prefix caches.
"""

from collections.abc import Sequence

from app.engine.prefix.cache import Layer


def can_trim_to(kv: Sequence[Layer], length: int) -> bool:
    return all(layer.can_trim(layer.offset - length) for layer in kv)


def trim_to(kv: Sequence[Layer], length: int) -> None:
    for layer in kv:
        layer.trim(layer.offset - length)


def usable_length(length: int, alignment: int, atomic: Sequence[tuple[int, int]]) -> int:
    """Returns the largest multiple of the alignment that is at most `length` and not inside a range
    [start, end) of `atomic`."""
    while True:
        length -= length % alignment
        inside = next((start for start, end in atomic if start < length < end), None)
        if inside is None:
            return length
        length = inside


def common_prefix_length(a: tuple[int, ...], b: tuple[int, ...], offset: int = 0) -> int:
    """Returns the number of leading tokens that `a` shares with `b` from position `offset` on.

    Uses bisection. Slices are compared in C, and each token is compared at most three times. A
    prompt of 32,000 tokens takes about half a millisecond, while a Python loop would take several
    milliseconds.
    """
    # Invariant: the first `low` tokens are equal, the first `high` are not.
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
