"""Stacks of matrices, experts' and heads', that compute with our own operations.

Knows: our stacked layers (models/experts.py, models/latent.py) and what `_kernels` offers. Must not
know: architectures, checkpoints. Twins are what those of models/kernels/layers.py are.
"""

from typing import Any

import mlx.core as mx

from models import experts, latent
from models.kernels.layers import Twin, is_packed, is_plain


class ExpertLinear(Twin, experts.ExpertLinear):
    def __call__(self, x: mx.array, chosen: mx.array, *, ordered: bool = False) -> mx.array:
        # what is not in order is put so there
        return self.product.choose(x, chosen)


class QuantizedExpertLinear(Twin, experts.QuantizedExpertLinear):
    def __call__(self, x: mx.array, chosen: mx.array, *, ordered: bool = False) -> mx.array:
        return self.product.choose(x, chosen)


class HeadLinear(Twin, latent.HeadLinear):
    """`transposed`, which prompts alone need, is MLX's: the other way round, weights would have to
    be here twice."""

    def __call__(self, x: mx.array) -> mx.array:
        return _each_head(self, x)


class QuantizedHeadLinear(Twin, latent.QuantizedHeadLinear):
    """As `HeadLinear`."""

    def __call__(self, x: mx.array) -> mx.array:
        return _each_head(self, x)


def twin(layer: Any, ops: Any) -> Any:
    """As `models.kernels.layers.twin`."""
    match layer:
        case experts.ExpertLinear() if type(layer) is experts.ExpertLinear and is_plain(layer):
            return ExpertLinear(layer, ops)
        case latent.HeadLinear() if type(layer) is latent.HeadLinear and is_plain(layer):
            return HeadLinear(layer, ops)
        case experts.QuantizedExpertLinear() if type(
            layer
        ) is experts.QuantizedExpertLinear and is_packed(layer):
            return QuantizedExpertLinear(layer, ops)
        case latent.QuantizedHeadLinear() if type(
            layer
        ) is latent.QuantizedHeadLinear and is_packed(layer):
            return QuantizedHeadLinear(layer, ops)
        case _:
            return layer


def _each_head(layer: Any, x: mx.array) -> mx.array:
    """[B, H or 1, L, in] -> [B, H, L, out]: each position chooses its head's matrix."""
    heads = mx.arange(layer.weight.shape[0])[:, None]
    return layer.product.choose(x[..., None, :], heads).squeeze(-2)
