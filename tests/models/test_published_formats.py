"""Formats of other quantizers: the numbers of a converted weight match the format's formula bit by
bit."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures
from models.base import ModelError
from models.nvfp4 import MAX_NVFP4
from models.published_formats import convert_published
from tests.models import parity, published_weights
from tests.models.published_weights import Pack, Packed
from tests.models.test_llama import TINY
from tests.rows import rows

OUTPUTS, INPUTS = 48, 128

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
GPTQ_V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


W4A16 = compressed("pack-quantized", num_bits=4, type="int", symmetric=True, group_size=32)
W8A16 = compressed("pack-quantized", num_bits=8, type="int", symmetric=True, group_size=32)

# the name of a case -> quantization_config, the tensors, the name of MLX's packing
FORMATS: Mapping[str, tuple[Mapping[str, Any], Pack, str]] = {
    "awq": (AWQ, published_weights.awq, "4-bit affine"),
    "awq in groups of 64": (AWQ, partial(published_weights.awq, group=64), "4-bit affine"),
    "awq in one group": (AWQ, partial(published_weights.awq, group=INPUTS), "4-bit affine"),
    "awq in groups of 16": (AWQ, partial(published_weights.awq, group=16), "float16"),
    "gptq": (GPTQ, published_weights.gptq, "4-bit affine"),
    "gptq, symmetric": (GPTQ, partial(published_weights.gptq, symmetric=True), "4-bit affine"),
    "gptq of version 2": (
        GPTQ_V2,
        partial(published_weights.gptq, stored_offset=0),
        "4-bit affine",
    ),
    "gptq with 8 bits": (
        {**GPTQ, "bits": 8},
        partial(published_weights.gptq, bits=8),
        "8-bit affine",
    ),
    "gptq with 2 bits": (
        {**GPTQ, "bits": 2},
        partial(published_weights.gptq, bits=2),
        "2-bit affine",
    ),
    "gptq with the order of activations": (
        {**GPTQ, "desc_act": True},
        partial(published_weights.gptq, act_order=True),
        "float16",
    ),
    "w4a16": (W4A16, published_weights.pack_quantized, "4-bit affine"),
    "w4a16, asymmetric": (
        W4A16,
        partial(published_weights.pack_quantized, symmetric=False),
        "4-bit affine",
    ),
    "w4a16 in float16": (
        W4A16,
        partial(published_weights.pack_quantized, symmetric=False, dtype=mx.float16),
        "4-bit affine",
    ),
    "w4a16 per channel": (
        W4A16,
        partial(published_weights.pack_quantized, group=INPUTS),
        "4-bit affine",
    ),
    "w8a16": (W8A16, partial(published_weights.pack_quantized, bits=8), "8-bit affine"),
    "int8": (compressed("int-quantized"), published_weights.int_quantized, "8-bit affine"),
    "fp8 blocks": (FP8, published_weights.fp8, "bfloat16"),
    "fp8 blocks that do not divide the weight": (
        {**FP8, "weight_block_size": [40, 100]},
        partial(published_weights.fp8, block=(40, 100)),
        "bfloat16",
    ),
    "fp8 blocks with powers of two": (
        {**FP8, "scale_fmt": "ue8m0"},
        partial(published_weights.fp8, exponents=True),
        "mxfp8",
    ),
    "fp8 per channel": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        partial(published_weights.fp8, block=(1, INPUTS), name="weight_scale"),
        "bfloat16",
    ),
    "fp8 per tensor": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        partial(published_weights.fp8, block=(OUTPUTS, INPUTS), name="weight_scale", shape=()),
        "bfloat16",
    ),
    "nvfp4 of ModelOpt": (MODELOPT, published_weights.nvfp4, "nvfp4"),
    "nvfp4 of compressed-tensors": (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float"),
        partial(published_weights.nvfp4, published_by="compressed-tensors"),
        "nvfp4",
    ),
    "mxfp4": (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float"),
        published_weights.mxfp4,
        "mxfp4",
    ),
}


def pack(case: str, outputs: int = OUTPUTS, inputs: int = INPUTS, seed: int = 0) -> Packed:
    return FORMATS[case][1](np.random.default_rng(seed), outputs, inputs)


def convert(
    tensors: Mapping[str, mx.array], settings: Mapping[str, Any]
) -> tuple[Mapping[str, mx.array], str]:
    named = {f"layer.{part}": array for part, array in tensors.items()}
    converted, conversion = convert_published({"quantization_config": settings}, named)
    assert conversion is not None
    [((_, packing), count)] = conversion.counts.items()
    assert count == 1
    return {name.removeprefix("layer."): array for name, array in converted.items()}, packing


def dequantize(parts: Mapping[str, mx.array], width: int) -> np.ndarray:
    """The numbers of a weight in MLX's packing, in float32."""
    if "scales" not in parts:
        return np.array(parts["weight"].astype(mx.float32))
    weight, scales = parts["weight"], parts["scales"]
    bits, group = weight.shape[-1] * 32 // width, width // scales.shape[-1]
    if "biases" in parts:
        plain = mx.dequantize(
            weight,
            scales.astype(mx.float32),
            parts["biases"].astype(mx.float32),
            group_size=group,
            bits=bits,
        )
        return np.array(plain.astype(mx.float32))
    mode = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}[bits, group]
    plain = mx.dequantize(weight, scales, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    return np.array(plain * (parts["global_scale"] / MAX_NVFP4 if "global_scale" in parts else 1))


@pytest.mark.parametrize("case", FORMATS)
def test_the_numbers_are_those_of_the_formula_of_the_format(case: str) -> None:
    settings, _, expected = FORMATS[case]
    packed = pack(case)
    parts, packing = convert(packed.tensors, settings)
    assert packing == expected
    found, exact = dequantize(parts, INPUTS), packed.weight
    if packing in ("bfloat16", "float16"):
        exact = mx.array(exact).astype(parts["weight"].dtype).astype(mx.float32)
    if packing == "nvfp4":  # the factor is multiplied in a different order
        np.testing.assert_allclose(found, exact, rtol=5e-7)
    else:
        np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize("case", FORMATS)
def test_a_file_without_content_has_the_same_packing(case: str) -> None:
    """The memory of a model is estimated before it is downloaded. With the order of activations,
    the groups are only known afterwards."""
    settings, _, expected = FORMATS[case]
    tensors = {part: mx.zeros_like(array) for part, array in pack(case).tensors.items()}
    _, packing = convert(tensors, settings)
    assert packing == expected


def test_scales_of_float32_round_the_sum_once_more() -> None:
    packed = published_weights.pack_quantized(
        np.random.default_rng(0), OUTPUTS, INPUTS, dtype=mx.float32
    )
    parts, _ = convert(packed.tensors, W4A16)
    largest = float(parts["scales"].max()) * 8
    np.testing.assert_allclose(dequantize(parts, INPUTS), packed.weight, atol=largest * 2**-23)


def test_biases_are_exact_in_the_type_of_the_scales_if_the_zero_points_are_symmetric() -> None:
    packed = published_weights.pack_quantized(
        np.random.default_rng(0), OUTPUTS, INPUTS, dtype=mx.float16
    )
    parts, _ = convert(packed.tensors, W4A16)
    assert parts["scales"].dtype == parts["biases"].dtype == mx.float16
    np.testing.assert_array_equal(
        np.array(parts["biases"], np.float64), -8 * np.array(parts["scales"], np.float64)
    )


def test_the_bits_of_modules_that_differ_follow_from_the_stored_shapes() -> None:
    both = {
        "format": "pack-quantized",
        "quant_method": "compressed-tensors",
        "config_groups": {
            f"group_{bits}": {"weights": {"num_bits": bits, "type": "int"}} for bits in (4, 8)
        },
    }
    for case, settings in (("w4a16", W4A16), ("w8a16", W8A16)):
        tensors = pack(case).tensors
        expected, packing = convert(tensors, settings)
        found, own = convert(tensors, both)
        assert own == packing
        for part, array in expected.items():
            assert mx.array_equal(found[part], array)


@pytest.mark.parametrize("block", [(128, 128), (128, 1), (1, 160), (300, 64), (25, 160)])
def test_blocks_that_config_json_does_not_declare_have_a_usual_length(
    block: tuple[int, int],
) -> None:
    packed = published_weights.fp8(np.random.default_rng(0), 300, 160, block)
    parts, _ = convert(packed.tensors, {"quant_method": "fp8"})
    expected = mx.array(packed.weight).astype(mx.bfloat16)
    assert mx.array_equal(parts["weight"], expected).item()


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 3, 2)])
def test_fused_experts_have_scales_without_a_module(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    weight = mx.to_fp8(mx.array(rng.standard_normal((2, 96, 64)).astype(np.float32)))
    scales = mx.array((rng.random(shape) + 0.5).astype(np.float32))
    tensors = {"mlp.experts.gate_up_proj": weight, "mlp.experts.gate_up_proj_scale_inv": scales}
    converted, _ = convert_published({"quantization_config": FP8}, tensors)
    assert list(converted) == ["mlp.experts.gate_up_proj"]
    each = np.array(scales).repeat(96 // shape[1], 1).repeat(64 // shape[2], 2)
    expected = mx.from_fp8(weight, dtype=mx.float32) * mx.array(each)
    np.testing.assert_array_equal(
        converted["mlp.experts.gate_up_proj"].astype(mx.float32),
        expected.astype(mx.bfloat16).astype(mx.float32),
    )


@pytest.mark.parametrize("case", ["w4a16", "nvfp4 of ModelOpt", "fp8 blocks with powers of two"])
def test_a_projection_that_would_be_quantized_again_is_converted_to_16_bits(case: str) -> None:
    packed = pack(case)
    named = {f"self_attn.kv_b_proj.{part}": array for part, array in packed.tensors.items()}
    converted, _ = convert_published({"quantization_config": FORMATS[case][0]}, named)
    assert list(converted) == ["self_attn.kv_b_proj.weight"]
    expected = mx.array(packed.weight).astype(mx.bfloat16)
    np.testing.assert_array_equal(
        converted["self_attn.kv_b_proj.weight"].astype(mx.float32), expected.astype(mx.float32)
    )


def test_a_checkpoint_in_mlx_packings_is_unchanged() -> None:
    weights = {
        "layer.weight": mx.zeros((4, 8), mx.uint32),
        "layer.scales": mx.zeros((4, 2)),
        "layer.biases": mx.zeros((4, 2)),
        "norm.weight": mx.ones((4,)),
        # an ordinary tensor of a model
        "attn.k_scale": mx.ones((1,)),
    }
    assert convert_published({}, weights) == (weights, None)


def change(case: str, part: str, array: mx.array | None) -> Mapping[str, mx.array]:
    """The tensors of a case with one that is replaced or missing."""
    tensors = {**pack(case).tensors, part: array}
    return {name: each for name, each in tensors.items() if each is not None}


@pytest.mark.parametrize(
    ("case", "part", "array", "message"),
    [
        ("awq", "qzeros", None, "the checkpoint lacks layer.qzeros"),
        ("awq", "qzeros", mx.zeros((4, 5), mx.int32), r"layer.qzeros has the shape \[4, 5\]"),
        ("awq", "qweight", mx.zeros((128, 5), mx.int32), "has 5 words in a row for 48 outputs"),
        ("awq", "qweight", mx.zeros((128, 6)), "layer.qweight is float32, but must be int32"),
        ("awq", "scales", mx.zeros((48,)), "layer.scales has 1 axes instead of 2"),
        ("awq", "scales", mx.zeros((0, 48)), "layer.scales is empty"),
        ("gptq", "qzeros", mx.zeros((4, 9), mx.int32), r"layer.qzeros has the shape \[4, 9\]"),
        ("gptq", "g_idx", mx.zeros((7,), mx.int32), "layer.g_idx does not assign 128 inputs to 4"),
        ("gptq", "g_idx", mx.full((128,), 4), "layer.g_idx does not assign 128 inputs to 4"),
        ("gptq", "g_idx", mx.full((128,), -1), "layer.g_idx does not assign 128 inputs to 4"),
        ("w4a16", "weight_scale", None, "the checkpoint lacks layer.weight_scale"),
        ("w4a16", "weight_scale", mx.zeros((3, 4)), r"weight_scale has the shape \[3, 4\]"),
        ("w4a16", "weight_scale", mx.zeros((48, 3)), "128 inputs cannot be divided into 3 groups"),
        ("w4a16", "weight_packed", mx.zeros((48, 16)), "layer.weight_packed is float32"),
        (
            "w4a16, asymmetric",
            "weight_zero_point",
            mx.zeros((48, 4), mx.int32),
            r"layer.weight_zero_point has the shape \[48, 4\]",
        ),
        ("int8", "weight_zero_point", mx.zeros((5,), mx.int8), "layer.weight_zero_point has"),
        ("fp8 blocks", "weight_scale_inv", mx.zeros((3, 3)), r"has the shape \[3, 3\] for"),
        ("fp8 blocks", "weight_scale_inv", mx.zeros((2, 2, 2)), r"has the shape \[2, 2, 2\] for"),
        (
            "fp8 blocks with powers of two",
            "weight_scale_inv",
            mx.full((2, 4), 0.3),
            "is declared as ue8m0, but has numbers that are not powers of two",
        ),
        ("nvfp4 of compressed-tensors", "weight_scale", None, "lacks layer.weight_scale"),
        ("nvfp4 of ModelOpt", "weight_scale", mx.zeros((48, 8)), "has the shape"),
        ("nvfp4 of ModelOpt", "weight_scale_2", mx.zeros((3,)), "has 3 numbers instead of one"),
        ("nvfp4 of ModelOpt", "pre_quant_scale", mx.zeros((3,)), "would change the input"),
    ],
)
def test_the_error_for_contradictory_tensors_names_one(
    case: str, part: str, array: mx.array | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        convert(change(case, part, array), FORMATS[case][0])


@pytest.mark.parametrize(
    ("case", "most"), [("awq", 6), ("gptq", 2), ("w4a16", 1), ("fp8 blocks", 9)]
)
def test_converting_a_weight_needs_a_few_bytes_per_number(case: str, most: float) -> None:
    """Weights are converted one by one, so this is the peak of a load above the model."""
    size = 1024
    packed = pack(case, size, size)
    mx.eval(list(packed.tensors.values()))
    parts, _ = convert(packed.tensors, FORMATS[case][0])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for array in parts.values():
        mx.eval(array)
    assert mx.get_peak_memory() - before < most * size**2


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@rows("declared", ["config.json", "text_config", "another file"])
@pytest.mark.parametrize(
    "case", ["awq", "gptq", "w4a16", "int8", "fp8 blocks", "nvfp4 of ModelOpt"]
)
def test_a_model_has_the_logits_of_the_same_model_with_plain_weights(
    case: str, declared: str
) -> None:
    """Another file is, for example, hf_quant_config.json, which is not read: the tensors show the
    format."""
    config = {**TINY, "intermediate_size": 128}
    plain: dict[str, mx.array] = {}
    published: dict[str, mx.array] = {}
    for number, (name, array) in enumerate(draw(config).items()):
        path, _, _ = name.rpartition(".")
        if path.rpartition(".")[2] not in PROJECTIONS:
            plain[name] = published[name] = array
            continue
        packed = pack(case, *array.shape, seed=number)
        rounds = FORMATS[case][2] == "bfloat16"
        plain[name] = mx.array(packed.weight).astype(mx.bfloat16 if rounds else mx.float32)
        published |= {f"{path}.{part}": tensor for part, tensor in packed.tensors.items()}
    published["model.layers.0.self_attn.k_scale"] = mx.array([1.0])
    settings = {**config, "quantization_config": FORMATS[case][0]}
    if declared == "text_config":
        published = {f"language_model.{name}": array for name, array in published.items()}
        settings = {"model_type": "sees", "vision_config": {}, "text_config": settings}
    elif declared == "another file":
        del settings["quantization_config"]
        if case == "gptq":
            with pytest.raises(ModelError, match=r"\.qzeros has .*: add quantization_config with"):
                architectures.build(settings, published)
            return
    found = architectures.build(settings, published)
    conversion = architectures.get_conversion(found)
    assert conversion is not None
    assert conversion.describe().startswith("14 weights from ")
    assert conversion.is_larger is (case == "fp8 blocks")
    model = architectures.build(config, plain)
    np.testing.assert_allclose(
        parity.prefill(found, [5, 50, 17, 99], [4]),
        parity.prefill(model, [5, 50, 17, 99], [4]),
        atol=1e-4,
    )


def draw(config: Mapping[str, Any]) -> dict[str, mx.array]:
    from mlx.utils import tree_flatten

    from models import llama

    model = llama.Model(llama.Config.from_dict(config))
    parity.draw_weights(model, seed=0)
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)
