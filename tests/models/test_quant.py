"""How a layer is packed is what its tensors say."""

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

WIDTH = 384
KINDS = [
    *(Packing(group_size=g, bits=b, mode="affine") for g in (32, 64, 128) for b in range(1, 9)),
    Packing(group_size=32, bits=4, mode="mxfp4"),
    Packing(group_size=32, bits=8, mode="mxfp8"),
    Packing(group_size=16, bits=4, mode="nvfp4"),
]
KINDS = [kind for kind in KINDS if kind.bits != 7]


def tensors(path: str, plain: mx.array, kind: Packing) -> dict[str, mx.array]:
    parts = mx.quantize(plain, kind.group_size, kind.bits, mode=kind.mode)
    return {
        f"{path}.{part}": array
        for part, array in zip(("weight", "scales", "biases"), parts, strict=False)
    }


def restored(path: str, weights: dict[str, mx.array], kind: Packing) -> mx.array:
    return mx.dequantize(
        weights[f"{path}.weight"],
        weights[f"{path}.scales"],
        weights.get(f"{path}.biases"),
        kind.group_size,
        kind.bits,
        kind.mode,
        dtype=mx.float32,
    )


def plain(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 16, bias=False)
        self.b = nn.Linear(WIDTH, 16, bias=True)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_packing_that_mlx_has_is_told_from_all_others(kind: Packing) -> None:
    assert infer_packing("q", WIDTH, tensors("q", plain(16, WIDTH), kind)) == kind


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_layer_computes_what_its_restored_weight_computes(kind: Packing) -> None:
    pair = Pair()
    weights = tensors("a", plain(16, WIDTH), kind)
    assert replace_quantized_layers(pair, weights)
    pair.load_weights(list(weights.items()), strict=False)
    x = plain(3, WIDTH)
    wanted = x @ restored("a", weights, kind).T
    np.testing.assert_allclose(np.array(pair.a(x)), np.array(wanted), rtol=1e-4, atol=1e-4)
    assert isinstance(pair.b, nn.Linear)


def test_four_bits_in_wide_groups_are_not_taken_for_eight_bits_in_narrower_ones() -> None:
    """Words and scales have the same shapes: 4-bit rows of 512 in groups of 128, 8-bit rows of 256
    in groups of 64. Ollama's runner, which goes by shapes alone, takes both for the latter."""
    four = Packing(group_size=128, bits=4, mode="affine")
    eight = Packing(group_size=64, bits=8, mode="affine")
    wide, narrow = tensors("q", plain(8, 512), four), tensors("q", plain(8, 256), eight)
    assert [a.shape for a in wide.values()] == [a.shape for a in narrow.values()]
    assert infer_packing("q", 512, wide) == four
    assert infer_packing("q", 256, narrow) == eight


def test_stacked_experts_are_packed_like_any_other_layer() -> None:
    kind = Packing(group_size=32, bits=8, mode="mxfp8")
    experts, weights = Experts(64, 32, 4), tensors("up_proj", plain(4, 32, 64), kind)
    replace_quantized_layers(experts, weights)
    assert isinstance(experts.up_proj, QuantizedExpertLinear)
    assert (experts.up_proj.bits, experts.up_proj.mode) == (8, "mxfp8")
    assert not isinstance(experts.down_proj, QuantizedExpertLinear)


def spoilt(**parts: Any) -> dict[str, mx.array]:
    weights = tensors("q", plain(8, 128), Packing(group_size=32, bits=4, mode="affine"))
    weights.update({f"q.{name}": array for name, array in parts.items()})
    return weights


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        (
            spoilt(scales=mx.zeros((8, 8))),
            r"q.weight has a packing that MLX does not support: rows of 128 inputs in 16 words "
            r"with 8 scales \(float32\) are 4 bits in groups of 16",
        ),
        (spoilt(weight=mx.zeros((8, 28), mx.uint32)), "are 7 bits in groups of 32"),
        (spoilt(weight=mx.zeros((8, 17), mx.uint32)), r"are 4\.25 bits"),
        (spoilt(scales=mx.zeros((8, 3))), r"groups of 42\.6667"),
        (spoilt(scales=mx.zeros((8, 0))), "with 0 scales"),
        (spoilt(scales=mx.zeros(())), "with 0 scales"),
        (
            spoilt(scales=mx.zeros((8, 2), mx.uint8)),
            r"2 scales \(uint8\) are 4 bits in groups of 64",
        ),
        (spoilt(scales=mx.zeros((8, 4), mx.int32)), r"\(int32\)"),
        (spoilt(weight=mx.zeros((8, 128), mx.uint8)), "has scales, but is uint8 and not packed"),
        (spoilt(weight=mx.zeros((8, 128))), "has scales, but is float32 and not packed"),
        ({"q.scales": mx.zeros((8, 4))}, "has q.scales without a weight"),
    ],
)
def test_what_is_packed_in_no_known_way_is_refused(
    weights: dict[str, mx.array], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        infer_packing("q", 128, weights)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 64)
        self.mlp = SparseMoeBlock(64, 128, 4, top_k=2, norm_topk_prob=True, shared_width=64)
        self.narrow = nn.Linear(48, 64)
        self.norm = nn.RMSNorm(64)
        self.lm_head = nn.Linear(64, 10, bias=False)


def test_matrices_are_reduced_and_routers_and_odd_widths_are_not() -> None:
    mixed = Mixed()
    quantize_model(mixed, 4)
    packed = {
        name for name, module in mixed.named_modules() if module.get("scales", None) is not None
    }
    experts = {f"mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down")}
    shared = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
    assert packed == {"embed_tokens", "lm_head", *experts, *shared}


def test_what_has_nothing_to_reduce_is_refused() -> None:
    with pytest.raises(ModelError, match="no weight has an input width divisible by 64"):
        quantize_model(nn.Linear(48, 64), 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_reduced_layer_is_what_mlx_makes_of_it(bits: int) -> None:
    pair = Pair()
    weight, bias = pair.b.weight, pair.b.bias
    quantize_model(pair, bits)
    layer: Any = pair.b
    kind = Packing(group_size=64, bits=bits, mode="affine")
    wanted = tensors("b", weight, kind)
    assert mx.array_equal(layer.weight, wanted["b.weight"])
    assert mx.array_equal(layer.scales, wanted["b.scales"])
    assert mx.array_equal(layer.bias, bias)


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", "modelopt", "bitnet"]
)
def test_a_method_that_is_not_mlx_is_refused_by_name(method: str) -> None:
    config = {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 128}}
    with pytest.raises(ModelError, match=rf"quantised with '{method}' .* mlx_lm.convert"):
        check_quant_method(config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization": None, "quantization_config": None},
        {"quantization": {"group_size": 64, "bits": 4}},
        {"quantization_config": {"group_size": 64, "bits": 4}},
        # gpt-oss as it is published
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]}},
        # mlx-lm keeps the source's object beside its own
        {
            "quantization": {"group_size": 64, "bits": 4},
            "quantization_config": {"quant_method": "fp8"},
        },
    ],
)
def test_what_mlx_reads_is_let_through(config: dict[str, Any]) -> None:
    check_quant_method(config)
