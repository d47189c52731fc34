"""The weights in the blocks of GGUF: their exact values, and conversion to MLX's packings.

Knows: the memory layout of the blocks (ggml, ggml-quants.c). Must not know: files, layers,
architectures.

A row of a tensor consists of blocks. A block contains integers (codes) of a few bits, one scale per
group of 16 or 32 weights, and in some types one minimum per group. A weight is

    scale * (code - offset)    or    scale * code + bias

In the K types, scale and bias are themselves products of small integers and a float16 number of the
block. All products are exact in float32, so each weight is rounded at most once, and the values are
bit-identical to those of gguf-py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from models.base import ModelError
from models.gguf.ggml_types import GGML_TYPES, UNSUPPORTED_TYPES, GGMLType

_PLAIN_DTYPES: Mapping[int, mx.Dtype] = {0: mx.float32, 1: mx.float16, 30: mx.bfloat16}

_MXFP4 = 39

# the values of the codes of IQ4_NL and IQ4_XS
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# the values of the codes of MXFP4 (E2M1), doubled
_E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# the number of weights that `dequantize` computes at a time, so that temporary arrays are small
_WEIGHTS_PER_SLICE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class _Codes:
    """The codes of n blocks [n, groups, size] (integers of any type), and scales and biases [n,
    groups, 1] as float32. If there are no biases, `offset` is subtracted from the codes."""

    codes: mx.array
    scales: mx.array
    biases: mx.array | None = None
    offset: int = 0

    def values(self) -> mx.array:
        codes = self.codes.astype(mx.int16) - self.offset
        products = self.scales * codes.astype(mx.float32)
        return products if self.biases is None else products + self.biases


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinePacking:
    """A matrix in one of MLX's packings, as in `mx.quantize`. weight: uint32 [..., words]. scales:
    float32, or uint8 if the mode is "mxfp4"; [..., columns / group_size]. biases: like the scales;
    None if the mode has none."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str


def dequantize(raw: mx.array, type_id: int) -> mx.array:
    """Returns the weights as float32 [..., columns]. raw: uint8 [..., bytes per row], as in the
    file. Raises ModelError for an unsupported type or a
    partial block."""
    plain = _PLAIN_DTYPES.get(type_id)
    if plain is not None:
        return _check_rows(raw, type_id).view(plain).astype(mx.float32)
    kind, blocks = _split_blocks(raw, type_id)
    step = _WEIGHTS_PER_SLICE // kind.elements
    parts = [
        _DECODERS[type_id](blocks[i : i + step]).values().reshape(-1, kind.elements)
        for i in range(0, blocks.shape[0], step)
    ]
    values = mx.concatenate(parts) if len(parts) > 1 else parts[0]
    return values.reshape(*raw.shape[:-1], -1)


# type -> the bits of MLX's packing with exactly the same weights. MLX has no groups of 16 for these
# modes, so Q2_K, Q3_K and Q6_K have none. The values of IQ4_NL and IQ4_XS are integers of 8 bits.
_AFFINE_BITS: Mapping[int, int] = {2: 4, 3: 4, 6: 5, 7: 5, 8: 8, 12: 4, 13: 5, 20: 8, 23: 8}


def has_affine_packing(type_id: int) -> bool:
    """Returns whether `repack_affine` supports the type."""
    return type_id == _MXFP4 or type_id in _AFFINE_BITS


def repack_affine(raw: mx.array, type_id: int) -> AffinePacking:
    """Returns the same weights in MLX's packing with groups of 32. raw: uint8 [..., bytes per row],
    as in the file. `mx.dequantize` of the result is bit-identical to `dequantize`, except for the
    signs of zeros and, with MXFP4, the exponent 255 (NaN in MLX). Raises ModelError unless
    `has_affine_packing`."""
    kind, blocks = _split_blocks(raw, type_id)
    outer = raw.shape[:-1]
    if type_id == _MXFP4:
        words = _pack(_nibbles(blocks[:, 1:]).reshape(-1, 32), 4)
        return AffinePacking(
            weight=words.reshape(*outer, -1),
            scales=blocks[:, 0].reshape(*outer, -1),
            biases=None,
            group_size=32,
            bits=4,
            mode="mxfp4",
        )
    bits = _AFFINE_BITS.get(type_id)
    if bits is None:
        raise ModelError(f"MLX has no packing with the same weights as {kind.name}")
    found = _DECODERS[type_id](blocks)
    # the codes of some types are signed
    shift = 128 - found.offset if bits == 8 else 0
    codes = found.codes.astype(mx.int16) + shift if shift else found.codes
    biases = found.biases if found.biases is not None else found.scales * -(found.offset + shift)
    return AffinePacking(
        weight=_pack(codes.reshape(-1, 32), bits).reshape(*outer, -1),
        scales=found.scales.reshape(*outer, -1),
        biases=biases.reshape(*outer, -1),
        group_size=32,
        bits=bits,
        mode="affine",
    )


