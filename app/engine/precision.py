"""Chooses the precision of a model from its checkpoint's: the type of the keys and values in layer
caches (`--kv`), and the bits to which the CPU kernels round the inputs of layers with 4- and 8-bit
weights (`--activations`).

Knows: the types of a model's parameters, the range of float16, models as functions. Must not know:
the storage of caches, prefixes, requests.

    --kv                     float32 parameters   bfloat16     float16
    auto, on a CPU           float32              bfloat16     float16 if its range is large enough
    auto, on other devices   the type of the activations
    a type                   this type, if it is narrower than the activations

    --activations            float32 parameters   bfloat16     float16     blocks of GGUF
    auto                     24                   16           16          16
    a number                 this number

The type of a model is the type of most of its floating-point parameters. In a quantized model,
these are the scales. The blocks of GGUF contain float16 scales or less; their norms are float32 in
any case. On a CPU, other activations are float32.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import mlx.core as mx

from app.core.errors import AppError, ErrorKind
from app.core.settings import ActivationBits, ActivationPrecision, KVPrecision
from models.base import Model, dtype_name
from models.kv import LARGEST_FLOAT16, KVBuffers, LayerCache
from models.mlx_lm_cache import MlxLmLayerCache

_DTYPES: Mapping[KVPrecision, mx.Dtype] = {
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
}

# The probe computes this many tokens. Outliers of keys and values appear at the first positions and
# at rare tokens, and grow little after that.
_PROBE_TOKENS = 32

# The share of float16's range that the probe may use. Other prompts may give larger numbers.
_USABLE_RANGE = LARGEST_FLOAT16 / 8


def choose_kv_dtype(parameters: Sequence[mx.array], precision: KVPrecision) -> mx.Dtype | None:
    """Returns the value of `Model.kv_dtype`: None if keys and values are stored in the type of the
    activations. parameters: in the types of the checkpoint, before the CPU layout converts them."""
    if precision != "auto":
        return _DTYPES[precision]
    if mx.default_device().type != mx.DeviceType.cpu:
        return None
    found = _find_dtype(parameters)
    return None if found == mx.float32 else found


def choose_activation_bits(
    parameters: Sequence[mx.array], precision: ActivationPrecision = "auto", *, has_blocks: bool
) -> ActivationBits:
    """Returns the value for `models.cpu_layout.set_activation_bits`. parameters: as for
    `choose_kv_dtype`. has_blocks: whether weights are in GGUF's blocks."""
    if precision != "auto":
        return precision
    return 24 if not has_blocks and _find_dtype(parameters) == mx.float32 else 16


def _find_dtype(parameters: Sequence[mx.array]) -> mx.Dtype:
    counts = Counter[mx.Dtype]()
    for array in parameters:
        if array.dtype in _DTYPES.values():
            counts[array.dtype] += array.size
    [(found, _)] = counts.most_common(1) or [(mx.float32, 0)]
    return found


def widen_if_too_large(model: Model, precision: KVPrecision, *, vocab: int, name: str) -> None:
    """Computes a prompt if keys and values are to be stored as float16. If they are too large,
    selects float32. Raises AppError(MODEL_FILES) if float16 was requested.

    vocab: the number of token IDs. name: the model, for the message.
    """
    if not _is_float16(model.kv_dtype):
        return
    largest = _measure_largest(model, vocab)
    if largest <= _USABLE_RANGE:
        return
    if precision == "float16":
        raise AppError(
            ErrorKind.MODEL_FILES,
            f"{name}: its keys and values reach {largest:.3g}, too close to the end of float16's "
            f"range ({LARGEST_FLOAT16:.0f}): use --kv bfloat16 or --kv float32",
        )
    model.kv_dtype = None


def find_precision(layers: Sequence[LayerCache]) -> str | None:
    """Returns the type of the keys and values in caches with at least one position, such as
    "bfloat16"; None for a model without attention."""
    for cache in _list_buffers(layers):
        return None if cache.precision is None else dtype_name(cache.precision)
    return None


def avoid_float16(model: Model, precision: KVPrecision) -> None:
    """Selects float32 in place of float16, unless the user chose it. Several ranks share a model,
    and the probe of each rank measures only its own heads, so they could choose different types."""
    if precision == "auto" and _is_float16(model.kv_dtype):
        model.kv_dtype = None


def _is_float16(dtype: mx.Dtype | None) -> bool:
    # a comparison of a type with None raises an error
    return dtype is not None and dtype == mx.float16


def _measure_largest(model: Model, vocab: int) -> float:
    """Returns the largest magnitude of a key or value; infinity if one is not finite."""
    chosen, model.kv_dtype = model.kv_dtype, None
    try:
        layers = model.make_kv()
    finally:
        model.kv_dtype = chosen
    # spread over the vocabulary; the factor has no common divisor with usual vocabulary sizes
    tokens = [position * 7919 % vocab for position in range(_PROBE_TOKENS)]
    model(mx.array([tokens]), layers)
    worst = 0.0
    for cache in _list_buffers(layers):
        for array in cache.written():
            largest = cast(float, mx.max(mx.abs(array)).item())
            # NaN is not larger than anything
            worst = max(worst, largest) if largest < float("inf") else float("inf")
    return worst


def _list_buffers(layers: Sequence[LayerCache]) -> Sequence[KVBuffers]:
    parts = [
        part
        for layer in layers
        for part in (layer.caches if isinstance(layer, MlxLmLayerCache) else (layer,))
    ]
    return [part for part in parts if isinstance(part, KVBuffers)]
