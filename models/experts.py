"""Layers of which each token passes through a few: mixtures of experts (Shazeer et al. 2017;
Switch, Fedus et al. 2021).

Knows: weights stacked over experts, how a router chooses, how checkpoints lay experts out. Must
not know: architectures, caches.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from models.base import ModelError
from models.layers import GatedMLP, PackedStack, gated
from models.sharding import INNER, WHOLE, Cut

# gate, up -> what the down projection takes
Gating = Callable[[mx.array, mx.array], mx.array]

# so many rows are worth the sorting by which each expert's weights are read once
MANY = 64

_PROJECTIONS: Mapping[str, str] = {name: name for name in ("gate_proj", "up_proj", "down_proj")}


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """SiLU-gated (Shazeer 2020)."""
    return gated(nn.silu, gate, up)


def top_experts(scores: mx.array, count: int) -> mx.array:
    """[..., E] -> [..., count], the indices of the highest, in no order."""
    return mx.argpartition(scores, kth=-count, axis=-1)[..., -count:]


class ExpertLinear(nn.Module):
    """One linear map per expert. weight: [E, out, in], bias: [E, out].

    in_order: whether many rows are better brought to it in the order of their experts.
    """

    in_order: ClassVar[bool] = True

    def __init__(self, inputs: int, outputs: int, experts: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros((experts, outputs, inputs))
        if bias:
            self.bias = mx.zeros((experts, outputs))

    def __call__(self, x: mx.array, chosen: mx.array, *, ordered: bool = False) -> mx.array:
        """x [..., 1, in], chosen [..., k], leading axes that broadcast -> [..., k, 1, out].
        ordered: `chosen` is flat and ascending."""
        product = mx.gather_mm(
            x, self.weight.swapaxes(-1, -2), rhs_indices=chosen, sorted_indices=ordered
        )
        return _biased(self, product, chosen)

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str = "affine"
    ) -> "QuantizedExpertLinear":
        """What `nn.quantize` asks of a layer."""
        return QuantizedExpertLinear(self, group_size, bits, mode)


class QuantizedExpertLinear(PackedStack):
    """An `ExpertLinear` in any of MLX's modes."""

    in_order: ClassVar[bool] = True

    def __call__(self, x: mx.array, chosen: mx.array, *, ordered: bool = False) -> mx.array:
        """As `ExpertLinear`."""
        product = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.get("biases"),
            rhs_indices=chosen,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=ordered,
        )
        return _biased(self, product, chosen)


class Experts(nn.Module):
    """Gated MLPs, of which each token passes through those that were chosen for it."""

    # what they say is added up first, so that ranks sum one vector a token
    cut: ClassVar[Cut] = replace(INNER, partial=True)

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        *,
        bias: bool = False,
        gating: Gating = swiglu,
    ) -> None:
        super().__init__()
        self.gating = gating
        self.gate_proj = ExpertLinear(hidden, inner, experts, bias=bias)
        self.up_proj = ExpertLinear(hidden, inner, experts, bias=bias)
        self.down_proj = ExpertLinear(inner, hidden, experts, bias=bias)

    def __call__(self, x: mx.array, chosen: mx.array, shares: mx.array) -> mx.array:
        """x [..., D], chosen [..., k] experts and their shares [..., k] -> [..., D], the sum of
        what the experts say, each times its share."""
        if chosen.size < MANY or not self.gate_proj.in_order:
            said = self._apply(x[..., None, None, :], chosen, ordered=False)
        else:
            said = self._apply_sorted(x, chosen)
        return (said * shares[..., None]).sum(axis=-2).astype(x.dtype)

    def _apply(self, x: mx.array, chosen: mx.array, *, ordered: bool) -> mx.array:
        gate = self.gate_proj(x, chosen, ordered=ordered)
        up = self.up_proj(x, chosen, ordered=ordered)
        return self.down_proj(self.gating(gate, up), chosen, ordered=ordered).squeeze(-2)

    def _apply_sorted(self, x: mx.array, chosen: mx.array) -> mx.array:
        """The same with all rows of one expert side by side."""
        flat, each = chosen.flatten(), chosen.shape[-1]
        order = mx.argsort(flat)
        rows = x.reshape(-1, 1, x.shape[-1])[order // each]
        said = self._apply(rows, flat[order], ordered=True)
        return said[mx.argsort(order)].reshape(*chosen.shape, -1)


class SparseMLP(nn.Module):
    """Qwen's mixture: a softmax over all experts, the best `chosen` of them, and for some models
    one more expert that every token passes through, behind a gate of its own.

    Parameter names: gate, switch_mlp, shared_expert, shared_expert_gate.
    """

    cut: ClassVar[Cut] = WHOLE  # but for the experts in it

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        *,
        chosen: int,
        normalised: bool,
        shared: int | None = None,
    ) -> None:
        """normalised: the shares of the chosen are scaled to a sum of 1. shared: the inner width of
        the shared expert, None for no such expert."""
        super().__init__()
        if not 0 < chosen <= experts:
            raise ModelError(f"num_experts_per_tok {chosen} must be between 1 and {experts}")
        self.chosen, self.normalised, self.shared = chosen, normalised, shared
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.switch_mlp = Experts(hidden, inner, experts)
        if shared is not None:
            self.shared_expert = GatedMLP(hidden, shared)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        scores = mx.softmax(self.gate(x), axis=-1, precise=True)
        chosen = top_experts(scores, self.chosen)
        shares = mx.take_along_axis(scores, chosen, axis=-1)
        if self.normalised:
            shares = shares / shares.sum(axis=-1, keepdims=True)
        y = self.switch_mlp(x, chosen, shares)
        if self.shared is None:
            return y
        return y + mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


