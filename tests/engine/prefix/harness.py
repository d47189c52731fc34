"""A prefix cache used as the engine uses it, and everything that can be said of any lease."""

from collections.abc import Callable, Sequence

from app.core.ports import Lease, PrefixCache
from tests.engine.prefix.layers import FakeLayer

FakePrefixCache = PrefixCache[FakeLayer]

# kinds of layers, one letter each (see FakeLayer), and the grid that prefixes end on
MakeCache = Callable[[str, int], FakePrefixCache]

GARBAGE = 99


def feed(lease: Lease[FakeLayer], ids: Sequence[int]) -> None:
    for layer in lease.kv:
        layer.feed(ids)


def assert_holds(lease: Lease[FakeLayer], ids: Sequence[int]) -> None:
    for layer in lease.kv:
        assert layer.ids == tuple(ids), "the caches stand for something else"


def begin(
    cache: FakePrefixCache, ids: Sequence[int], *, alignment: int = 1, **options
) -> Lease[FakeLayer]:
    """A lease, after everything that can be said of any lease was found true."""
    lease = cache.begin(ids, **options)
    assert 0 <= lease.cached < len(ids), "at least one id is left to evaluate"
    assert lease.cached % alignment == 0
    assert_holds(lease, ids[: lease.cached])
    assert list(lease.checkpoint_positions) == sorted(set(lease.checkpoint_positions))
    assert all(lease.cached < pause < len(ids) for pause in lease.checkpoint_positions)
    miss = lease.miss
    # on a coarser grid a policy may still tell what parts them behind the last grid point
    assert lease.cached < len(ids) - 1 or miss is None
    assert lease.cached == (len(ids) - 1) // alignment * alignment or miss is not None
    if miss is not None:
        assert lease.cached <= miss.position < len(ids)
        assert alignment > 1 or not miss.cached_ids or miss.cached_ids[0] != ids[miss.position], (
            "these ids were wanted"
        )
    cache.check()
    return lease


def prefill(lease: Lease[FakeLayer], ids: Sequence[int], upto: int | None = None) -> None:
    """As the engine does it: in chunks that end at every pause, the last at `upto`."""
    done, end = lease.cached, len(ids) if upto is None else upto
    for stop in (*(p for p in lease.checkpoint_positions if p < end), end):
        feed(lease, ids[done:stop])
        done = stop
        lease.publish(ids[:stop])


def evaluate(cache: FakePrefixCache, ids: Sequence[int], upto: int | None = None, **options) -> int:
    """Run a prompt through, or its first `upto` ids; the number of cached ids."""
    lease = begin(cache, ids, **options)
    upto = max(lease.cached, len(ids) if upto is None else upto)
    prefill(lease, ids, upto)
    assert_holds(lease, ids[:upto])
    lease.commit(ids[:upto], keep=upto)
    cache.check()
    return lease.cached
