"""Weights in another order are the same weights."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from models import layout
from models.layout import suit_device
from tests.engine.driving import tiny_model

IDS = mx.array([[1, 2, 3, 4]])


def logits(model: Any) -> Any:
    return np.array(model.logits(model(IDS, model.make_kv())))


def test_a_model_computes_the_same_and_its_weights_are_read_the_same() -> None:
    model: Any = tiny_model()
    before, weight = logits(model), np.array(model.model.layers[0].mlp.up_proj.weight)
    suit_device(model)
    np.testing.assert_allclose(logits(model), before, atol=1e-5)
    assert np.array_equal(np.array(model.model.layers[0].mlp.up_proj.weight), weight)


def test_the_product_finds_its_weight_in_one_piece() -> None:
    linear = nn.Linear(3, 5)
    suit_device(linear)
    # numpy shows the strides that MLX has
    assert np.array(linear.weight.T, copy=False).flags.c_contiguous


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_types_stay_as_they_are(dtype: mx.Dtype) -> None:
    linear = nn.Linear(3, 5)
    linear.set_dtype(dtype)
    weight = linear.weight
    suit_device(linear)
    assert linear.weight is weight


def test_a_weight_too_large_to_be_held_twice_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear, larger = nn.Linear(3, 5), nn.Linear(3, 6)
    monkeypatch.setattr(layout, "MOST", linear.weight.nbytes)
    weight, kept = linear.weight, larger.weight
    suit_device(linear)
    suit_device(larger)
    assert linear.weight is not weight
    assert larger.weight is kept


def test_other_devices_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(3, 5)
    weight = linear.weight
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    suit_device(linear)
    assert linear.weight is weight