def stack_experts(
    weights: Mapping[str, mx.array],
    *,
    projections: Mapping[str, str] = _PROJECTIONS,
    into: str = "switch_mlp",
) -> dict[str, mx.array]:
    """Makers' names of experts -> `….{into}.gate_proj.weight` and so on, [E, out, in].

    `….experts.7.gate_proj.weight` are stacked (scales, biases and bias alike), the fused
    `….experts.gate_up_proj` [E, 2 inner, hidden] of newer checkpoints cut in halves; what is named
    otherwise stays. projections: the maker's names of the three, where they differ. Raises
    ModelError where an expert is missing.
    """
    found: dict[str, mx.array] = {}
    single: dict[str, dict[int, mx.array]] = {}
    names = "|".join(re.escape(name) for name in projections)
    one = re.compile(rf"(.*\.)experts\.(\d+)\.({names})\.(\w+)")
    fused = re.compile(r"(.*\.)experts\.(gate_up_proj|down_proj)(?:\.(weight|scales|biases))?")
    for name, array in weights.items():
        if match := one.fullmatch(name):
            prefix, number, projection, kind = match.groups()
            target = f"{prefix}{into}.{projections[projection]}.{kind}"
            single.setdefault(target, {})[int(number)] = array
        elif match := fused.fullmatch(name):
            prefix, projection, kind = match.groups()
            found.update(_parted(f"{prefix}{into}", projection, kind or "weight", array))
        else:
            found[name] = array
    return found | {target: _stacked(target, experts) for target, experts in single.items()}


def _parted(path: str, projection: str, kind: str, array: mx.array) -> dict[str, mx.array]:
    if projection == "down_proj":
        return {f"{path}.down_proj.{kind}": array}
    # contiguous: a product of gathered matrices would copy a mere slice at every call
    gate, up = (mx.contiguous(half) for half in mx.split(array, 2, axis=1))
    return {f"{path}.gate_proj.{kind}": gate, f"{path}.up_proj.{kind}": up}


def _stacked(target: str, experts: Mapping[int, mx.array]) -> mx.array:
    missing = set(range(len(experts))) - experts.keys()
    if missing:
        raise ModelError(f"the checkpoint lacks expert {min(missing)} of {target}")
    if len({array.shape for array in experts.values()}) > 1:
        raise ModelError(f"the checkpoint has experts of different shapes in {target}")
    return mx.stack([experts[number] for number in range(len(experts))])


def _biased(layer: Any, product: mx.array, chosen: mx.array) -> mx.array:
    return product + layer.bias[chosen][..., None, :] if "bias" in layer else product
