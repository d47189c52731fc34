"""A prefix cache used as the engine uses it, and everything that can be said of any lease."""

from collections.abc import Callable, Sequence

from app.core.ports import Lease, PrefixCache
from tests.engine.prefix.layers import FakeLayer

Fakes = PrefixCache[FakeLayer]

# kinds of layers, one letter each (see FakeLayer), and the grid that prefixes end on
MakeCache = Callable[[str, int], Fakes]

GARBAGE = 99


def feed(lease: Lease[FakeLayer], ids: Sequence[int]) -> None:
    for layer in lease.kv:
        layer.feed(ids)


def stands_for(lease: Lease[FakeLayer], ids: Sequence[int]) -> None:
    for layer in lease.kv:
        assert layer.ids == tuple(ids), "the caches stand for something else"


def begin(cache: Fakes, ids: Sequence[int], *, grid: int = 1, **options) -> Lease[FakeLayer]:
    """A lease, after everything that can be said of any lease was found true."""
    lease = cache.begin(ids, **options)
    assert 0 <= lease.cached < len(ids), "at least one id is left to evaluate"
    assert lease.cached % grid == 0
    stands_for(lease, ids[: lease.cached])
    assert list(lease.pauses) == sorted(set(lease.pauses))
    assert all(lease.cached < pause < len(ids) for pause in lease.pauses)
    miss = lease.miss
    # on a coarser grid a policy may still tell what parts them behind the last grid point
    assert lease.cached < len(ids) - 1 or miss is None
    assert lease.cached == (len(ids) - 1) // grid * grid or miss is not None
    if miss is not None:
        assert lease.cached <= miss.at < len(ids)
        assert grid > 1 or not miss.had or miss.had[0] != ids[miss.at], "these ids were wanted"
    cache.check()
    return lease


def prefill(lease: Lease[FakeLayer], ids: Sequence[int], upto: int | None = None) -> None:
    """As the engine does it: in chunks that end at every pause, the last at `upto`."""
    done, end = lease.cached, len(ids) if upto is None else upto
    for stop in (*(p for p in lease.pauses if p < end), end):
        feed(lease, ids[done:stop])
        done = stop
        lease.reached(ids[:stop])


def evaluate(cache: Fakes, ids: Sequence[int], upto: int | None = None, **options) -> int:
    """Run a prompt through, or its first `upto` ids; the number of cached ids."""
    lease = begin(cache, ids, **options)
    upto = max(lease.cached, len(ids) if upto is None else upto)
    prefill(lease, ids, upto)
    stands_for(lease, ids[:upto])
    lease.commit(ids[:upto], keep=upto)
    cache.check()
    return lease.cached
