"""One model on several machines: which weights are divided among ranks, and where parts are added.

Knows: modules, the axes of their parameters, what a part says of how it is cut. Must not know: how
ranks reach each other, architectures.

Tensor parallel (Shoeybi et al. 2019, "Megatron-LM", section 3): each rank has some of an
attention's heads and some of an MLP's inner width, and so a whole layer takes two sums.

    x ──> rows of W ──> own heads, own inner width ──> columns of W ──> all_sum ──> y
    whole               1/n                            a summand                    whole

Embeddings, norms, routers and the head are whole on every rank, and so is the residual stream. A
bias behind a sum is added by rank 0 alone.

A part says with an attribute `cut` how it is divided, so an architecture made of such parts needs
no line here. Weights need not have been read: cut is what will be read, and what is quantised is
cut between groups. (mlx.nn.layers.distributed has divided twins of two kinds of layers only, each
with a sum of its own: not of experts, which are added up before they are summed, nor of layers with
a global scale. Here layers stay what they are.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from models.base import Model, ModelError

# a linear layer's parameters that have its outputs, and its inputs or groups of them, as last axes
_MATRIX_PARAMETERS = ("weight", "scales", "biases")

# of one layer of the stack, what is whole without having to say so
_REPLICATED_TYPES = (nn.RMSNorm, nn.LayerNorm)


class TensorParallelGroup(Protocol):
    """Which of `size` ranks this is, from 0, and how they add."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_sum(self, x: mx.array) -> mx.array:
        """The sum over all ranks, the same to the bit on each. Lazy; all ranks must evaluate it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """How a module is divided, by the names of what it holds; the rest of it is whole.

    column_parallel: linear layers of which a rank has some outputs. row_parallel: of which it has
    some inputs, and whose outputs are summands. first_axis: modules and parameters of which it has
    a part of the first axis. segments: where in one of these several things lie behind each other,
    each to be divided by itself: their ends, as `mx.split` takes them. counts: numbers, or lists of
    such, that are divided. partial_sum: what the module itself returns is a summand, so its columns
    need no sum.
    """

    column_parallel: Sequence[str] = ()
    row_parallel: Sequence[str] = ()
    first_axis: Sequence[str] = ()
    segments: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    counts: Sequence[str] = ()
    partial_sum: bool = False


# parts that say of themselves that every rank has all of them
REPLICATED = ShardSpec()

# grouped-query attention under the usual names
ATTENTION_SHARDS = ShardSpec(
    column_parallel=("q_proj", "k_proj", "v_proj"),
    row_parallel=("o_proj",),
    counts=("heads", "kv_heads"),
)

# a gated MLP, or many of them stacked
MLP_SHARDS = ShardSpec(column_parallel=("gate_proj", "up_proj"), row_parallel=("down_proj",))


class AllSum(nn.Module):
    """A module whose results are summands, one on each rank."""

    def __init__(self, part: nn.Module, group: TensorParallelGroup) -> None:
        super().__init__()
        self.part = part
        self._all_sum = group.all_sum

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        part: Any = self.part
        return self._all_sum(part(*args, **kwargs))


def shard_model(model: Model, group: TensorParallelGroup, model_type: str) -> None:
    """Leave of `model` what this rank has, in place; nothing is evaluated. model_type: its
    model_type.

    Raises ModelError for a model of which some part does not say how it is cut, and for numbers
    that cannot be divided among so many ranks.
    """
    layers: Any = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, list):
        raise ModelError(
            f"model_type {model_type!r} cannot be sharded: it runs through mlx-lm's class"
        )
    try:
        for number, layer in enumerate(layers):
            _shard_block(layer, group, f"layer {number}")
    except ModelError as error:
        raise ModelError(f"model_type {model_type!r}: {error}") from None


def _shard_block(block: Any, group: TensorParallelGroup, path: str) -> None:
    """Each part of one layer of the stack."""
    for name, part in list(block.children().items()):
        if isinstance(part, _REPLICATED_TYPES):
            continue
        if getattr(part, "shard_spec", None) is None:
            raise ModelError(f"{path}.{name} cannot be sharded")
        block[name] = _shard_module(part, group, f"{path}.{name}")


def _shard_module(part: Any, group: TensorParallelGroup, path: str) -> Any:
    """The part, or what sums it up."""
    # asked before anything changes: it may be derived from counts
    cut: ShardSpec = part.cut
    # and counted first, because heads say more to a reader than rows
    counts = {name: _divide_count(getattr(part, name), group, path, name) for name in cut.counts}
    for name, inner in list(part.children().items()):
        if getattr(inner, "shard_spec", None) is not None:
            part[name] = _shard_module(inner, group, f"{path}.{name}")
    for name in cut.column_parallel:
        _shard_outputs(part[name], group, f"{path}.{name}", cut.segments.get(name, ()))
    for name in cut.row_parallel:
        _shard_inputs(part[name], group, f"{path}.{name}")
        if not cut.partial_sum:
            part[name] = AllSum(part[name], group)
    for name in cut.first_axis:
        _shard_first_axis(part, name, group, f"{path}.{name}", cut.segments.get(name, ()))
    for name, count in counts.items():
        setattr(part, name, count)
    return AllSum(part, group) if cut.partial_sum else part


def _shard_outputs(
    layer: Any, group: TensorParallelGroup, path: str, split_points: Sequence[int]
) -> None:
    """[.., out, in] -> [.., out / n, in]."""
    for name in _MATRIX_PARAMETERS:
        if name in layer:
            layer[name] = _take_shard(layer[name], -2, group, path, split_points)
    if "bias" in layer:
        layer.bias = _take_shard(layer.bias, -1, group, path, split_points)


def _shard_inputs(layer: Any, group: TensorParallelGroup, path: str) -> None:
    """[.., out, in] -> [.., out, in / n], what is quantised in whole groups."""
    groups = layer.get("scales")
    if groups is not None and groups.shape[-1] % group.size:
        width = groups.shape[-1] * layer.group_size
        raise ModelError(
            f"{path} takes {width} inputs, quantised in groups of {layer.group_size}: the groups "
            f"cannot be split over {group.size} ranks"
        )
    for name in _MATRIX_PARAMETERS:
        if name in layer:
            layer[name] = _take_shard(layer[name], -1, group, path, ())
    if "bias" in layer and group.rank > 0:
        layer.bias = mx.zeros_like(layer.bias)


def _shard_first_axis(
    part: Any, name: str, group: TensorParallelGroup, path: str, split_points: Sequence[int]
) -> None:
    held = part[name]
    if isinstance(held, mx.array):
        part[name] = _take_shard(held, 0, group, path, split_points)
        return
    for inner, array in list(held.items()):
        if isinstance(array, mx.array):
            held[inner] = _take_shard(array, 0, group, path, split_points)


def _take_shard(
    array: mx.array, axis: int, group: TensorParallelGroup, path: str, split_points: Sequence[int]
) -> mx.array:
    """This rank's part of each of the segments that end there, along the axis."""
    what = "inputs" if axis == -1 else "outputs"
    parts = list[mx.array]()
    for segment in mx.split(array, list(split_points), axis=axis):
        length = _divide_count(segment.shape[axis], group, path, what)
        start = group.rank * length
        parts.append(mx.split(segment, [start, start + length], axis=axis)[1])
    # contiguous: a mere slice would keep all of it in memory
    return mx.contiguous(mx.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0])


def _divide_count(count: Any, group: TensorParallelGroup, path: str, unit: str) -> Any:
    """A rank's part of a number of things, or of each of a list of such."""
    if isinstance(count, list):
        return [_divide_count(each, group, path, unit) for each in count]
    if count % group.size:
        raise ModelError(f"{path}: {count} {unit} cannot be split over {group.size} ranks")
    return count // group.size
