"""The interface of prefix caches and of the leases of their layer caches, the selection of a prefix
cache by name, and the functions that all of them share.

Knows: token IDs, layer caches as `LayerKV`, the arguments of every prefix cache. Must not know: any
implementation, settings, the scheduler.

`--cache` names a module of this package. It has a function `create_cache(config)` that returns a
`PrefixCache`. The name must also be listed in `app.core.settings.CachePolicy`, which defines the
values of the option.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, TypeVar

from app.core.context_shift import ShiftResult
from app.core.jobs import CacheMiss, PrefixSnapshot
from models.kv import LayerCache
from models.layer_cache import LayerKV

# The number of cached tokens after the point of divergence that a cache miss reports. A few are
# sufficient to identify the text in a log.
_MISS_IDS_SHOWN = 8

Layer = TypeVar("Layer", bound=LayerKV)
Layer_co = TypeVar("Layer_co", bound=LayerKV, covariant=True)


class Lease(Protocol[Layer_co]):
    """A sequence's temporary ownership of layer caches."""

    @property
    def kv(self) -> Sequence[Layer_co]:
        """The layer caches, which may be read and written until the lease ends."""
        ...

    @property
    def cached(self) -> int:
        """The number of leading prompt tokens that the caches already hold."""
        ...

    @property
    def miss(self) -> CacheMiss | None:
        """The reason why `cached` is not larger; None if only the last token needs prefill."""
        ...

    @property
    def checkpoint_positions(self) -> Sequence[int]:
        """The prompt positions at which prefill must pause and call `publish`, so that the prefix
        cache can copy the state of the layers. The positions are in ascending order and greater
        than `cached`."""
        ...

    def publish(self, ids: Sequence[int]) -> None:
        """Reports that the caches now contain exactly these tokens. Other sequences may copy
        them."""
        ...

    def commit(self, ids: Sequence[int], *, keep: int) -> None:
        """Ends the lease and keeps the caches for other sequences.

        ids: all tokens in the caches, in order. keep: the number of tokens to keep; the remaining
        tokens are trimmed if the layers support this.
        If an exception is raised, the lease has ended and the caches are dropped.
        """
        ...

    def discard(self) -> None:
        """Ends the lease, even if an exception is raised, and drops the caches, which may be
        invalid."""
        ...


class ShiftingLease(Lease[Layer_co], Protocol[Layer_co]):
    """A lease that supports context shift."""

    def shift(
        self,
        ids: Sequence[int],
        *,
        num_keep: int,
        remove: Callable[[Sequence[Layer_co], int, int], bool],
    ) -> ShiftResult:
        """Discards the older half of the tokens after the first `num_keep`, once the context is
        full.

        ids: all tokens in the layers, in order. remove(kv, start, end): removes positions [start,
        end) from the layers and moves the following positions up. If the layers do not support
        this, `remove` returns False and changes nothing; all remaining tokens must then be
        prefilled again.
        """
        ...


