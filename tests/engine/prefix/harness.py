"""Uses a prefix cache as the engine does, and checks the invariants of every lease."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from app.engine.prefix.cache import Lease, PrefixCache
from tests.engine.prefix.layers import FakeLayer

FakePrefixCache = PrefixCache[FakeLayer]

# arguments: kinds of layers, one letter each (see FakeLayer), and the alignment of prefixes
MakeCache = Callable[[str, int], FakePrefixCache]

GARBAGE = 99


def fail_after(patch: pytest.MonkeyPatch, method: str, num_calls: int) -> None:
    """Makes each call of a method of the layers fail, except the first `num_calls`."""
    real, calls = getattr(FakeLayer, method), itertools.count()

    def fail(layer: FakeLayer, *args: int) -> Any:
        if next(calls) >= num_calls:
            raise MemoryError
        return real(layer, *args)

    patch.setattr(FakeLayer, method, fail)


def feed(lease: Lease[FakeLayer], ids: Sequence[int]) -> None:
    for layer in lease.kv:
        layer.feed(ids)


def assert_holds(lease: Lease[FakeLayer], ids: Sequence[int]) -> None:
    for layer in lease.kv:
        assert layer.ids == tuple(ids), "the caches hold other ids"


def begin(
    cache: FakePrefixCache, ids: Sequence[int], *, alignment: int = 1, **options
) -> Lease[FakeLayer]:
    """Begin a lease, and check its invariants."""
    lease = cache.begin(ids, **options)
    assert 0 <= lease.cached < len(ids), "at least one id is left to evaluate"
    assert lease.cached % alignment == 0
    assert_holds(lease, ids[: lease.cached])
    assert list(lease.checkpoint_positions) == sorted(set(lease.checkpoint_positions))
    assert all(lease.cached < position < len(ids) for position in lease.checkpoint_positions)
    miss = lease.miss
    # with alignment, a miss may still report ids that differ after the last aligned position
    assert lease.cached < len(ids) - 1 or miss is None
    assert lease.cached == (len(ids) - 1) // alignment * alignment or miss is not None
    if miss is not None:
        assert lease.cached <= miss.position < len(ids)
        assert alignment > 1 or not miss.cached_ids or miss.cached_ids[0] != ids[miss.position], (
            "the cached ids match the prompt"
        )
    cache.check()
    return lease


def prefill(lease: Lease[FakeLayer], ids: Sequence[int], upto: int | None = None) -> None:
    """As the engine does: in chunks that end at the checkpoint positions, the last at `upto`."""
    done, end = lease.cached, len(ids) if upto is None else upto
    for stop in (*(p for p in lease.checkpoint_positions if p < end), end):
        feed(lease, ids[done:stop])
        done = stop
        lease.publish(ids[:stop])


def evaluate(cache: FakePrefixCache, ids: Sequence[int], upto: int | None = None, **options) -> int:
    """Evaluate a prompt, or its first `upto` ids. Returns the number of cached ids."""
    lease = begin(cache, ids, **options)
    upto = max(lease.cached, len(ids) if upto is None else upto)
    prefill(lease, ids, upto)
    assert_holds(lease, ids[:upto])
    lease.commit(ids[:upto], keep=upto)
    cache.check()
    return lease.cached
