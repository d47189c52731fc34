"""Mixture-of-experts layers, in which each token is routed to a few experts (Shazeer et al. 2017;
Switch, Fedus et al. 2021).

Knows: weights stacked over experts, routing and its config keys, the layouts of experts in
checkpoints. Must not know: architectures, caches.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from models import decoder
from models.base import ModelError
from models.layers import GatedMLP, QuantizedStack, apply_glu
from models.sharding import MLP_SHARDS, REPLICATED, ShardSpec

# maps gate and up to the input of the down projection
Gating = Callable[[mx.array, mx.array], mx.array]

# With at least this many rows, sorting the rows by expert is faster, because each expert's weights
# are then read only once.
MIN_SORTED_ROWS = 64

_PROJECTION_NAMES: Mapping[str, str] = {
    name: name for name in ("gate_proj", "up_proj", "down_proj")
}


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Returns the SiLU-gated product (Shazeer 2020)."""
    return apply_glu(nn.silu, gate, up)


def select_top_experts(scores: mx.array, count: int) -> mx.array:
    """Returns the indices [..., count] of the highest scores [..., E], in no particular order."""
    return mx.argpartition(scores, kth=-count, axis=-1)[..., -count:]


class ExpertLinear(nn.Module):
    """One linear map per expert. weight: [E, out, in]. bias: [E, out].

    prefers_sorted: whether the layer is faster if many rows are sorted by expert.
    """

    prefers_sorted: ClassVar[bool] = True

    def __init__(self, inputs: int, outputs: int, experts: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros((experts, outputs, inputs))
        if bias:
            self.bias = mx.zeros((experts, outputs))

    def __call__(
        self, x: mx.array, expert_ids: mx.array, *, sorted_indices: bool = False
    ) -> mx.array:
        """Maps x [..., 1, in] to [..., k, 1, out]. expert_ids: [..., k]; its leading axes broadcast
        with those of x. sorted_indices: whether `expert_ids` is flat and ascending."""
        product = mx.gather_mm(
            x, self.weight.swapaxes(-1, -2), rhs_indices=expert_ids, sorted_indices=sorted_indices
        )
        return _add_bias(self, product, expert_ids)

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str = "affine"
    ) -> "QuantizedExpertLinear":
        """Returns the quantized layer. `nn.quantize` calls this method."""
        return QuantizedExpertLinear(self, group_size, bits, mode)


class QuantizedExpertLinear(QuantizedStack):
    """An `ExpertLinear`, quantized in any of MLX's modes."""

    prefers_sorted: ClassVar[bool] = True

    def __call__(
        self, x: mx.array, expert_ids: mx.array, *, sorted_indices: bool = False
    ) -> mx.array:
        """See `ExpertLinear`."""
        product = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.get("biases"),
            rhs_indices=expert_ids,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=sorted_indices,
        )
        return _add_bias(self, product, expert_ids)


