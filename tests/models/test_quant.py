"""The packing of a layer is inferred from its tensors."""

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from models.base import ModelError
from models.experts import Experts, QuantizedExpertLinear, SparseMoeBlock
from models.quant import (
    Packing,
    check_quant_method,
    infer_packing,
    quantize_model,
    replace_quantized_layers,
)
from tests.rows import rows

WIDTH = 384
KINDS = [
    *(Packing(group_size=g, bits=b, mode="affine") for g in (32, 64, 128) for b in range(1, 9)),
    Packing(group_size=32, bits=4, mode="mxfp4"),
    Packing(group_size=32, bits=8, mode="mxfp8"),
    Packing(group_size=16, bits=4, mode="nvfp4"),
]
KINDS = [kind for kind in KINDS if kind.bits != 7]


def tensors(path: str, weight: mx.array, kind: Packing) -> dict[str, mx.array]:
    parts = mx.quantize(weight, kind.group_size, kind.bits, mode=kind.mode)
    return {
        f"{path}.{part}": array
        for part, array in zip(("weight", "scales", "biases"), parts, strict=False)
    }


def dequantize(path: str, weights: dict[str, mx.array], kind: Packing) -> mx.array:
    return mx.dequantize(
        weights[f"{path}.weight"],
        weights[f"{path}.scales"],
        weights.get(f"{path}.biases"),
        kind.group_size,
        kind.bits,
        kind.mode,
        dtype=mx.float32,
    )


def draw_weight(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 16, bias=False)
        self.b = nn.Linear(WIDTH, 16, bias=True)


@rows("kind", KINDS, ids=str)
def test_all_packings_of_mlx_are_distinguished(kind: Packing) -> None:
    assert infer_packing("q", WIDTH, tensors("q", draw_weight(16, WIDTH), kind)) == kind


@rows("kind", KINDS, ids=str)
def test_a_layer_equals_its_dequantized_weight(kind: Packing) -> None:
    pair = Pair()
    weights = tensors("a", draw_weight(16, WIDTH), kind)
    assert replace_quantized_layers(pair, weights)
    pair.load_weights(list(weights.items()), strict=False)
    x = draw_weight(3, WIDTH)
    expected = x @ dequantize("a", weights, kind).T
    np.testing.assert_allclose(np.array(pair.a(x)), np.array(expected), rtol=1e-4, atol=1e-4)
    assert isinstance(pair.b, nn.Linear)


def test_four_bits_in_wide_groups_are_not_read_as_eight_bits_in_narrow_groups() -> None:
    """Words and scales have the same shapes: 4-bit rows of 512 in groups of 128, 8-bit rows of 256
    in groups of 64. Ollama's runner infers from shapes alone and reads both as the latter."""
    four = Packing(group_size=128, bits=4, mode="affine")
    eight = Packing(group_size=64, bits=8, mode="affine")
    wide, narrow = tensors("q", draw_weight(8, 512), four), tensors("q", draw_weight(8, 256), eight)
    assert [a.shape for a in wide.values()] == [a.shape for a in narrow.values()]
    assert infer_packing("q", 512, wide) == four
    assert infer_packing("q", 256, narrow) == eight


def test_stacked_experts_are_packed_like_other_layers() -> None:
    kind = Packing(group_size=32, bits=8, mode="mxfp8")
    experts, weights = Experts(64, 32, 4), tensors("up_proj", draw_weight(4, 32, 64), kind)
    replace_quantized_layers(experts, weights)
    assert isinstance(experts.up_proj, QuantizedExpertLinear)
    assert (experts.up_proj.bits, experts.up_proj.mode) == (8, "mxfp8")
    assert not isinstance(experts.down_proj, QuantizedExpertLinear)


def make_invalid(**parts: Any) -> dict[str, mx.array]:
    weights = tensors("q", draw_weight(8, 128), Packing(group_size=32, bits=4, mode="affine"))
    weights.update({f"q.{name}": array for name, array in parts.items()})
    return weights


