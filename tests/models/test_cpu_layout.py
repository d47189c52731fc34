"""The CPU layout changes types and operations of a model, but not its results."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from models import architectures, cpu_layout
from models.cpu_layout import apply_cpu_layout
from tests import tiny
from tests.models.kernel_switch import BOTH, use_kernels

IDS = mx.array([[1, 2, 3, 4]])


@pytest.fixture(params=BOTH)
def with_kernels(request: pytest.FixtureRequest) -> Any:
    with use_kernels(enabled=request.param):
        yield request.param


@pytest.fixture
def without_kernels() -> Any:
    with use_kernels(enabled=False):
        yield


def linear(dtype: mx.Dtype = mx.float32, outputs: int = 5) -> nn.Linear:
    layer = nn.Linear(3, outputs)
    layer.set_dtype(dtype)
    return layer


def apply_layout(layer: Any) -> Any:
    """Apply the layout to a layer inside a model, because it replaces layers in their parent."""
    model: Any = nn.Sequential(layer)
    apply_cpu_layout(model)
    return model.layers[0]


def logits(model: Any) -> Any:
    return np.array(model.logits(model(IDS, model.make_kv())))


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("bits", [None, 2, 4, 8])
def test_the_layout_changes_neither_logits_nor_weight_values(bits: int | None) -> None:
    model: Any = architectures.build(tiny.CONFIG, tiny.weights(seed=0))
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
def test_half_precision_weights_keep_their_type_with_kernels(
    with_kernels: bool, dtype: mx.Dtype
) -> None:
    layer, norm = apply_layout(linear(dtype)), nn.RMSNorm(3)
    norm.set_dtype(dtype)
    assert layer.weight.dtype == (dtype if with_kernels else mx.float32)
    assert layer.bias.dtype == apply_layout(norm).weight.dtype == mx.float32
    assert layer(mx.ones((1, 3))).dtype == mx.float32


def test_packed_weights_stay_packed(with_kernels: bool) -> None:
    layer = nn.Linear(32, 5, bias=False)
    layer.set_dtype(mx.bfloat16)
    packed = apply_layout(layer.to_quantized(32, 4))
    assert packed.weight.dtype == mx.uint32
    assert packed.scales.dtype == (mx.bfloat16 if with_kernels else mx.float32)


@pytest.mark.usefixtures("with_kernels")
def test_the_layout_evaluates_no_weights() -> None:
    """The preflight applies the layout before any weight is read."""

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
def test_the_transposed_weight_is_contiguous() -> None:
    layer = apply_layout(linear())
    # numpy shows the strides that MLX has
    assert np.array(layer.weight.T, copy=False).flags.c_contiguous


@pytest.mark.usefixtures("without_kernels")
def test_a_weight_above_the_size_limit_is_not_transposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, larger = linear(), linear(outputs=6)
    monkeypatch.setattr(cpu_layout, "MAX_TRANSPOSED_BYTES", small.weight.nbytes)
    weight, unchanged = small.weight, larger.weight
    assert apply_layout(small).weight is not weight
    assert apply_layout(larger).weight is unchanged


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_layout_changes_no_layers_on_other_devices(
    monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype
) -> None:
    layer = linear(dtype)
    weight = layer.weight
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert apply_layout(layer) is layer
    assert layer.weight is weight


def _packs(layer: Any) -> bool:
    return hasattr(layer, "to_quantized") and not layer.weight.shape[-1] % 32


def _flat(model: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(model.parameters())
    return flat