def _check_rows(raw: mx.array, type_id: int) -> mx.array:
    kind = _find_type(type_id)
    if raw.dtype != mx.uint8 or raw.ndim < 1 or raw.shape[-1] % kind.nbytes or not raw.size:
        raise ModelError(
            f"rows of {kind.name} must consist of blocks of {kind.nbytes} bytes, but have the "
            f"shape {list(raw.shape)}"
        )
    return raw


def _find_type(type_id: int) -> GGMLType:
    if (found := GGML_TYPES.get(type_id)) is not None:
        return found
    name = UNSUPPORTED_TYPES.get(type_id, f"unknown ({type_id})")
    raise ModelError(f"weights of the GGUF type {name} are not supported")


def _split_blocks(raw: mx.array, type_id: int) -> tuple[GGMLType, mx.array]:
    kind = _find_type(type_id)
    return kind, _check_rows(raw, type_id).reshape(-1, kind.nbytes)


def _pack(codes: mx.array, bits: int) -> mx.array:
    """Packs codes [n, 32] into uint32 words [n, bits], the first code in the lowest bits."""
    # eight codes take `bits` bytes
    shifts = mx.arange(8, dtype=mx.uint64) * bits
    eights = (codes.reshape(-1, 8).astype(mx.uint64) << shifts).sum(axis=-1, keepdims=True)
    packed = mx.contiguous(eights.view(mx.uint8)[:, :bits])
    return packed.reshape(codes.shape[0], -1).view(mx.uint32)


def _float16(blocks: mx.array, begin: int) -> mx.array:
    """Returns the float16 number at byte `begin` of each block, as float32 [n, 1, 1]."""
    number = mx.contiguous(blocks[:, begin : begin + 2]).view(mx.float16)
    return number.astype(mx.float32).reshape(-1, 1, 1)


def _nibbles(packed: mx.array) -> mx.array:
    """Converts bytes [n, 16 g] to codes [n, g, 32]: the low nibbles of sixteen bytes, then the high
    ones."""
    runs = packed.reshape(packed.shape[0], -1, 16)
    return mx.concatenate([runs & 15, runs >> 4], axis=-1)


def _long_nibbles(packed: mx.array) -> mx.array:
    """Converts bytes [n, 128] to codes [n, 8, 32]: the low nibbles of 32 bytes, then the high
    ones."""
    runs = packed.reshape(-1, 4, 32)
    return mx.stack([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _pairs_of_bits(packed: mx.array) -> mx.array:
    """Converts bytes [n, 64] to codes [n, 16, 16] of two bits. Four runs of 32 codes share 32
    bytes."""
    halves = packed.reshape(-1, 2, 1, 32)
    shifts = mx.array([0, 2, 4, 6], dtype=mx.uint8).reshape(1, 1, 4, 1)
    return ((halves >> shifts) & 3).reshape(-1, 16, 16)


def _bits(packed: mx.array) -> mx.array:
    """Converts bytes [n, 4] to single bits [n, 1, 32], the lowest first."""
    shifts = mx.arange(8, dtype=mx.uint8)
    return ((packed[:, :, None] >> shifts) & 1).reshape(-1, 1, 32)


def _k_scales(packed: mx.array) -> tuple[mx.array, mx.array]:
    """Returns the 6-bit scales and minima [n, 8, 1] of Q4_K and Q5_K as float32. packed: [n, 12]"""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = mx.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=-1)
    minima = mx.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1)
    return scales[..., None].astype(mx.float32), minima[..., None].astype(mx.float32)


def _decode_q4_0(blocks: mx.array) -> _Codes:
    return _Codes(codes=_nibbles(blocks[:, 2:]), scales=_float16(blocks, 0), offset=8)


def _decode_q4_1(blocks: mx.array) -> _Codes:
    return _Codes(
        codes=_nibbles(blocks[:, 4:]), scales=_float16(blocks, 0), biases=_float16(blocks, 2)
    )


def _decode_q5_0(blocks: mx.array) -> _Codes:
    codes = _nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return _Codes(codes=codes, scales=_float16(blocks, 0), offset=16)


def _decode_q5_1(blocks: mx.array) -> _Codes:
    codes = _nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return _Codes(codes=codes, scales=_float16(blocks, 0), biases=_float16(blocks, 2))


