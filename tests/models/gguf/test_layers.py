"""Layers with GGUF's blocks, without the kernels."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from models.base import ModelError
from models.experts import ExpertLinear
from models.gguf.layers import choose_storage, replace_with_gguf_layers
from tests.models.gguf.random_blocks import IDS, store_blocks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 256)
        self.linear = nn.Linear(256, 5)
        self.experts = ExpertLinear(256, 4, 3, bias=True)
        self.norm = nn.RMSNorm(256)


def draw(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(0))


def test_layers_compute_the_same_as_with_dequantized_weights() -> None:
    model, plain = Model(), Model()
    shapes = {"embed": (6, 256), "linear": (5, 256), "experts": (3, 4, 256)}
    types = {"embed": IDS["Q6_K"], "linear": IDS["Q4_K"], "experts": IDS["Q8_0"]}
    stored = {path: store_blocks(types[path], *shape) for path, shape in shapes.items()}
    weights = {f"{path}.weight": one.weight for path, one in stored.items()}
    plain.load_weights(list(weights.items()), strict=False)
    assert replace_with_gguf_layers(model, weights, list(stored.values()))
    model.load_weights(list(weights.items()), strict=False)
    for path in ("linear", "experts"):
        bias = draw(*plain[path].bias.shape)
        model[path].bias = plain[path].bias = bias
    ids, x = mx.array([[5, 0]]), draw(3, 256)
    assert mx.array_equal(model.embed(ids), plain.embed(ids))
    assert mx.array_equal(model.embed.as_linear(x), plain.embed.as_linear(x))
    assert mx.allclose(model.linear(x), plain.linear(x), atol=1e-5)
    chosen = mx.array([[2, 0], [1, 1], [0, 2]])
    found, expected = (one.experts(x[:, None, None], chosen) for one in (model, plain))
    assert mx.allclose(found, expected, atol=1e-5)


def test_packed_parts_are_dropped_with_their_weight() -> None:
    model, blocks = nn.Sequential(nn.Linear(256, 5)), store_blocks(IDS["Q4_K"], 5, 256)
    name = "layers.0.weight"
    weights = {name: blocks.weight, "layers.0.scales": draw(5, 8), "layers.0.biases": draw(5, 8)}
    assert replace_with_gguf_layers(model, weights, [blocks])
    assert weights == {name: blocks.raw}


def test_computed_weights_and_other_layers_are_kept() -> None:
    model, blocks = Model(), store_blocks(IDS["Q8_0"], 5, 256)
    weights = {"linear.weight": blocks.weight * 2, "norm.weight": blocks.weight}
    before = dict(weights)
    assert not replace_with_gguf_layers(model, weights, [blocks])
    assert weights == before
    assert type(model.linear) is nn.Linear


def test_rows_must_consist_of_blocks() -> None:
    model, blocks = nn.Sequential(nn.Linear(96, 5)), store_blocks(IDS["Q4_K"], 5, 256)
    with pytest.raises(ModelError, match="rows of 96 weights cannot have the type Q4_K"):
        replace_with_gguf_layers(model, {"layers.0.weight": blocks.weight}, [blocks])


@pytest.mark.parametrize(
    ("name", "kernels", "cpu", "gpu"),
    [
        ("Q4_K", "blocks", "affine", "affine"),
        ("Q6_K", "blocks", "float32", "bfloat16"),
        ("MXFP4", "blocks", "affine", "affine"),
    ],
)
def test_the_device_decides_how_weights_are_stored(
    name: str, kernels: str, cpu: str, gpu: str
) -> None:
    type_id = IDS[name]
    assert choose_storage(type_id, has_kernels=True, on_gpu=False) == kernels
    assert choose_storage(type_id, has_kernels=False, on_gpu=False) == cpu
    assert choose_storage(type_id, has_kernels=True, on_gpu=True) == gpu


def test_plain_types_are_stored_as_they_are() -> None:
    assert choose_storage(30, has_kernels=True, on_gpu=False) is None
