"""What a model is made of, for people.

Knows: layers, plain and packed. Must not know: architectures. Nothing is evaluated: an array knows
its shape and type before it has a value.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from app.core.files import ModelFiles
from app.engine.weights import open_model

# of a packed layer: what belongs to its weight
_QUANTISATION_ARRAYS = ("scales", "biases")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """parameters: numbers that were learned, of which a packed weight holds several in one. nbytes:
    what they take. by_format: how the parameters are kept (`4-bit affine`, `bfloat16`), most
    first."""

    parameters: int
    nbytes: int
    by_format: Mapping[str, int]

    @property
    def bits_per_parameter(self) -> float:
        """Of one parameter, scales included."""
        return 8 * self.nbytes / max(self.parameters, 1)


def count_parameters(files: ModelFiles) -> ParameterCount:
    """Of model files that were `complete`d. Raises AppError(MODEL_FILES) for files that cannot
    become a model."""
    model: Any = open_model(files, None)
    kinds: Counter[str] = Counter()
    nbytes = 0
    for _, module in model.named_modules():
        for kind, count, size in _count_module(module):
            kinds[kind] += count
            nbytes += size
    return ParameterCount(
        parameters=kinds.total(), nbytes=nbytes, by_format=dict(kinds.most_common())
    )


def _count_module(module: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Kind, parameters and bytes of each array that is the module's own."""
    packed: Any = module if "scales" in module and hasattr(module, "bits") else None
    for name, array in module.items():
        if not isinstance(array, mx.array) or name.startswith("_"):
            continue
        if packed is None or name not in ("weight", *_QUANTISATION_ARRAYS):
            yield str(array.dtype).removeprefix("mlx.core."), array.size, array.nbytes
        elif name == "weight":
            mode = getattr(packed, "mode", "affine")
            kind = f"{packed.bits}-bit {mode}"
            yield kind, array.size * array.dtype.size * 8 // packed.bits, array.nbytes
        else:
            yield f"{packed.bits}-bit {getattr(packed, 'mode', 'affine')}", 0, array.nbytes
