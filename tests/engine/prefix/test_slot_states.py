"""Slots of models with recurrent layers."""

import mlx.core as mx
import numpy as np

from app.engine.prefix.slots import SlotPrefixCache
from models.recurrent import RecurrentCache

ROWS, SHAPE = 8, (1, 4, 64, 64)


def test_a_slot_that_left_a_batch_holds_only_its_own_state() -> None:
    """A row's state was a view of the states of all rows, so a slot held the bytes of eight, seven
    of which were not accounted for."""
    cache = SlotPrefixCache(
        lambda: [RecurrentCache(1)],
        slots=ROWS,
        context=16,
        multi_user=True,
        evaluate=lambda kv: mx.eval([layer.state() for layer in kv]),
    )
    leases = [cache.begin([row, 1, 2]) for row in range(ROWS)]
    rows = [lease.kv[0] for lease in leases]
    for row, layer in enumerate(rows):
        layer[0] = mx.full(SHAPE, float(row))
        layer.advance(2)
    together = rows[0].make_batch(rows, mx.array([2] * ROWS))
    state_of_batch = together[0]
    assert state_of_batch is not None
    together[0] = state_of_batch + 1
    together.advance(1)
    mx.eval([layer.state() for layer in rows])

    size = rows[0].nbytes
    del rows, layer, together, state_of_batch
    before = mx.get_active_memory()
    for row, lease in enumerate(leases):
        lease.commit([row, 1, 2], keep=3)
    assert cache.nbytes == ROWS * size
    # slots are evicted one by one; the rest is what nbytes reports
    cache.evict((ROWS - 1) * size)
    assert cache.nbytes == size
    # apart from small arrays of other tests
    assert mx.get_active_memory() < before - (ROWS - 2) * size

    again = cache.begin([ROWS - 1, 1, 2, 3])
    state = again.kv[0][0]
    assert again.cached == 3
    assert state is not None
    np.testing.assert_array_equal(np.array(state), np.full(SHAPE, float(ROWS)))
