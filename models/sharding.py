"""Tensor parallelism: divides a model's weights among ranks.

Knows: modules, the axes of their parameters, how a module declares its sharding. Must not know: how
ranks communicate, architectures.

As in Shoeybi et al. 2019 ("Megatron-LM", section 3), each rank has some of the attention heads and
part of an MLP's inner width, so a layer needs two sums.

    x ──> rows of W ──> own heads, own inner width ──> columns of W ──> all_sum ──> y
    whole               1/n                            partial sum                  whole

Embeddings, norms, routers, the head and the residual stream are replicated. A bias after a sum is
added by rank 0 only.

A module declares with the attribute `shard_spec` how it is divided, so architectures made of such
modules need no code here. Weights need not be loaded: only a rank's part will be read, and
quantized weights are split between groups. (mlx.nn.layers.distributed has sharded versions of two
kinds of layers only, each with a sum of its own: not of experts, whose outputs are added before the
sum, nor of layers with a global scale. Here layers keep their types.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from models.base import Model, ModelError

# parameters of a linear layer whose last two axes are its outputs and its inputs (or groups of
# inputs)
_MATRIX_PARAMETERS = ("weight", "scales", "biases")

# modules of a block that are replicated without a declaration
_REPLICATED_TYPES = (nn.RMSNorm, nn.LayerNorm)


class TensorParallelGroup(Protocol):
    """The group of ranks. rank: of this process, from 0. size: number of ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_sum(self, x: mx.array) -> mx.array:
        """The sum over all ranks, bitwise equal on each. Lazy; all ranks must evaluate it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """How a module is divided, by the names of its children and parameters; the others are
    replicated.

    column_parallel: linear layers whose outputs are divided. row_parallel: linear layers whose
    inputs are divided, and whose outputs are partial sums. first_axis: modules and parameters whose
    first axis is divided. segments: for those of these that are concatenations, each part of which
    is divided separately: the split points, as in `mx.split`. counts: attributes that are numbers,
    or lists of numbers, to divide. partial_sum: the module's output is the partial sum, so its
    row-parallel layers are not summed.
    """

    column_parallel: Sequence[str] = ()
    row_parallel: Sequence[str] = ()
    first_axis: Sequence[str] = ()
    segments: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    counts: Sequence[str] = ()
    partial_sum: bool = False


# for modules that are replicated
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
    """Sums the outputs of a module over all ranks."""

    def __init__(self, part: nn.Module, group: TensorParallelGroup) -> None:
        super().__init__()
        self.part = part
        self._all_sum = group.all_sum

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        part: Any = self.part
        return self._all_sum(part(*args, **kwargs))


def shard_model(model: Model, group: TensorParallelGroup, model_type: str) -> None:
    """Reduce `model` to this rank's part, in place; nothing is evaluated.

    Raises ModelError for a model with a module that does not declare its sharding, and for sizes
    that are not divisible by the number of ranks.
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
    """Shard each child of one layer of the stack."""
    for name, part in list(block.children().items()):
        if isinstance(part, _REPLICATED_TYPES):
            continue
        if getattr(part, "shard_spec", None) is None:
            raise ModelError(f"{path}.{name} cannot be sharded")
        block[name] = _shard_module(part, group, f"{path}.{name}")


def _shard_module(part: Any, group: TensorParallelGroup, path: str) -> Any:
    """The sharded module, wrapped in AllSum if its output is a partial sum."""
    # read before anything changes: it may be computed from counts
    spec: ShardSpec = part.shard_spec
    # counts first, because an error about heads is clearer than one about rows
    counts = {name: _divide_count(getattr(part, name), group, path, name) for name in spec.counts}
    for name, inner in list(part.children().items()):
        if getattr(inner, "shard_spec", None) is not None:
            part[name] = _shard_module(inner, group, f"{path}.{name}")
    for name in spec.column_parallel:
        _shard_outputs(part[name], group, f"{path}.{name}", spec.segments.get(name, ()))
    for name in spec.row_parallel:
        _shard_inputs(part[name], group, f"{path}.{name}")
        if not spec.partial_sum:
            part[name] = AllSum(part[name], group)
    for name in spec.first_axis:
        _shard_first_axis(part, name, group, f"{path}.{name}", spec.segments.get(name, ()))
    for name, count in counts.items():
        setattr(part, name, count)
    return AllSum(part, group) if spec.partial_sum else part


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
    """[.., out, in] -> [.., out, in / n], quantized weights in whole groups."""
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
    """This rank's part of each segment of the axis."""
    what = "inputs" if axis == -1 else "outputs"
    parts = list[mx.array]()
    for segment in mx.split(array, list(split_points), axis=axis):
        length = _divide_count(segment.shape[axis], group, path, what)
        start = group.rank * length
        parts.append(mx.split(segment, [start, start + length], axis=axis)[1])
    # contiguous: a slice would keep the whole array in memory
    return mx.contiguous(mx.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0])


def _divide_count(count: Any, group: TensorParallelGroup, path: str, unit: str) -> Any:
    """A rank's part of a number, or of each number of a list."""
    if isinstance(count, list):
        return [_divide_count(each, group, path, unit) for each in count]
    if count % group.size:
        raise ModelError(f"{path}: {count} {unit} cannot be split over {group.size} ranks")
    return count // group.size