class Experts(nn.Module):
    """Gated MLPs. Each token uses the experts that are selected for it."""

    # the experts' outputs are added before the all-reduce, so that ranks sum only one row per token
    shard_spec: ClassVar[ShardSpec] = replace(MLP_SHARDS, partial_sum=True)

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

    def __call__(self, x: mx.array, expert_ids: mx.array, expert_weights: mx.array) -> mx.array:
        """Returns the weighted sum [..., D] of the experts' outputs. x: [..., D]. expert_ids: [...,
        k]. expert_weights: [..., k]."""
        if expert_ids.size < MIN_SORTED_ROWS or not self.up_proj.prefers_sorted:
            outputs = self._apply(x[..., None, None, :], expert_ids, sorted_indices=False)
        else:
            outputs = self._apply_sorted(x, expert_ids)
        return (outputs * expert_weights[..., None]).sum(axis=-2).astype(x.dtype)

    def _apply(self, x: mx.array, expert_ids: mx.array, *, sorted_indices: bool) -> mx.array:
        gate = self.gate_proj(x, expert_ids, sorted_indices=sorted_indices)
        up = self.up_proj(x, expert_ids, sorted_indices=sorted_indices)
        return self.down_proj(
            self.gating(gate, up), expert_ids, sorted_indices=sorted_indices
        ).squeeze(-2)

    def _apply_sorted(self, x: mx.array, expert_ids: mx.array) -> mx.array:
        """Like `_apply`, but with the rows sorted by expert."""
        flat, each = expert_ids.flatten(), expert_ids.shape[-1]
        order = mx.argsort(flat)
        rows = x.reshape(-1, 1, x.shape[-1])[order // each]
        outputs = self._apply(rows, flat[order], sorted_indices=True)
        return outputs[mx.argsort(order)].reshape(*expert_ids.shape, -1)


class SparseMoeBlock(nn.Module):
    """Qwen's mixture of experts: a softmax over all experts selects the top `top_k`. In some
    models, a shared expert with its own gate also processes every token.

    Parameter names: gate, switch_mlp, shared_expert, shared_expert_gate.
    """

    shard_spec: ClassVar[ShardSpec] = REPLICATED  # only the experts are sharded

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        *,
        top_k: int,
        norm_topk_prob: bool,
        shared_width: int | None = None,
    ) -> None:
        """norm_topk_prob: whether the weights of the selected experts are normalized to a sum of 1.
        shared_width: the inner width of the shared expert; None if there is no shared expert."""
        super().__init__()
        if not 0 < top_k <= experts:
            raise ModelError(f"num_experts_per_tok is {top_k}, but must be between 1 and {experts}")
        self.top_k, self.norm_topk_prob, self.shared_width = top_k, norm_topk_prob, shared_width
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.switch_mlp = Experts(hidden, inner, experts)
        if shared_width is not None:
            self.shared_expert = GatedMLP(hidden, shared_width)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        scores = mx.softmax(self.gate(x), axis=-1, precise=True)
        chosen = select_top_experts(scores, self.top_k)
        shares = mx.take_along_axis(scores, chosen, axis=-1)
        if self.norm_topk_prob:
            shares = shares / shares.sum(axis=-1, keepdims=True)
        y = self.switch_mlp(x, chosen, shares)
        if self.shared_width is None:
            return y
        return y + mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedTopKConfig(decoder.Config):
    """The keys of config.json for `GroupedTopKMoE`. n_shared_experts: None for no shared
    experts."""

    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"

    @property
    def group_score_experts(self) -> int:
        """The number of best experts whose scores are added to that of a group."""
        return 2

    def make_experts(self) -> "GroupedTopKMoE":
        inner, shared = self.moe_intermediate_size, self.n_shared_experts
        return GroupedTopKMoE(
            self.hidden_size,
            inner,
            self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            norm_topk_prob=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            num_groups=self.n_group,
            topk_group=self.topk_group,
            group_score_experts=self.group_score_experts,
            shared_width=None if shared is None else inner * shared,
            uses_softmax=self.scoring_func == "softmax",
        )


