"""The optimizer of the built-in model: Muon for the matrices inside the layers, Adam for the rest.

Knows: gradients, moments, learning rates. Must not know: what the weights compute. Muon takes more
arithmetic per step than Adam, but needs fewer steps, and on two CPU cores steps are expensive.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tools.builtin_model.jax_llama import Weights

Moments = tuple[Weights, Weights]

# Quintic Newton-Schulz coefficients of Muon (Jordan et al., 2024): steepest at 0, so that five
# iterations bring singular values of any size near 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The optimizer's hyperparameters. beta1, beta2, epsilon: Adam's parameters (Kingma and Ba,
    2015). momentum: Muon's momentum. decay: the decoupled weight decay (Loshchilov and Hutter,
    2019), for matrices only. clip: the maximum gradient norm."""

    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-8
    momentum: float = 0.95
    decay: float = 0.05
    clip: float = 1.0

    def init(self, weights: Weights) -> Moments:
        return jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights)

    def update(
        self,
        weights: Weights,
        gradient: Weights,
        moments: Moments,
        rate: jax.Array,
        step: jax.Array,
    ) -> tuple[Weights, Moments]:
        """Performs one step. rate: the current learning rate. step: the number of previous
        steps."""
        length = jnp.sqrt(sum((jnp.sum(g * g) for g in gradient.values()), jnp.float32(0)))
        scale = jnp.minimum(1.0, self.clip / (length + 1e-6))
        new: Weights = {}
        first: Weights = {}
        second: Weights = {}
        for name, weight in weights.items():
            slope = gradient[name] * scale
            if name.endswith("_proj.weight"):
                first[name] = self.momentum * moments[0][name] + slope
                second[name] = moments[1][name]
                change = _orthogonalize(slope + self.momentum * first[name])
            else:
                first[name] = self.beta1 * moments[0][name] + (1 - self.beta1) * slope
                second[name] = self.beta2 * moments[1][name] + (1 - self.beta2) * slope * slope
                spread = jnp.sqrt(second[name] / (1 - self.beta2 ** (step + 1))) + self.epsilon
                change = first[name] / (1 - self.beta1 ** (step + 1)) / spread
            decay = self.decay if weight.ndim > 1 else 0.0
            new[name] = weight - rate * (change + decay * weight)
        return new, (first, second)


def _orthogonalize(matrix: jax.Array) -> jax.Array:
    """Nearly U V' of `matrix` = U S V', with a root mean square of 0.2: that of a usual Adam step,
    so that both use one learning rate (Liu et al., 2025)."""
    rows, columns = matrix.shape
    flat = matrix if rows <= columns else matrix.T
    flat = flat / (jnp.linalg.norm(flat) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_NEWTON_SCHULZ_STEPS):
        square = flat @ flat.T
        flat = a * flat + (b * square + c * square @ square) @ flat
    return (flat if rows <= columns else flat.T) * 0.2 * max(rows, columns) ** 0.5
