"""Counts the parameters of a model by storage format, without loading it.

Knows: plain and quantized layers. Must not know: architectures. Nothing is evaluated, because lazy
arrays have a shape and a dtype.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from app.core.model_files import ModelFiles
from app.engine.weights import open_model
from models import architectures
from models.base import dtype_name
from models.gguf.ggml_types import GGML_TYPES
from models.gguf.layers import GgufLayer
from models.published_formats import Conversion

# The arrays that form the weight of a quantized layer.
_QUANTIZATION_ARRAYS = ("scales", "biases")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """The number of parameters of a model.

    parameters: the number of parameters. In a packed weight, one element contains several
        parameters.
    nbytes: the total size in bytes.
    by_format: the number of parameters by storage format (`4-bit affine`, `bfloat16`, `Q4_K`),
        most common format first.
    conversion: how weights in a format of another quantizer are converted, if there are any.
    shares_pass: whether the rows of a batch are computed in one pass; False for some classes of
        mlx-lm.
    """

    parameters: int
    nbytes: int
    by_format: Mapping[str, int]
    conversion: Conversion | None = None
    shares_pass: bool = True

    @property
    def bits_per_parameter(self) -> float:
        """The average number of bits per parameter, including scales."""
        return 8 * self.nbytes / max(self.parameters, 1)


def count_parameters(files: ModelFiles) -> ParameterCount:
    """Counts the parameters of model files returned by `complete_config`. Raises
    AppError(MODEL_FILES) if no model can be built from the files."""
    model: Any = open_model(files, None)
    kinds: Counter[str] = Counter()
    nbytes = 0
    for _, module in model.named_modules():
        for kind, count, size in _count_module(module):
            kinds[kind] += count
            nbytes += size
    return ParameterCount(
        parameters=kinds.total(),
        nbytes=nbytes,
        by_format=dict(kinds.most_common()),
        conversion=architectures.get_conversion(model),
        shares_pass=getattr(model, "may_share_pass", True),
    )


def _count_module(module: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Yields the format, the number of parameters and the bytes of each array of the module,
    without its children."""
    if isinstance(module, GgufLayer):
        yield GGML_TYPES[module.type_id].name, module.num_weights, module["weight"].nbytes
    packed: Any = module if "scales" in module and hasattr(module, "bits") else None
    for name, array in module.items():
        if not isinstance(array, mx.array) or name.startswith("_"):
            continue
        if name == "weight" and isinstance(module, GgufLayer):
            continue
        if packed is None or name not in ("weight", *_QUANTIZATION_ARRAYS):
            yield dtype_name(array.dtype), array.size, array.nbytes
        elif name == "weight":
            mode = getattr(packed, "mode", "affine")
            kind = f"{packed.bits}-bit {mode}"
            yield kind, array.size * array.dtype.size * 8 // packed.bits, array.nbytes
        else:
            yield f"{packed.bits}-bit {getattr(packed, 'mode', 'affine')}", 0, array.nbytes
