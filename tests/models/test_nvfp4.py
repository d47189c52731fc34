"""The global scale of an nvfp4 weight."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from models.base import ModelError
from models.experts import Experts
from models.mla import MultiLinear
from models.quant import replace_quantized_layers

IN, OUT, EXPERTS = 64, 48, 4


def quantize(plain: mx.array) -> tuple[dict[str, mx.array], mx.array]:
    """The tensors of a weight quantized with a global scale, and the dequantized weight."""
    scale = mx.max(mx.abs(plain))
    weight, scales, *_ = mx.quantize(plain, 16, 4, mode="nvfp4", global_scale=scale)
    restored = mx.dequantize(
        weight, scales, group_size=16, bits=4, mode="nvfp4", global_scale=scale, dtype=mx.float32
    )
    return {"weight": weight, "scales": scales, "global_scale": scale}, restored


def quantize_experts(plain: mx.array) -> tuple[dict[str, mx.array], mx.array]:
    each = [quantize(plain[i]) for i in range(plain.shape[0])]
    names = each[0][0]
    return (
        {name: mx.stack([one[name] for one, _ in each]) for name in names},
        mx.stack([restored for _, restored in each]),
    )


def noise(*shape: int, key: int = 0) -> mx.array:
    # small: without the global scale, the group scales would be below the range of e4m3
    return 0.002 * mx.random.normal(shape, key=mx.random.key(key))


def load_quantized(layer: Any, tensors: dict[str, mx.array], path: str) -> None:
    weights = {f"{path}.{name}": array for name, array in tensors.items()}
    replace_quantized_layers(layer, weights)
    layer.load_weights(list(weights.items()), strict=False)


class Holder(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_linear_layer_equals_its_dequantized_weight(bias: bool, shape: tuple[int, ...]) -> None:
    holder = Holder(nn.Linear(IN, OUT, bias=bias))
    tensors, restored = quantize(noise(OUT, IN))
    tensors["global_scale"] = tensors["global_scale"].reshape(shape)
    added = holder.layer.bias if bias else mx.zeros((OUT,))
    load_quantized(holder, tensors, "layer")
    x = mx.random.normal((3, IN))
    expected = x @ restored.T + added
    np.testing.assert_allclose(np.array(holder.layer(x)), np.array(expected), rtol=1e-4, atol=1e-6)
    assert holder.layer.global_scale.shape == (1,)


@pytest.mark.parametrize(("dtype", "close"), [(mx.float16, 2e-3), (mx.bfloat16, 2e-2)])
def test_half_precision_neither_overflows_nor_changes_type(dtype: mx.Dtype, close: float) -> None:
    """Without the scale, the entries are a million times larger than the weights."""
    holder = Holder(nn.Linear(4096, OUT, bias=False))
    tensors, restored = quantize(noise(OUT, 4096))
    load_quantized(holder, tensors, "layer")
    x = mx.random.normal((3, 4096)).astype(dtype)
    found = holder.layer(x)
    expected = x.astype(mx.float32) @ restored.T
    assert found.dtype == dtype
    np.testing.assert_allclose(
        np.array(found.astype(mx.float32)), np.array(expected), rtol=close, atol=close
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [2, 80])
def test_each_expert_has_its_own_scale(tokens: int, biased: bool) -> None:
    plain = Experts(IN, OUT, EXPERTS, bias=biased)
    scaled = Experts(IN, OUT, EXPERTS, bias=biased)
    # of different sizes, so that a scale at the wrong expert is detected
    weight = noise(EXPERTS, OUT, IN) * mx.array([1.0, 8.0, 0.5, 3.0])[:, None, None]
    tensors, restored = quantize_experts(weight)
    for experts in (plain, scaled):
        rest = {
            name: noise(*array.shape, key=7)
            for name, array in (
                ("gate_proj.weight", experts.gate_proj.weight),
                ("down_proj.weight", experts.down_proj.weight),
            )
        }
        experts.load_weights(list(rest.items()), strict=False)
    plain.up_proj.weight = restored
    load_quantized(scaled, tensors, "up_proj")
    x = mx.random.normal((1, tokens, IN))
    chosen = mx.random.randint(0, EXPERTS, (1, tokens, 2))
    shares = mx.random.uniform(shape=(1, tokens, 2))
    found, expected = (np.array(e(1000 * x, chosen, shares)) for e in (scaled, plain))
    assert np.abs(expected).max() > 1e-4
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_one_scale_can_apply_to_all_experts() -> None:
    experts = Experts(IN, OUT, EXPERTS)
    tensors, _ = quantize_experts(noise(EXPERTS, OUT, IN))
    tensors["global_scale"] = mx.array([0.25])
    load_quantized(experts, tensors, "up_proj")
    assert experts.up_proj["global_scale"].tolist() == [0.25] * EXPERTS


def test_an_embedding_equals_its_dequantized_weight() -> None:
    holder = Holder(nn.Embedding(OUT, IN))
    tensors, restored = quantize(noise(OUT, IN))
    load_quantized(holder, tensors, "layer")
    ids = mx.array([[5, 0, 47]])
    found = holder.layer(ids)
    assert found.dtype == mx.bfloat16
    np.testing.assert_allclose(
        np.array(found.astype(mx.float32)), np.array(restored[ids]), rtol=2**-8
    )
    x = mx.random.normal((3, IN))
    np.testing.assert_allclose(
        np.array(holder.layer.as_linear(x)), np.array(x @ restored.T), rtol=1e-4, atol=1e-6
    )


def test_a_scale_of_other_layers_or_modes_is_refused() -> None:
    tensors, _ = quantize(noise(OUT, IN))
    stack = {name: array[None] for name, array in tensors.items()}
    with pytest.raises(ModelError, match="a global scale is not supported for layer"):
        load_quantized(Holder(MultiLinear(IN, OUT, 1)), stack, "layer")
    weight, scales, *_ = mx.quantize(noise(OUT, IN), 32, 4, mode="mxfp4")
    wrong = {"weight": weight, "scales": scales, "global_scale": mx.array([1.0])}
    with pytest.raises(ModelError, match="which mxfp4 weights do not have"):
        load_quantized(Holder(nn.Linear(IN, OUT)), wrong, "layer")
