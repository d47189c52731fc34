"""Weights as other quantizers publish them: converts them to MLX's packings, or to 16 bits.

Knows: how AutoAWQ, GPTQ, compressed-tensors, ModelOpt and the fp8 formats pack a weight. Must not
know: architectures, layers, files.

The numbers of a weight do not change. Where one of MLX's packings has the same numbers, the weight
is repacked, and otherwise converted to 16 bits, rounded once. A number q with the zero point z and
the scale s is s (q - z), and in MLX's affine packing s q + b, so b = -s z.

    format           tensors of a module                                          converted to
    AWQ              qweight [in, out / 8], columns 0 2 4 6 1 3 5 7 of a word     affine
    GPTQ             qweight [in * bits / 32, out], qzeros with z - 1             affine
      with g_idx     each input has its own group                                 16 bits
    pack-quantized   weight_packed [out, in * bits / 32]                          affine
    int-quantized    weight int8, one scale per row                               affine
    NVFP4            bytes of two numbers, a scale per 16, a global scale         nvfp4
    MXFP4, MXFP8     a power of two per 32                                        mxfp4, mxfp8
    fp8              weight E4M3, a scale per block, row or tensor                16 bits
      ue8m0          the scales are powers of two                                 mxfp8

On a CPU, b is float32, and therefore exact. On other devices, it has the type of the scales. Unless
all z are 2^(bits - 1), this rounds it, as in mlx-lm.

Nothing is evaluated, except `g_idx`, shapes, and scales that are declared to be powers of two. So
the memory of a model can be computed first, and a weight is converted when it is read.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from models.base import ModelError, dtype_name
from models.nvfp4 import MAX_NVFP4
from models.published_config import PACKED_BITS, PublishedConfig, read_published_config

_AFFINE_GROUP_SIZES = (128, 64, 32)
_MX_GROUP_SIZE, _NV_GROUP_SIZE = 32, 16

# the column of each number in a word of AWQ, from the lowest bits on
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)

# the lengths of blocks of fp8 weights if config.json does not declare them
_FP8_BLOCKS = (128, 64, 32)

# the tensors of a module; a module with one of the first is converted
_WEIGHTS = ("qweight", "weight_packed")
_SCALES = ("weight_scale", "weight_scale_inv")
_OTHERS = (
    "g_idx",
    "qzeros",
    "scales",
    "weight",
    "weight_g_idx",
    "weight_global_scale",
    "weight_scale_2",
    "weight_shape",
    "weight_zero_point",
)

# the suffix of the scales of a tensor that is not a module, as of fused experts
_TENSOR_SCALE = "_scale_inv"

# the scales of activations and of the KV cache, which stay unquantized
_ACTIVATION_SCALES = (
    "activation_scale",
    "input_global_scale",
    "input_scale",
    "input_scale_ub",
    "k_scale",
    "output_scale",
    "q_scale",
    "v_scale",
)

# parts that a model would have to apply to activations
_UNSUPPORTED_PARTS = ("pre_quant_scale", "input_zero_point", "svdquant_lora_a")

# Projections that models/mla.py transposes, which would require quantizing them again.
_TRANSPOSED_MODULES = ("kv_b_proj",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The converted weights. counts: the number of weights by the published format and the result,
    for example {("fp8", "bfloat16"): 12}."""

    counts: Mapping[tuple[str, str], int]

    @property
    def is_larger(self) -> bool:
        """Whether weights use more memory than in the files."""
        return any(made in ("bfloat16", "float16") for _, made in self.counts)

    def describe(self) -> str:
        """Returns a phrase such as "12 weights from fp8 to bfloat16"."""
        return ", ".join(
            f"{count} weights from {published} to {made}"
            for (published, made), count in self.counts.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """The tensors of one weight, by their names without the path."""

    path: str
    parts: Mapping[str, mx.array]
    settings: PublishedConfig

    def get(self, part: str, *, dims: int = 2) -> mx.array:
        """Returns a tensor. Raises ModelError if it is missing or has a different number of
        axes."""
        array = self.parts.get(part)
        if array is None:
            raise ModelError(f"the checkpoint lacks {self.path}.{part}")
        if array.ndim != dims:
            raise self.error(part, f"has {array.ndim} axes instead of {dims}")
        return array

    def get_words(self, part: str) -> mx.array:
        """Returns a matrix of words of 32 bits. Raises ModelError for another type."""
        array = self.get(part)
        if array.dtype not in (mx.int32, mx.uint32):
            raise self.error(part, f"is {dtype_name(array.dtype)}, but must be int32")
        return array

    def error(self, part: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}.{part} {problem}")


# the converted tensors by their names without the path, and the name of the packing
_Result = tuple[Mapping[str, mx.array], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _IntegerWeight:
    """words: unsigned numbers of `bits` bits in words of uint32, [out, in * bits / 32]. scales,
    zeros: [out, groups]; zeros: None if they are all 2^(bits - 1). groups: the group of each input,
    [in]; None if the inputs of a group are adjacent."""

    words: mx.array
    bits: int
    scales: mx.array
    zeros: mx.array | None = None
    groups: mx.array | None = None


def convert_published(
    config: Mapping[str, Any], weights: Mapping[str, mx.array]
) -> tuple[dict[str, mx.array], Conversion | None]:
    """Converts the published formats among the tensors of a checkpoint.

    config: config.json. weights: the tensors of the text model. Returns the tensors with MLX's
    names, and what was converted; None if nothing was. Raises ModelError for tensors that are
    missing, contradict each other or are not supported. The message names the tensor.
    """
    paths = _find_modules(weights)
    if not paths:
        return dict(weights), None
    settings = read_published_config(config)
    parts: dict[str, dict[str, mx.array]] = {path: {} for path in paths}
    converted: dict[str, mx.array] = {}
    for name, array in weights.items():
        path, _, part = name.rpartition(".")
        if name in paths:  # fused experts
            parts[name]["weight"] = array
        elif (tensor := name.removesuffix(_TENSOR_SCALE)) in paths and tensor != name:
            parts[tensor]["weight_scale_inv"] = array
        elif path in paths and part in (*_WEIGHTS, *_SCALES, *_OTHERS):
            parts[path][part] = array
        elif part in _UNSUPPORTED_PARTS:
            raise ModelError(
                f"{name} would change the input of a quantized weight, which is not supported: use "
                "an MLX version of the model"
            )
        elif not part.endswith(_ACTIVATION_SCALES):
            converted[name] = array
    # read all small tensors at once
    mx.eval(
        [own[name] for own in parts.values() for name in ("g_idx", "weight_g_idx") if name in own]
    )
    counts = Counter[tuple[str, str]]()
    for path, own in parts.items():
        for name, array in own.items():
            if not array.size:
                raise ModelError(f"{path}.{name} is empty")
        published, (made, packing) = _convert(_Module(path=path, parts=own, settings=settings))
        counts[published, packing] += 1
        if path in weights and len(made) == 1:
            converted[path] = made["weight"]
        else:
            converted |= {f"{path}.{part}": array for part, array in made.items()}
    return converted, Conversion(counts=dict(counts))


def _find_modules(weights: Mapping[str, mx.array]) -> set[str]:
    """Returns the paths of the weights in a published format. For fused experts, this is the name
    of the tensor."""
    paths = set[str]()
    for name in weights:
        path, _, part = name.rpartition(".")
        tensor = name.removesuffix(_TENSOR_SCALE)
        if part in _WEIGHTS or (part in _SCALES and _is_bytes(weights.get(f"{path}.weight"))):
            paths.add(path)
        elif part not in _SCALES and tensor != name and _is_bytes(weights.get(tensor)):
            paths.add(tensor)
    return paths


def _is_bytes(array: mx.array | None) -> bool:
    """Whether an array may have numbers of fp8, fp4 or int8."""
    return array is not None and array.dtype in (mx.uint8, mx.int8)


def _convert(module: _Module) -> tuple[str, _Result]:
    """Returns the name of the published format, and the converted tensors."""
    parts = module.parts
    if "qweight" in parts:
        is_awq = module.get("qweight").shape[-1] != module.get("scales").shape[-1]
        weight = _read_awq(module) if is_awq else _read_gptq(module)
        return "AWQ" if is_awq else "GPTQ", _pack_integers(module, weight)
    packed = parts.get("weight_packed")
    if packed is not None and packed.dtype != mx.uint8:
        return "pack-quantized", _pack_integers(module, _read_packed(module))
    if packed is not None or "weight_scale_2" in parts:
        return _convert_fp4(module)
    if parts["weight"].dtype == mx.int8:
        return "int8", _pack_integers(module, _read_int8(module))
    return "fp8", _convert_fp8(module)


# integers


def _read_awq(module: _Module) -> _IntegerWeight:
    """Reads AutoAWQ's layout "gemm": qweight [in, out / 8], qzeros [groups, out / 8], scales
    [groups, out]."""
    qweight, qzeros = module.get_words("qweight"), module.get_words("qzeros")
    scales = module.get("scales")
    groups, outputs = scales.shape
    if qweight.shape[1] * 8 != outputs:
        raise module.error(
            "qweight", f"has {qweight.shape[1]} words in a row for {outputs} outputs"
        )
    if qzeros.shape != (groups, outputs // 8):
        raise module.error("qzeros", f"has the shape {list(qzeros.shape)}")
    order = mx.argsort(mx.array(_AWQ_COLUMNS))

    def unpack(words: mx.array) -> mx.array:
        numbers = _unpack(words, 4).reshape(*words.shape, 8)
        return mx.take(numbers, order, axis=-1).flatten(-2).T

    return _IntegerWeight(
        words=_pack_nibbles(unpack(qweight)), bits=4, scales=scales.T, zeros=unpack(qzeros)
    )


def _read_gptq(module: _Module) -> _IntegerWeight:
    """Reads qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out],
    g_idx [in]."""
    qweight, qzeros = module.get_words("qweight"), module.get_words("qzeros")
    scales = module.get("scales")
    groups, outputs = scales.shape
    bits = qzeros.shape[1] * 32 // outputs
    if bits not in PACKED_BITS or qzeros.shape != (groups, outputs * bits // 32):
        raise module.error("qzeros", f"has the shape {list(qzeros.shape)}")
    if module.settings.zero_offset is None:
        raise module.error(
            "qzeros",
            "has zero points of GPTQ, which are stored in two ways: add quantization_config with "
            "quant_method to config.json, for example from quantize_config.json",
        )
    # a stored zero point of 2^bits - 1 means 0, as in AutoGPTQ
    zeros = _unpack(qzeros, bits) + module.settings.zero_offset
    return _IntegerWeight(
        words=mx.contiguous(qweight.T).view(mx.uint32),
        bits=bits,
        scales=scales.T,
        zeros=(zeros & ((1 << bits) - 1)).T,
        groups=_read_groups(module, "g_idx", qweight.shape[0] * 32 // bits, groups),
    )


def _read_packed(module: _Module) -> _IntegerWeight:
    """Reads the format pack-quantized of compressed-tensors: weight_packed [out, in * bits / 32],
    weight_scale [out or 1, groups], weight_zero_point [out * bits / 32, groups]."""
    packed, bits = module.get_words("weight_packed"), _read_bits(module)
    scales, zeros = _read_scales(module, packed.shape[0]), None
    if "weight_zero_point" in module.parts:
        zeros = module.get_words("weight_zero_point")
        if zeros.shape != (-(-packed.shape[0] * bits // 32), scales.shape[1]):
            raise module.error("weight_zero_point", f"has the shape {list(zeros.shape)}")
        zeros = _unpack(zeros.T, bits)[:, : packed.shape[0]].T
    return _IntegerWeight(
        words=packed.view(mx.uint32),
        bits=bits,
        scales=scales,
        zeros=zeros,
        groups=_read_groups(module, "weight_g_idx", packed.shape[1] * 32 // bits, scales.shape[1]),
    )


def _read_bits(module: _Module) -> int:
    """Returns the number of bits of packed weights. It is in config.json, or follows from the
    stored shape if the modules differ."""
    if module.settings.bits is not None:
        return module.settings.bits
    shape: Any = module.get("weight_shape", dims=1).tolist()
    width = shape[-1]
    if not width:  # a file without content, see _read_groups
        return PACKED_BITS[-1]
    words = module.get("weight_packed").shape[1]
    bits = words * 32 / width if width > 0 else 0
    if bits not in PACKED_BITS:
        raise module.error("weight_packed", f"has {words} words in a row for {width} inputs")
    return int(bits)


def _read_int8(module: _Module) -> _IntegerWeight:
    """Reads weight int8 [out, in], weight_scale [out or 1, groups], weight_zero_point, the same."""
    weight = module.get("weight")
    outputs, inputs = weight.shape
    if inputs % 4:
        raise module.error("weight", f"has {inputs} inputs, which are not a multiple of 4")
    scales, zeros = _read_scales(module, outputs), module.parts.get("weight_zero_point")
    if zeros is not None:
        if zeros.dtype != mx.int8 or zeros.size not in (1, scales.size):
            raise module.error("weight_zero_point", f"has the shape {list(zeros.shape)}")
        shape = scales.shape if zeros.size == scales.size else (1, 1)
        zeros = mx.broadcast_to(zeros.view(mx.uint8).reshape(shape) ^ 0x80, scales.shape)
    return _IntegerWeight(
        words=(weight.view(mx.uint8) ^ 0x80).view(mx.uint32),
        bits=8,
        scales=scales,
        zeros=zeros,
    )


def _read_scales(module: _Module, outputs: int) -> mx.array:
    """Returns scales [out, groups]; a single scale applies to all outputs."""
    scales = module.parts.get("weight_scale")
    if scales is None:
        raise ModelError(f"the checkpoint lacks {module.path}.weight_scale")
    if scales.size == 1:
        return mx.broadcast_to(scales.reshape(1, 1), (outputs, 1))
    if scales.ndim == 1:
        scales = scales[:, None]
    if scales.ndim != 2 or scales.shape[0] != outputs:
        raise module.error("weight_scale", f"has the shape {list(scales.shape)}")
    return scales


def _read_groups(module: _Module, part: str, inputs: int, groups: int) -> mx.array | None:
    """Returns the group of each input, or None if the inputs of a group are adjacent."""
    indices = module.parts.get(part)
    if indices is None:
        return None
    if indices.shape != (inputs,) or not ((indices >= 0) & (indices < groups)).all().item():
        raise module.error(part, f"does not assign {inputs} inputs to {groups} groups")
    # A placeholder file, written to estimate the memory, contains only zeros.
    if not module.settings.has_act_order and not indices.any().item():
        return None
    if inputs % groups == 0:
        adjacent = mx.arange(inputs) // (inputs // groups)
        if mx.array_equal(indices, adjacent).item():
            return None
    return indices


def _pack_integers(module: _Module, weight: _IntegerWeight) -> _Result:
    """Converts to MLX's affine packing if it has groups of that size, otherwise to 16 bits."""
    outputs, inputs = weight.words.shape[0], weight.words.shape[1] * 32 // weight.bits
    groups = weight.scales.shape[1]
    if not groups or inputs % groups:
        raise ModelError(f"{module.path}: {inputs} inputs cannot be divided into {groups} groups")
    width = inputs // groups
    size = next((size for size in _AFFINE_GROUP_SIZES if width % size == 0), None)
    if size is None or weight.groups is not None or _is_transposed(module):
        return _widen_integers(module, weight)
    scales, zeros = weight.scales, weight.zeros
    middle = 1 << (weight.bits - 1)
    if zeros is None:
        biases = scales * -middle
    else:
        biases = scales.astype(mx.float32) * -zeros.astype(mx.float32)
        if mx.default_device().type != mx.DeviceType.cpu:
            biases = biases.astype(scales.dtype)

    def fit(array: mx.array) -> mx.array:
        array = mx.broadcast_to(array, (outputs, groups))
        return mx.contiguous(mx.repeat(array, width // size, axis=1))

    made = {"weight": weight.words, "scales": fit(scales), "biases": fit(biases)}
    return made, f"{weight.bits}-bit affine"


def _widen_integers(module: _Module, weight: _IntegerWeight) -> _Result:
    dtype = weight.scales.dtype  # differences of up to 8 bits are exact in all types
    numbers = _unpack(weight.words, weight.bits).astype(dtype)
    inputs, groups = numbers.shape[1], weight.scales.shape[1]
    of_input = mx.arange(inputs) // (inputs // groups) if weight.groups is None else weight.groups
    if weight.zeros is None:
        shifted = numbers - (1 << (weight.bits - 1))
    else:
        shifted = numbers - mx.take(weight.zeros.astype(dtype), of_input, axis=1)
    return _widen(module, shifted * mx.take(weight.scales, of_input, axis=1), dtype)


def _is_transposed(module: _Module) -> bool:
    return module.path.rpartition(".")[2] in _TRANSPOSED_MODULES


def _widen(module: _Module, weight: mx.array, dtype: mx.Dtype | None = None) -> _Result:
    """Converts a weight to a 16-bit type. dtype: that of its scales; None or float32 for that of
    the model."""
    if dtype is None or dtype == mx.float32:
        dtype = mx.float16 if module.settings.dtype == "float16" else mx.bfloat16
    return {"weight": weight.astype(dtype)}, dtype_name(dtype)


def _unpack(words: mx.array, bits: int) -> mx.array:
    """Unpacks numbers of 2, 4 or 8 bits, from the lowest bits on: [rows, words] to uint8 [rows,
    words * 32 / bits]."""
    numbers = mx.contiguous(words).view(mx.uint8)
    if bits == 8:
        return numbers
    shifts = mx.arange(0, 8, bits).astype(mx.uint8)
    return ((numbers[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _pack_nibbles(numbers: mx.array) -> mx.array:
    """Packs 4-bit numbers, uint8 [rows, columns], into words [rows, columns / 8]."""
    pairs = mx.contiguous(numbers).reshape(numbers.shape[0], -1, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).view(mx.uint32)


# floating point


def _convert_fp4(module: _Module) -> tuple[str, _Result]:
    """Converts bytes of two E2M1 numbers [out, in / 2], the first in the lower bits. NVFP4:
    weight_scale E4M3 [out, in / 16], and a factor of all numbers (ModelOpt's weight_scale_2) or its
    inverse (weight_global_scale). MXFP4: weight_scale E8M0 [out, in / 32]."""
    part = "weight_packed" if "weight_packed" in module.parts else "weight"
    weight, scales = module.get(part), module.get("weight_scale")
    inputs = weight.shape[1] * 2
    factor = module.parts.get("weight_scale_2")
    inverse = module.parts.get("weight_global_scale")
    is_nv = factor is not None or inverse is not None
    size, name = (_NV_GROUP_SIZE, "nvfp4") if is_nv else (_MX_GROUP_SIZE, "mxfp4")
    if scales.dtype != mx.uint8 or scales.shape != (weight.shape[0], inputs // size):
        raise module.error(
            "weight_scale", f"has the shape {list(scales.shape)} for {inputs} inputs in {name}"
        )
    if inputs % _MX_GROUP_SIZE:
        raise module.error(part, f"has {inputs} inputs, which are not a multiple of 32")
    words = mx.contiguous(weight).view(mx.uint32)
    scale = _read_global_scale(module, factor, inverse) if is_nv else mx.array([1.0])
    if _is_transposed(module):
        plain = mx.dequantize(words, scales, group_size=size, bits=4, mode=name, dtype=mx.float32)
        return name, _widen(module, plain * scale)
    made = {"weight": words, "scales": scales}
    return name, ({**made, "global_scale": scale * MAX_NVFP4} if is_nv else made, name)


def _read_global_scale(
    module: _Module, factor: mx.array | None, inverse: mx.array | None
) -> mx.array:
    scale = inverse if factor is None else factor
    assert scale is not None
    if scale.size != 1:
        raise module.error(
            "weight_global_scale" if factor is None else "weight_scale_2",
            f"has {scale.size} numbers instead of one",
        )
    scale = scale.reshape(1).astype(mx.float32)
    return 1 / scale if factor is None else scale


def _convert_fp8(module: _Module) -> _Result:
    """Converts E4M3 [..., out, in] with scales [..., rows, columns] of blocks, per output, or a
    single one."""
    weight = module.parts["weight"]
    part = next(name for name in _SCALES if name in module.parts)
    scales = module.parts[part]
    if weight.ndim < 2 or weight.dtype != mx.uint8:
        raise module.error("weight", f"has fp8 scales, but is {dtype_name(weight.dtype)}")
    if scales.size == 1:
        scales = scales.reshape((1,) * weight.ndim)
    elif scales.ndim == weight.ndim - 1:
        scales = scales[..., None]
    rows, columns = _find_block(module, part, weight.shape, scales.shape)
    exponents = _read_exponents(module, part, scales)
    outputs, inputs = weight.shape[-2:]
    if exponents is not None and not (
        columns % _MX_GROUP_SIZE or inputs % _MX_GROUP_SIZE or _is_transposed(module)
    ):
        words = mx.contiguous(weight).view(mx.uint32)
        repeated = _repeat(exponents, rows, columns // _MX_GROUP_SIZE)
        repeated = mx.contiguous(repeated[..., :outputs, : inputs // _MX_GROUP_SIZE])
        return {"weight": words, "scales": repeated}, "mxfp8"
    if scales.dtype == mx.uint8:
        scales = (scales.astype(mx.uint32) << 23).view(mx.float32)
    # fp8 is exact in bfloat16; the product is computed in float32, and rounded once
    numbers, scales = mx.from_fp8(weight, dtype=mx.bfloat16), scales.astype(mx.float32)
    if outputs % rows or inputs % columns:
        return _widen(module, numbers * _repeat(scales, rows, columns)[..., :outputs, :inputs])
    # without a second array of the size of the weight
    blocks = numbers.reshape(*weight.shape[:-2], scales.shape[-2], rows, scales.shape[-1], columns)
    return _widen(module, (blocks * scales[..., None, :, None]).reshape(weight.shape))


def _repeat(scales: mx.array, rows: int, columns: int) -> mx.array:
    return mx.repeat(mx.repeat(scales, rows, axis=-2), columns, axis=-1)


def _find_block(
    module: _Module, part: str, weight: tuple[int, ...], scales: tuple[int, ...]
) -> tuple[int, int]:
    """Returns the numbers of rows and columns that share a scale. Blocks at the end may be
    smaller."""
    outputs, inputs = weight[-2:]
    if len(scales) != len(weight) or (
        len(weight) > 2 and scales[:-2] not in (weight[:-2], (1,) * (len(weight) - 2))
    ):
        raise module.error(part, f"has the shape {list(scales)} for {list(weight)}")
    declared = module.settings.block
    if declared and _count_blocks((outputs, inputs), declared) == scales[-2:]:
        return declared
    rows, columns = _find_length(outputs, scales[-2]), _find_length(inputs, scales[-1])
    if _count_blocks((outputs, inputs), (rows, columns)) != scales[-2:]:
        raise module.error(part, f"has the shape {list(scales)} for {list(weight)}")
    return rows, columns


def _find_length(axis: int, count: int) -> int:
    """Returns the length of `count` blocks of an axis: all or one of its numbers, a usual length,
    or a divisor."""
    usual = (length for length in _FP8_BLOCKS if math.ceil(axis / length) == count)
    return axis if count == 1 else next(usual, max(axis // count, 1))


def _count_blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def _read_exponents(module: _Module, part: str, scales: mx.array) -> mx.array | None:
    """Returns scales as E8M0, with the exponent plus 127, or None if they are other numbers."""
    if scales.dtype == mx.uint8:
        return scales
    if not module.settings.has_exponent_scales:
        return None
    bits = scales.astype(mx.float32).view(mx.uint32)
    # only an exponent, up to the largest normal number; E8M0 has no 0, but 2^-127 instead
    is_power = ((bits & 0x807FFFFF) == 0) & (bits < 0x7F800000)
    if not is_power.all().item():
        raise module.error(part, "is declared as ue8m0, but has numbers that are not powers of two")
    return (bits >> 23).astype(mx.uint8)