def _decode_q8_0(blocks: mx.array) -> _Codes:
    codes = mx.contiguous(blocks[:, 2:]).view(mx.int8)
    return _Codes(codes=codes[:, None], scales=_float16(blocks, 0))


def _decode_q4_k(blocks: mx.array) -> _Codes:
    scales, minima = _k_scales(blocks[:, 4:16])
    return _Codes(
        codes=_long_nibbles(blocks[:, 16:]),
        scales=_float16(blocks, 0) * scales,
        biases=-(_float16(blocks, 2) * minima),
    )


def _decode_q5_k(blocks: mx.array) -> _Codes:
    scales, minima = _k_scales(blocks[:, 4:16])
    shifts = mx.arange(8, dtype=mx.uint8)[:, None]
    high = (blocks[:, None, 16:48] >> shifts) & 1
    return _Codes(
        codes=_long_nibbles(blocks[:, 48:]) | (high << 4),
        scales=_float16(blocks, 0) * scales,
        biases=-(_float16(blocks, 2) * minima),
    )


def _decode_q6_k(blocks: mx.array) -> _Codes:
    # in each half: 64 bytes with the low nibbles of two runs of 32, then the high ones
    runs = blocks[:, :128].reshape(-1, 2, 64)
    low = mx.stack([runs & 15, runs >> 4], axis=2).reshape(-1, 16, 16)
    scales = mx.contiguous(blocks[:, 192:208]).view(mx.int8).astype(mx.float32)
    return _Codes(
        codes=low | (_pairs_of_bits(blocks[:, 128:192]) << 4),
        scales=_float16(blocks, 208) * scales[..., None],
        offset=32,
    )


def _decode_q2_k(blocks: mx.array) -> _Codes:
    packed = blocks[:, :16, None]
    return _Codes(
        codes=_pairs_of_bits(blocks[:, 16:80]),
        scales=_float16(blocks, 80) * (packed & 15).astype(mx.float32),
        biases=-(_float16(blocks, 82) * (packed >> 4).astype(mx.float32)),
    )


def _decode_q3_k(blocks: mx.array) -> _Codes:
    shifts = mx.arange(8, dtype=mx.uint8)[:, None]
    high = ((blocks[:, None, :32] >> shifts) & 1).reshape(-1, 16, 16)
    nibbles, pairs = blocks[:, 96:104], blocks[:, 104:108]
    low = mx.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    upper = mx.concatenate([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    scales = (low | (upper << 4)).astype(mx.int16) - 32
    return _Codes(
        codes=_pairs_of_bits(blocks[:, 32:96]) | (high << 2),
        scales=_float16(blocks, 108) * scales[..., None].astype(mx.float32),
        offset=4,
    )


def _decode_iq4_nl(blocks: mx.array) -> _Codes:
    codes = mx.array(_IQ4_VALUES, dtype=mx.int8)[_nibbles(blocks[:, 2:])]
    return _Codes(codes=codes, scales=_float16(blocks, 0))


def _decode_iq4_xs(blocks: mx.array) -> _Codes:
    upper = mx.contiguous(blocks[:, 2:4]).view(mx.uint16)
    upper = (upper >> (2 * mx.arange(8, dtype=mx.uint16))) & 3
    lower = blocks[:, 4:8, None]
    lower = mx.concatenate([lower & 15, lower >> 4], axis=-1).reshape(-1, 8)
    scales = lower.astype(mx.int16) + 16 * upper.astype(mx.int16) - 32
    return _Codes(
        codes=mx.array(_IQ4_VALUES, dtype=mx.int8)[_nibbles(blocks[:, 8:])],
        scales=_float16(blocks, 0) * scales[..., None].astype(mx.float32),
    )


def _decode_mxfp4(blocks: mx.array) -> _Codes:
    # half of 2^(e - 127), because the values are doubled; the two smallest are subnormal
    e = blocks[:, :1].astype(mx.uint32)
    bits = mx.where(e < 2, mx.array(0x200000, dtype=mx.uint32) << e, (e - 1) << 23)
    codes = mx.array(_E2M1_VALUES, dtype=mx.int8)[_nibbles(blocks[:, 1:])]
    return _Codes(codes=codes, scales=bits.view(mx.float32)[..., None])


_DECODERS: Mapping[int, Callable[[mx.array], _Codes]] = {
    2: _decode_q4_0,
    3: _decode_q4_1,
    6: _decode_q5_0,
    7: _decode_q5_1,
    8: _decode_q8_0,
    10: _decode_q2_k,
    11: _decode_q3_k,
    12: _decode_q4_k,
    13: _decode_q5_k,
    14: _decode_q6_k,
    20: _decode_iq4_nl,
    23: _decode_iq4_xs,
    _MXFP4: _decode_mxfp4,
}
