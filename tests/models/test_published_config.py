"""The `quantization_config` of other quantizers: the supported methods, and the facts that the
tensors do not show."""

from collections.abc import Mapping
from typing import Any

import pytest

from models.checkpoint_config import find_unsupported_method
from models.published_config import read_published_config

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def compressed(*bits: int, **changes: Any) -> dict[str, Any]:
    groups = {
        f"group_{number}": {"targets": ["Linear"], "weights": {"num_bits": each, "type": "int"}}
        for number, each in enumerate(bits)
    }
    settings = {"format": "pack-quantized", "config_groups": groups, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", **settings, **changes}


@pytest.mark.parametrize(
    "settings",
    [
        AWQ,
        {**AWQ, "version": "GEMM"},
        GPTQ,
        {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
        compressed(4),
        compressed(4, 8, format="mixed-precision"),
        compressed(4, sparsity_config={"format": "dense"}, transform_config={}),
        FP8,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
    ],
)
def test_formats_that_are_converted_are_supported(settings: Mapping[str, Any]) -> None:
    assert find_unsupported_method({"quantization_config": settings}) is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({**AWQ, "version": "gemv"}, "'awq' are not supported with the layout 'gemv': use"),
        ({**AWQ, "bits": 3}, "'awq' are not supported with 3 bits"),
        ({**GPTQ, "bits": 3}, "'gptq' are not supported with 3 bits"),
        ({**GPTQ, "bits": None}, "'gptq' are not supported with None bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "with the layout 'marlin'"),
        (compressed(4, format="marlin-24"), "with the format 'marlin-24'"),
        (compressed(3), "'compressed-tensors' are not supported with 3 bits"),
        (compressed(4, sparsity_config={"format": "sparse-24-bitmask"}), "a sparsity_config"),
        (
            compressed(4, transform_config={"config_groups": {"u": {"type": "hadamard"}}}),
            "with a transform_config",
        ),
        ({**FP8, "fmt": "e5m2"}, "'fp8' are not supported with the type 'e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ'"),
        ({"quant_method": "modelopt"}, "with quant_algo None"),
    ],
)
def test_the_error_for_another_format_names_it(settings: Mapping[str, Any], problem: str) -> None:
    found = find_unsupported_method({"quantization_config": settings})
    assert found is not None
    assert problem in found
    assert found.endswith("mlx_lm.convert")


def test_the_facts_that_tensors_do_not_show_are_read() -> None:
    read = read_published_config({"torch_dtype": "float16", "quantization_config": FP8})
    assert (read.dtype, read.block, read.has_exponent_scales) == ("float16", (128, 128), False)
    read = read_published_config({"quantization_config": {**FP8, "scale_fmt": "ue8m0"}})
    assert (read.dtype, read.has_exponent_scales) == ("bfloat16", True)
    read = read_published_config({"quantization_config": compressed(4)})
    assert (read.bits, read.zero_offset) == (4, 1)
    assert read_published_config({"quantization_config": compressed(4, 8)}).bits is None


@pytest.mark.parametrize(
    "value", [None, [], "x", {"config_groups": [1]}, {"config_groups": {"a": 1}}]
)
def test_a_config_of_another_shape_has_the_defaults(value: Any) -> None:
    assert read_published_config({"quantization_config": value}) == read_published_config({})


@pytest.mark.parametrize("block", [[128], [0, 128], ["a", "b"], "ab", {}])
def test_an_invalid_block_is_ignored(block: Any) -> None:
    settings = {**FP8, "weight_block_size": block}
    assert read_published_config({"quantization_config": settings}).block is None