class GroupedTopKMoE(nn.Module):
    """DeepSeek-V3's mixture of experts (2024, section 2.1.2): scores are sigmoids, and a bias
    affects the selection of experts but not their weights. Experts are in groups, and a token uses
    experts only of its best groups. In some models, shared experts process every token.

    Parameter names: gate, e_score_correction_bias, switch_mlp, shared_experts.
    """

    shard_spec: ClassVar[ShardSpec] = REPLICATED  # only the experts are sharded

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        *,
        top_k: int,
        norm_topk_prob: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        topk_group: int = 1,
        group_score_experts: int = 2,
        shared_width: int | None = None,
        uses_softmax: bool = False,
    ) -> None:
        """norm_topk_prob: whether the weights of the selected experts are normalized to a sum of 1.
        scale: a factor of the weights. num_groups, topk_group: the number of groups of experts, and
        of those that a token uses. group_score_experts: the number of best experts whose scores are
        added to that of a group. shared_width: the inner width of the shared experts together; None
        if there are none. uses_softmax: whether the scores are a softmax without a bias."""
        super().__init__()
        if not 0 < topk_group <= num_groups or experts % num_groups:
            raise ModelError(
                f"n_group {num_groups} and topk_group {topk_group} are not valid for "
                f"{experts} experts"
            )
        allowed = experts // num_groups * topk_group
        if not 0 < top_k <= allowed:
            raise ModelError(f"num_experts_per_tok is {top_k}, but must be between 1 and {allowed}")
        self.top_k, self.norm_topk_prob, self.scale = top_k, norm_topk_prob, scale
        self.num_groups, self.topk_group = num_groups, topk_group
        self.group_score_experts = min(group_score_experts, experts // num_groups)
        self.gate = nn.Linear(hidden, experts, bias=False)
        if not uses_softmax:
            self.e_score_correction_bias = mx.zeros((experts,))
        self.switch_mlp = Experts(hidden, inner, experts)
        if shared_width is not None:
            self.shared_experts = GatedMLP(hidden, shared_width)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.switch_mlp(x, *self.route(x))
        return y + self.shared_experts(x) if "shared_experts" in self else y

    def route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the selected experts and their weights, each [..., k], for hidden states [...,
        D]. They are computed in float32, because the selection depends on small differences."""
        logits = self.router_logits(x.astype(mx.float32))
        if "e_score_correction_bias" in self:
            scores = mx.sigmoid(logits)
            ranked = scores + self.e_score_correction_bias
        else:
            ranked = scores = mx.softmax(logits, axis=-1)
        chosen = select_top_experts(self._mask_to_top_groups(ranked), self.top_k)
        shares = mx.take_along_axis(scores, chosen, axis=-1)
        if self.norm_topk_prob:
            shares = shares / (shares.sum(axis=-1, keepdims=True) + 1e-20)
        return chosen, shares * self.scale

    def router_logits(self, x: mx.array) -> mx.array:
        """Returns the logits [..., E] of the experts."""
        return self.gate(x)

    def _mask_to_top_groups(self, scores: mx.array) -> mx.array:
        """Masks all groups except those whose best experts have the highest sum of scores."""
        if self.topk_group == self.num_groups:
            return scores
        grouped = mx.unflatten(scores, -1, (self.num_groups, -1))
        best = mx.topk(grouped, self.group_score_experts, axis=-1).sum(axis=-1)
        out = mx.argpartition(best, kth=self.num_groups - self.topk_group, axis=-1)
        out = out[..., : self.num_groups - self.topk_group, None]
        return mx.put_along_axis(grouped, out, mx.array(-mx.inf), axis=-2).flatten(-2)


def move_router_bias(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Renames the bias of a `GroupedTopKMoE`, which most checkpoints store as
    `….gate.e_score_correction_bias`."""
    return {
        name.replace(".gate.e_score_correction_bias", ".e_score_correction_bias"): array
        for name, array in weights.items()
    }


def stack_experts(
    weights: Mapping[str, mx.array],
    *,
    projections: Mapping[str, str] = _PROJECTION_NAMES,
    module_name: str = "switch_mlp",
) -> dict[str, mx.array]:
    """Converts the original names of experts to `….{module_name}.gate_proj.weight` and similar
    names, with the shape [E, out, in].

    Stacks `….experts.7.gate_proj.weight` (and scales, biases and bias), and splits the fused
    `….experts.gate_up_proj` [E, 2 inner, hidden] of newer checkpoints. Other tensors are returned
    unchanged. projections: the original names of the three projections, if they differ. Raises
    ModelError if an expert is missing.
    """
    stacked: dict[str, mx.array] = {}
    single: dict[str, dict[int, mx.array]] = {}
    names = "|".join(re.escape(name) for name in projections)
    expert_pattern = re.compile(rf"(.*\.)experts\.(\d+)\.({names})\.(\w+)")
    fused_pattern = re.compile(
        r"(.*\.)experts\.(gate_up_proj|down_proj)(?:\.(weight|scales|biases))?"
    )
    for name, array in weights.items():
        if match := expert_pattern.fullmatch(name):
            prefix, number, projection, kind = match.groups()
            target = f"{prefix}{module_name}.{projections[projection]}.{kind}"
            single.setdefault(target, {})[int(number)] = array
        elif match := fused_pattern.fullmatch(name):
            prefix, projection, kind = match.groups()
            stacked.update(
                _split_gate_up(f"{prefix}{module_name}", projection, kind or "weight", array)
            )
        else:
            stacked[name] = array
    return stacked | {target: _stack_one(target, experts) for target, experts in single.items()}


def orient_fused_experts(weights: Mapping[str, mx.array], hidden: int) -> dict[str, mx.array]:
    """Transposes fused experts that are stored as [E, in, out], as in the released checkpoints of
    Qwen3-VL-MoE. One of the two tensors of a layer may be square, so both are compared."""
    axes = {"gate_up_proj": -1, "down_proj": -2}  # the axis of the hidden states
    oriented = dict(weights)
    suffix = "experts.down_proj"
    for last in [name for name in weights if name.endswith(suffix) and weights[name].ndim == 3]:
        path = last.removesuffix("down_proj")
        fused = {f"{path}{part}": axis for part, axis in axes.items() if f"{path}{part}" in weights}
        if any(weights[name].shape[axis] != hidden for name, axis in fused.items()):
            oriented |= {name: mx.contiguous(weights[name].swapaxes(-1, -2)) for name in fused}
    return oriented


def _split_gate_up(path: str, projection: str, kind: str, array: mx.array) -> dict[str, mx.array]:
    if projection == "down_proj":
        return {f"{path}.down_proj.{kind}": array}
    # contiguous, because gather_mm would copy a slice in every call
    gate, up = (mx.contiguous(half) for half in mx.split(array, 2, axis=1))
    return {f"{path}.gate_proj.{kind}": gate, f"{path}.up_proj.{kind}": up}


def _stack_one(target: str, experts: Mapping[int, mx.array]) -> mx.array:
    missing = set(range(len(experts))) - experts.keys()
    if missing:
        raise ModelError(f"the checkpoint lacks expert {min(missing)} of {target}")
    if len({array.shape for array in experts.values()}) > 1:
        raise ModelError(f"the checkpoint has experts of different shapes in {target}")
    return mx.stack([experts[number] for number in range(len(experts))])


def _add_bias(layer: Any, product: mx.array, expert_ids: mx.array) -> mx.array:
    return product + layer.bias[expert_ids][..., None, :] if "bias" in layer else product
