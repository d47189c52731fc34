"""Stacks of matrices, experts' and heads', that compute with our own operations.

Knows: our stacked layers (models/experts.py, models/latent.py) and what `_kernels` offers. Must not
know: architectures, checkpoints. Twins are what those of models/kernels/layers.py are.
"""

from typing import Any

import mlx.core as mx

from models import experts, latent
from models.kernels.layers import Twin, Twins, is_packed, is_plain


class ExpertLinear(Twin, experts.ExpertLinear):
    in_order = False

    def __call__(self, x: mx.array, chosen: mx.array, *, ordered: bool = False) -> mx.array:
        # what is not in order is put so there
        return self.product.choose(x, chosen)


class QuantizedExpertLinear(Twin, experts.QuantizedExpertLinear):
    in_order = False

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


TWINS: Twins = {
    experts.ExpertLinear: (ExpertLinear, is_plain),
    experts.QuantizedExpertLinear: (QuantizedExpertLinear, is_packed),
    latent.HeadLinear: (HeadLinear, is_plain),
    latent.QuantizedHeadLinear: (QuantizedHeadLinear, is_packed),
}


def _each_head(layer: Any, x: mx.array) -> mx.array:
    """[B, H or 1, L, in] -> [B, H, L, out]: each position chooses its head's matrix."""
    heads = mx.arange(layer["weight"].shape[0])[:, None]
    return layer.product.choose(x[..., None, :], heads).squeeze(-2)
