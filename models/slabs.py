"""Creates the slab of each type of layer cache, and decides which layers get one.

Knows: the types of layer caches, devices. Must not know: sequences, requests, the rows of a batch.
"""

from models.kv import KVCache, LayerCache
from models.kv_slab import KVSlab, ring_size
from models.recurrent import RecurrentCache
from models.recurrent_slab import RecurrentSlab
from models.rotating_kv import RotatingKVCache
from models.slab_step import LayerSlab

# MLX's kernels may index a buffer with 32 bits.
_MAX_BUFFER_ELEMENTS = 2**31 - 1


def supports_slab(like: LayerCache) -> bool:
    """Returns whether there is a slab for this type of layer cache, and for its content. like: a
    cache of the layer with at least one position."""
    if isinstance(like, KVCache | RotatingKVCache):
        return bool(like.state())
    return isinstance(like, RecurrentCache) and len(like.state()) == like.num_slots > 0


def is_recurrent(like: LayerCache) -> bool:
    """Returns whether the size of the cache does not depend on the number of positions."""
    return isinstance(like, RecurrentCache)


def create_slab(like: LayerCache) -> LayerSlab:
    """Creates the slab of a layer that `supports_slab`, without slots."""
    if isinstance(like, KVCache | RotatingKVCache):
        return KVSlab(like)
    assert isinstance(like, RecurrentCache)
    return RecurrentSlab()


def slab_bytes(like: LayerCache, slots: int, capacity: int, rows: int) -> int:
    """Returns the size of a slab. capacity: the number of positions of a slot. rows: the number of
    rows of a recurrent layer, which all take part."""
    if isinstance(like, KVCache | RotatingKVCache):
        return like.position_bytes() * slots * ring_size(like, capacity)
    return like.nbytes * rows


def fits_buffers(like: LayerCache, slots: int, capacity: int) -> bool:
    """Returns whether MLX can index the buffers of such a slab."""
    if not isinstance(like, KVCache | RotatingKVCache):
        return True
    places = slots * ring_size(like, capacity)
    return all(
        places * array.shape[1] * array.shape[3] <= _MAX_BUFFER_ELEMENTS for array in like.state()
    )
