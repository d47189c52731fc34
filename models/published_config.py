"""How config.json describes weights that other quantizers published: AutoAWQ, GPTQ,
compressed-tensors, ModelOpt, fp8.

Knows: the keys of `quantization_config`, which formats models/published_formats.py converts. Must
not know: tensors, MLX. Commands that list models import this module, and not MLX.

Sources: the configs that AutoAWQ 0.2, GPTQModel 7, compressed-tensors 0.20, ModelOpt 0.47 and
transformers 5 write.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

PACKED_BITS = (2, 4, 8)

# formats of compressed-tensors; "dense" weights are not quantized
_CT_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_MODELOPT_ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")
_GPTQ_LAYOUTS = ("gptq", "gptq_v2")

_ADVICE = "use an MLX version of the model, or convert the unquantized model with mlx_lm.convert"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedConfig:
    """The facts that the tensors of a checkpoint do not show.

    dtype: the type of weights for which MLX has no packing, "bfloat16" or "float16". zero_offset:
    the difference of a zero point of GPTQ and the stored number; None if it is unknown. bits: the
    number of bits of packed weights, if all have the same. block: the rows and columns of a block
    with one scale. has_act_order: whether inputs may be assigned to groups in any order.
    has_exponent_scales: whether scales are declared to be powers of two.
    """

    dtype: str
    zero_offset: int | None
    bits: int | None
    block: tuple[int, int] | None
    has_act_order: bool
    has_exponent_scales: bool


def find_unsupported_format(settings: Mapping[str, Any]) -> str | None:
    """Returns why the format that `quantization_config` declares is not supported, or None."""
    method = settings.get("quant_method")
    find = _METHODS.get(method) if isinstance(method, str) else None
    if find is None:
        return f"weights quantized with {method!r} are not supported: {_ADVICE}"
    if problem := find(settings):
        return f"weights quantized with {method!r} are not supported with {problem}: {_ADVICE}"
    return None


def read_published_config(config: Mapping[str, Any]) -> PublishedConfig:
    """config: config.json. Missing and invalid keys have the defaults of the tools."""
    settings = _as_object(config.get("quantization_config"))
    weights = [_as_object(group.get("weights")) for group in _list_groups(settings)]
    bits = [group.get("num_bits") for group in weights]
    block = settings.get("weight_block_size") or next(
        (group["block_structure"] for group in weights if group.get("block_structure")), None
    )
    plain = config.get("dtype") or config.get("torch_dtype")
    offset = 0 if _gptq_layout(settings) == "gptq_v2" else 1
    return PublishedConfig(
        dtype="float16" if plain == "float16" else "bfloat16",
        zero_offset=offset if settings.get("quant_method") else None,
        bits=next((each for each in PACKED_BITS if bits and bits == [each] * len(bits)), None),
        block=_read_block(block),
        has_act_order=bool(settings.get("desc_act")) or any(g.get("actorder") for g in weights),
        has_exponent_scales=settings.get("scale_fmt") == "ue8m0",
    )


def _find_in_awq(settings: Mapping[str, Any]) -> str | None:
    bits, version = settings.get("bits", 4), settings.get("version", "gemm")
    if bits != 4:
        return f"{bits!r} bits"
    return None if str(version).lower() == "gemm" else f"the layout {version!r}"


def _find_in_gptq(settings: Mapping[str, Any]) -> str | None:
    bits, layout = settings.get("bits"), _gptq_layout(settings)
    if bits not in PACKED_BITS:
        return f"{bits!r} bits"
    return None if layout in _GPTQ_LAYOUTS else f"the layout {layout!r}"


def _find_in_compressed_tensors(settings: Mapping[str, Any]) -> str | None:
    groups = _list_groups(settings)
    formats = [settings.get("format"), *(group.get("format") for group in groups)]
    if unknown := [name for name in formats if name is not None and name not in _CT_FORMATS]:
        return f"the format {unknown[0]!r}"
    for key in ("sparsity_config", "transform_config"):
        declared = _as_object(settings.get(key))
        if declared.get("config_groups") or declared.get("format", "dense") != "dense":
            return f"a {key}"
    for group in groups:
        weights = _as_object(group.get("weights"))
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        if weights and kind == "int" and bits not in PACKED_BITS:
            return f"{bits!r} bits"
    return None


def _find_in_modelopt(settings: Mapping[str, Any]) -> str | None:
    algorithm = _as_object(settings.get("quantization", settings)).get("quant_algo")
    return None if algorithm in _MODELOPT_ALGORITHMS else f"quant_algo {algorithm!r}"


def _find_in_fp8(settings: Mapping[str, Any]) -> str | None:
    kind = settings.get("fmt", "e4m3")
    return None if kind in ("e4m3", "float8_e4m3fn") else f"the type {kind!r}"


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "awq": _find_in_awq,
    "compressed-tensors": _find_in_compressed_tensors,
    "fbgemm_fp8": _find_in_fp8,
    "fp8": _find_in_fp8,
    "gptq": _find_in_gptq,
    "modelopt": _find_in_modelopt,
}


def _gptq_layout(settings: Mapping[str, Any]) -> Any:
    return settings.get("checkpoint_format") or settings.get("format") or "gptq"


def _list_groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [_as_object(group) for group in _as_object(settings.get("config_groups")).values()]


def _read_block(block: Any) -> tuple[int, int] | None:
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case _:
            return None


def _as_object(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
