"""A suited model is the same model: other types, other operations, the same numbers."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import models
from models import cpu_layout
from models.cpu_layout import apply_cpu_layout
from tests import tiny
from tests.models.switched import BOTH, computing

IDS = mx.array([[1, 2, 3, 4]])


@pytest.fixture(params=BOTH)
def by_kernels(request: pytest.FixtureRequest) -> Any:
    with computing(by_kernels=request.param):
        yield request.param


@pytest.fixture
def without_kernels() -> Any:
    with computing(by_kernels=False):
        yield


def linear(dtype: mx.Dtype = mx.float32, outputs: int = 5) -> nn.Linear:
    made = nn.Linear(3, outputs)
    made.set_dtype(dtype)
    return made


def suited(layer: Any) -> Any:
    """As a part of a model: a layer by itself is nobody's to swap."""
    model: Any = nn.Sequential(layer)
    apply_cpu_layout(model)
    return model.layers[0]


def logits(model: Any) -> Any:
    return np.array(model.logits(model(IDS, model.make_kv())))


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("bits", [None, 2, 4, 8])
def test_a_model_computes_the_same_and_its_weights_are_read_the_same(bits: int | None) -> None:
    model: Any = models.build(tiny.CONFIG, tiny.weights(seed=0))
    if bits is not None:
        nn.quantize(model, 32, bits, class_predicate=lambda _, layer: _packs(layer))
    before = logits(model)
    weights = {name: np.array(array) for name, array in _flat(model)}
    apply_cpu_layout(model)
    np.testing.assert_allclose(logits(model), before, atol=1e-5)
    assert [name for name, _ in _flat(model)] == list(weights)
    layers = dict(model.named_modules())
    for name, weight in weights.items():
        layer, _, part = name.rpartition(".")
        np.testing.assert_array_equal(np.array(getattr(layers[layer], part)), weight)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_halves_stay_halves_where_the_kernels_multiply_with_them(
    by_kernels: bool, dtype: mx.Dtype
) -> None:
    layer, norm = suited(linear(dtype)), nn.RMSNorm(3)
    norm.set_dtype(dtype)
    assert layer.weight.dtype == (dtype if by_kernels else mx.float32)
    assert layer.bias.dtype == suited(norm).weight.dtype == mx.float32
    assert layer(mx.ones((1, 3))).dtype == mx.float32


def test_packed_weights_stay_packed(by_kernels: bool) -> None:
    layer = nn.Linear(32, 5, bias=False)
    layer.set_dtype(mx.bfloat16)
    made = suited(layer.to_quantized(32, 4))
    assert made.weight.dtype == mx.uint32
    assert made.scales.dtype == (mx.bfloat16 if by_kernels else mx.float32)


@pytest.mark.usefixtures("by_kernels")
def test_nothing_is_evaluated() -> None:
    """Whether a model fits is asked of a suited one, none of whose weights was read."""

    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = linear(mx.bfloat16, outputs=1 << 20), nn.RMSNorm(1 << 20)
            self.up.weight = mx.zeros((1 << 20, 3), mx.bfloat16)

    model = Unread()
    before = mx.get_active_memory()
    apply_cpu_layout(model)
    assert mx.get_active_memory() - before < 1 << 20


@pytest.mark.usefixtures("without_kernels")
def test_the_product_finds_its_weight_in_one_piece() -> None:
    layer = suited(linear())
    # numpy shows the strides that MLX has
    assert np.array(layer.weight.T, copy=False).flags.c_contiguous


@pytest.mark.usefixtures("without_kernels")
def test_a_weight_too_large_to_be_held_twice_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, larger = linear(), linear(outputs=6)
    monkeypatch.setattr(cpu_layout, "MAX_TRANSPOSED_BYTES", small.weight.nbytes)
    weight, kept = small.weight, larger.weight
    assert suited(small).weight is not weight
    assert suited(larger).weight is kept


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_other_devices_keep_their_order_and_types(
    monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype
) -> None:
    layer = linear(dtype)
    weight = layer.weight
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert suited(layer) is layer
    assert layer.weight is weight


def _packs(layer: Any) -> bool:
    return hasattr(layer, "to_quantized") and not layer.weight.shape[-1] % 32


def _flat(model: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(model.parameters())
    return flat
