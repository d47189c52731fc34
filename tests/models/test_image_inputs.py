"""Image rows among the inputs of a model."""

import mlx.core as mx
import pytest

from models.image_inputs import ImageInputs, to_model_ids
from models.kv import KVCache, get_position_delta, set_position_delta

GIVEN = ImageInputs(rows=mx.array([1, 3]), features=mx.array([[1.0, 2.0], [3.0, 4.0]]))


def test_no_negative_id_reaches_the_model() -> None:
    assert to_model_ids([5, -1, -(2**62), 7]) == [5, 0, 0, 7]


def test_features_replace_embeddings_and_the_argument_does_not_change() -> None:
    x = mx.full((1, 4, 2), 9.0)
    assert GIVEN.insert(x)[0].tolist() == [[9, 9], [1, 2], [9, 9], [3, 4]]
    assert x[0].tolist() == [[9, 9]] * 4


def test_features_have_the_type_of_the_activations() -> None:
    assert GIVEN.insert(mx.zeros((1, 4, 2), mx.bfloat16)).dtype == mx.bfloat16


def test_deepstack_is_added_after_its_layer_at_the_image_rows() -> None:
    given = ImageInputs(
        rows=GIVEN.rows, features=GIVEN.features, deepstack=[GIVEN.features, -GIVEN.features]
    )
    x = mx.full((1, 4, 2), 1.0)
    assert given.add_deepstack(x, 0)[0].tolist() == [[1, 1], [2, 3], [1, 1], [4, 5]]
    assert given.add_deepstack(x, 1)[0].tolist() == [[1, 1], [0, -1], [1, 1], [-2, -3]]
    assert given.add_deepstack(x, 2)[0].tolist() == [[1, 1]] * 4


@pytest.mark.parametrize("delta", [0, -7])
def test_the_position_of_the_next_token_is_its_index_plus_the_delta(delta: int) -> None:
    cache = KVCache()
    set_position_delta([cache], delta)
    cache.update(mx.zeros((1, 1, 9, 2)), mx.zeros((1, 1, 9, 2)))
    assert (cache.positions, get_position_delta([cache])) == (9 + delta, delta)
    assert cache.copy().position_delta == 0  # a copy may become part of another sequence
