"""Weights packed as other quantizers publish them, written from their formats.

Each function returns the tensors of a module, and the weight that the format's own formula gives,
before it is rounded to 16 bits: (q - z) s for integers.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from tests import tiny

# the numbers of E2M1, by their four bits
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

# the column of each number in a word of AutoAWQ
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """tensors: the tensors of a module, without its path. weight: [out, in] in float32. It is exact
    for integers with scales of 16 bits."""

    tensors: Mapping[str, mx.array]
    weight: np.ndarray


Pack = Callable[[np.random.Generator, int, int], Packed]


def awq(rng: np.random.Generator, outputs: int, inputs: int, group: int = 32) -> Packed:
    """AutoAWQ, WQLinear_GEMM: qweight [in, out / 8], qzeros [groups, out / 8], scales [groups,
    out]."""
    codes, zeros, scales, weight = _draw_integers(rng, outputs, inputs, group, bits=4)

    def pack(numbers: np.ndarray) -> mx.array:
        columns = numbers.T.reshape(numbers.shape[1], -1, 8)
        words = sum(
            columns[..., column].astype(np.uint32) << np.uint32(4 * place)
            for place, column in enumerate(_AWQ_ORDER)
        )
        return mx.array(np.asarray(words, np.uint32).view(np.int32))

    tensors = {
        "qweight": pack(codes),
        "qzeros": pack(zeros),
        "scales": mx.array(scales.T, mx.float16),
    }
    return Packed(tensors=tensors, weight=weight)


def gptq(
    rng: np.random.Generator,
    outputs: int,
    inputs: int,
    group: int = 32,
    *,
    bits: int = 4,
    symmetric: bool = False,
    stored_offset: int = 1,
    act_order: bool = False,
) -> Packed:
    """GPTQ: qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out],
    g_idx [in]. act_order: whether inputs are assigned to groups in a different order."""
    codes, zeros, scales, weight = _draw_integers(
        rng, outputs, inputs, group, bits=bits, symmetric=symmetric
    )
    groups = np.arange(inputs, dtype=np.int32) // group
    if act_order:
        groups = rng.permutation(groups)
        weight = _dequantize(codes, zeros[:, groups], scales[:, groups])
    stored = (zeros.astype(np.int64) - stored_offset) % (1 << bits)
    tensors = {
        "qweight": mx.array(np.ascontiguousarray(pack_words(codes, bits).T)),
        "qzeros": mx.array(pack_words(stored.T, bits)),
        "scales": mx.array(np.ascontiguousarray(scales.T), mx.float16),
        "g_idx": mx.array(groups),
    }
    return Packed(tensors=tensors, weight=weight)


def pack_quantized(
    rng: np.random.Generator,
    outputs: int,
    inputs: int,
    group: int = 32,
    *,
    bits: int = 4,
    symmetric: bool = True,
    dtype: mx.Dtype = mx.bfloat16,
) -> Packed:
    """compressed-tensors, pack-quantized: signed numbers plus 2^(bits - 1), [out, in * bits / 32];
    zero points are packed along the outputs."""
    codes, zeros, scales, weight = _draw_integers(
        rng, outputs, inputs, group, bits=bits, symmetric=symmetric, dtype=dtype
    )
    tensors = {
        "weight_packed": mx.array(pack_words(codes, bits)),
        "weight_scale": mx.array(scales, dtype),
        "weight_shape": mx.array([outputs, inputs], mx.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = mx.array(np.ascontiguousarray(pack_words(zeros.T, bits).T))
    return Packed(tensors=tensors, weight=weight)


def int_quantized(rng: np.random.Generator, outputs: int, inputs: int) -> Packed:
    """compressed-tensors, int-quantized: int8, with one scale per output."""
    codes, _, scales, weight = _draw_integers(
        rng, outputs, inputs, inputs, bits=8, symmetric=True, dtype=mx.bfloat16
    )
    signed = (codes.astype(np.int16) - 128).astype(np.int8)
    return Packed(
        tensors={"weight": mx.array(signed), "weight_scale": mx.array(scales, mx.bfloat16)},
        weight=weight,
    )


def fp8(
    rng: np.random.Generator,
    outputs: int,
    inputs: int,
    block: tuple[int, int] = (32, 32),
    *,
    name: str = "weight_scale_inv",
    exponents: bool = False,
    shape: tuple[int, ...] | None = None,
) -> Packed:
    """E4M3 with float32 scales of blocks. exponents: whether scales are
    powers of two. shape: another shape of the scales."""
    weight = mx.to_fp8(mx.array(rng.standard_normal((outputs, inputs)).astype(np.float32)))
    rows, columns = (
        -(-length // step) for length, step in zip((outputs, inputs), block, strict=True)
    )
    scales = (rng.random((rows, columns)) + 0.5).astype(np.float32) / inputs**0.5
    if exponents:
        scales = np.exp2(np.round(np.log2(scales))).astype(np.float32)
    each = scales.repeat(block[0], 0)[:outputs].repeat(block[1], 1)[:, :inputs]
    plain = mx.from_fp8(weight, dtype=mx.float32) * mx.array(each)
    stored = scales if shape is None else scales.reshape(shape)
    return Packed(tensors={"weight": weight, name: mx.array(stored)}, weight=np.array(plain))


def nvfp4(
    rng: np.random.Generator, outputs: int, inputs: int, *, published_by: str = "modelopt"
) -> Packed:
    """Bytes of two E2M1 numbers, the first in the lower bits; E4M3 scales of 16 numbers; ModelOpt
    stores the factor of all numbers, compressed-tensors its inverse."""
    codes = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    scales = mx.to_fp8(
        mx.array((rng.random((outputs, inputs // 16)) * 200 + 50).astype(np.float32))
    )
    factor = np.float32(0.0078125 / inputs**0.5)
    packed = mx.array(codes[:, ::2] | (codes[:, 1::2] << 4))
    each = np.array(mx.from_fp8(scales, dtype=mx.float32)).repeat(16, 1)
    weight = (E2M1[codes] * each * factor).astype(np.float32)
    if published_by == "modelopt":
        tensors = {
            "weight": packed,
            "weight_scale": scales,
            "weight_scale_2": mx.array(float(factor)),
            "input_scale": mx.array(0.5),
        }
    else:
        tensors = {
            "weight_packed": packed,
            "weight_scale": scales,
            "weight_global_scale": mx.array([float(1 / factor)]),
            "input_global_scale": mx.array([2.0]),
        }
    return Packed(tensors=tensors, weight=weight)


def mxfp4(rng: np.random.Generator, outputs: int, inputs: int) -> Packed:
    """compressed-tensors, mxfp4-pack-quantized: E8M0 scales of 32 numbers."""
    codes = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    exponents = rng.integers(121, 125, (outputs, inputs // 32)).astype(np.uint8)
    each = np.exp2(exponents.astype(np.float32) - 127).repeat(32, 1)
    tensors = {
        "weight_packed": mx.array(codes[:, ::2] | (codes[:, 1::2] << 4)),
        "weight_scale": mx.array(exponents),
    }
    return Packed(tensors=tensors, weight=E2M1[codes] * each)


def write_fp8(folder: Path) -> Path:
    """Writes the tiny model with linear layers in fp8, as DeepSeek publishes them."""
    tiny.write(folder)
    [shard] = folder.glob("*.safetensors")
    tensors: dict[str, mx.array] = {}
    for name, array in cast("dict[str, mx.array]", mx.load(str(shard))).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = array
            continue
        scale = mx.abs(array).max(keepdims=True) / 448
        tensors |= {name: mx.to_fp8(array / scale), f"{name}_scale_inv": scale}
    mx.save_safetensors(str(shard), tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pack_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Packs unsigned numbers [rows, columns] into int32 words, the first in the lowest bits. The
    last word of a row is filled with zeros."""
    each = 32 // bits
    padded = np.pad(numbers.astype(np.uint32), ((0, 0), (0, -numbers.shape[1] % each)))
    words = padded.reshape(len(numbers), -1, each) << (np.arange(each, dtype=np.uint32) * bits)
    return np.bitwise_or.reduce(words, axis=-1).astype(np.uint32).view(np.int32)


def _draw_integers(
    rng: np.random.Generator,
    outputs: int,
    inputs: int,
    group: int,
    *,
    bits: int,
    symmetric: bool = False,
    dtype: mx.Dtype = mx.float16,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes [out, in], zeros and scales [out, groups] in float32, and the weight. dtype:
    the type to which the scales are rounded."""
    shape, most = (outputs, inputs // group), 1 << bits
    codes = rng.integers(0, most, (outputs, inputs)).astype(np.uint8)
    middle = np.full(shape, most // 2)
    zeros = middle if symmetric else rng.integers(0, most, shape)
    drawn = ((rng.random(shape) + 0.5) / inputs**0.5 * 4 / most).astype(np.float32)
    scales = np.array(mx.array(drawn, dtype).astype(mx.float32))
    weight = _dequantize(codes, zeros.repeat(group, 1), scales.repeat(group, 1))
    return codes, zeros.astype(np.uint8), scales, weight


def _dequantize(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return ((codes.astype(np.float64) - zeros) * scales.astype(np.float64)).astype(np.float32)