@rows(
    ("weights", "message"),
    [
        (
            make_invalid(scales=mx.zeros((8, 8))),
            r"q.weight has a packing that MLX does not support: rows of 128 inputs in 16 words "
            r"with 8 scales \(float32\) correspond to 4 bits in groups of 16",
        ),
        (make_invalid(weight=mx.zeros((8, 28), mx.uint32)), "correspond to 7 bits in groups of 32"),
        (make_invalid(weight=mx.zeros((8, 17), mx.uint32)), r"correspond to 4\.25 bits"),
        (make_invalid(scales=mx.zeros((8, 3))), r"groups of 42\.6667"),
        (make_invalid(scales=mx.zeros((8, 0))), "with 0 scales"),
        (make_invalid(scales=mx.zeros(())), "with 0 scales"),
        (
            make_invalid(scales=mx.zeros((8, 2), mx.uint8)),
            r"2 scales \(uint8\) correspond to 4 bits in groups of 64",
        ),
        (make_invalid(scales=mx.zeros((8, 4), mx.int32)), r"\(int32\)"),
        (
            make_invalid(weight=mx.zeros((8, 128), mx.uint8)),
            "has scales, but is uint8 and not packed",
        ),
        (make_invalid(weight=mx.zeros((8, 128))), "has scales, but is float32 and not packed"),
        ({"q.scales": mx.zeros((8, 4))}, "has q.scales, but no q.weight"),
    ],
)
def test_an_unknown_packing_is_refused(weights: dict[str, mx.array], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        infer_packing("q", 128, weights)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 64)
        self.mlp = SparseMoeBlock(64, 128, 4, top_k=2, norm_topk_prob=True, shared_width=64)
        self.narrow = nn.Linear(48, 64)
        self.norm = nn.RMSNorm(64)
        self.lm_head = nn.Linear(64, 10, bias=False)


def test_matrices_are_quantized_but_not_routers_and_odd_widths() -> None:
    mixed = Mixed()
    quantize_model(mixed, 4)
    packed = {
        name for name, module in mixed.named_modules() if module.get("scales", None) is not None
    }
    experts = {f"mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down")}
    shared = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
    assert packed == {"embed_tokens", "lm_head", *experts, *shared}


def test_a_model_without_quantizable_weights_is_refused() -> None:
    with pytest.raises(ModelError, match="no weight has an input width divisible by 64"):
        quantize_model(nn.Linear(48, 64), 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_layer_equals_that_of_mlx(bits: int) -> None:
    pair = Pair()
    weight, bias = pair.b.weight, pair.b.bias
    quantize_model(pair, bits)
    layer: Any = pair.b
    kind = Packing(group_size=64, bits=bits, mode="affine")
    expected = tensors("b", weight, kind)
    assert mx.array_equal(layer.weight, expected["b.weight"])
    assert mx.array_equal(layer.scales, expected["b.scales"])
    assert mx.array_equal(layer.bias, bias)


@pytest.mark.parametrize("method", ["bitsandbytes", "bitnet", "hqq", "torchao", ["gptq"], 4])
def test_the_error_for_another_method_names_it(method: Any) -> None:
    config = {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 128}}
    with pytest.raises(ModelError, match=re.escape(f"quantized with {method!r} are")):
        check_quant_method(config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization": None, "quantization_config": None},
        {"quantization": {"group_size": 64, "bits": 4}},
        {"quantization_config": {"group_size": 64, "bits": 4}},
        # gpt-oss as published
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]}},
        # mlx-lm keeps the object of the source in addition to its own
        {
            "quantization": {"group_size": 64, "bits": 4},
            "quantization_config": {"quant_method": "fp8"},
        },
    ],
)
def test_supported_methods_are_accepted(config: dict[str, Any]) -> None:
    check_quant_method(config)