class PrefixCache(Protocol[Layer_co]):
    """Keeps computed prefixes, so that prompts with the same prefix do not need to prefill it
    again."""

    def begin(
        self,
        ids: Sequence[int],
        *,
        turn_ends: Sequence[int] = (),
        reuse: bool = True,
        reserve_length: int = 0,
        atomic: Sequence[tuple[int, int]] = (),
        stops: Sequence[int] = (),
    ) -> Lease[Layer_co]:
        """Leases caches for a prompt. At least one token is always left for prefill.

        turn_ends: the positions at which chat messages end, in ascending order. Prompts often
        diverge at these positions. reuse: if False, ignores cached prefixes, but still caches this
        prompt. reserve_length: the number of positions to allocate, if the sequence needs more than
        the prompt and one token. atomic: ranges [start, end) of positions that must be computed
        together, so that no cached prefix may end inside them. stops: further positions at which
        prompts may diverge, such as the ends of images, in ascending order.
        """
        ...

    def continued_bytes(
        self,
        ids: Sequence[int],
        *,
        reuse: bool = True,
        atomic: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Returns the number of bytes that `begin` would take out of the cache for this prompt: of
        layer caches that it continues or frees. Marks the prefix of the prompt as used, so that it
        is evicted last. ids, reuse, atomic: as for `begin`."""
        ...

    @property
    def shares_live(self) -> bool:
        """Whether other sequences can reuse the computed prefix of a running sequence."""
        ...

    @property
    def needs_checkpoints(self) -> bool:
        """Whether some layers can be resumed only at checkpoints. `turn_ends` determine where
        checkpoints are placed."""
        ...

    @property
    def nbytes(self) -> int:
        """The size in bytes of cached prefixes that are not leased."""
        ...

    @property
    def num_layers(self) -> int:
        """The number of layer caches that hold these prefixes. Each consists of a few buffers."""
        ...

    @property
    def evictions(self) -> int:
        """The number of prefixes evicted to free memory."""
        ...

    def evict(self, num_bytes: int) -> int:
        """Evicts the prefixes that are least likely to be reused, until `num_bytes` bytes have been
        freed or only leased caches are left. Returns the number of bytes freed."""
        ...

    def clear(self) -> None:
        """Drops all caches that are not leased."""
        ...

    def check(self) -> None:
        """Asserts all invariants. Called in tests and while the engine is idle."""
        ...

    def snapshot(self, max_nodes: int) -> PrefixSnapshot:
        """Returns up to `max_nodes` of the most recently used prefixes. The time depends on this
        number, and not on the size of the cache."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheConfig:
    """The arguments of a prefix cache policy.

    make_kv: creates the empty caches of all layers.
    evaluate: evaluates lazy caches, and waits for them.
    dispatch: starts to evaluate lazy caches, and does not wait.
    alignment: prefix lengths are multiples of this number of tokens.
    num_slots: the maximum number of running sequences.
    context: the maximum number of positions in a sequence.
    multi_user: whether a prompt may reuse the prefix of a busy slot.
    """

    make_kv: Callable[..., Sequence[LayerCache]]
    evaluate: Callable[[Sequence[LayerCache]], None]
    dispatch: Callable[[Sequence[LayerCache]], None]
    alignment: int
    num_slots: int
    context: int
    multi_user: bool


def create_prefix_cache(policy: str, config: PrefixCacheConfig) -> PrefixCache[LayerCache]:
    return import_module(f"{__package__}.{policy}").create_cache(config)


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


def list_stored_lengths(
    kv: Sequence[LayerKV], length: int, keep: int, alignment: int
) -> Sequence[int]:
    """Returns the prefix lengths to store when a lease ends, the preferred one first. If a layer
    cannot be trimmed to it, all tokens are stored, because the longer entry is also valid.

    length: the number of tokens in the caches. keep: the number of tokens to keep.
    """
    # The offsets of the layers may differ after a failed step, so only positions that exist in all
    # layers are used.
    offset = min((layer.offset for layer in kv), default=0)
    offset = min(offset, length)
    kept = min(offset, keep)
    lengths = (kept, offset) if alignment == 1 else (kept - kept % alignment,)
    return [length for length in lengths if length > 0]


def explain_miss(*, shared: int, usable: int, cached: int, cached_ids: Sequence[int]) -> CacheMiss:
    """Returns the reason for a miss.

    shared: the length of the longest common prefix of the prompt and a cached sequence.
    usable: the part of this prefix that may be reused.
    cached: the part of this prefix that is reused.
    cached_ids: the tokens of the cached sequence after this prefix.
    """
    if cached < usable:
        return CacheMiss(position=cached, reason="no_state")
    if shared == 0:
        return CacheMiss(position=0, reason="empty")
    # With an alignment, this position may be greater than `cached`, because the miss reports where
    # the tokens actually diverge.
    return CacheMiss(
        position=shared, reason="diverged", cached_ids=tuple(cached_ids[:_MISS_IDS_SHOWN])
    )


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
