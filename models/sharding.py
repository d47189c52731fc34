"""Tensor parallelism: shards a model's weights across ranks.

Knows: modules, the axes of their parameters, the sharding that a module declares. Must not know:
the communication of ranks, architectures.

As in Shoeybi et al. 2019 ("Megatron-LM", section 3), each rank has some of the attention heads and
part of an MLP's inner width. A layer therefore needs two all-reduce operations.

    x ──> rows of W ──> own heads, own inner width ──> columns of W ──> all_sum ──> y
    whole               1/n                            partial sum                  whole

Embeddings, norms, routers, the head and the residual stream are replicated. Only rank 0 adds a bias
after a sum.

A module declares its sharding with the attribute `shard_spec`, and a block the names of further
layers that are replicated with `replicated`, so architectures that consist of such modules need no
code here. Weights need not be loaded. Only a rank's part will be read, and
quantized weights are split between groups. mlx.nn.layers.distributed is not used, because it has
sharded versions of only two kinds of layers, each with a separate sum. It supports neither experts,
whose outputs are added before the sum, nor layers with a global scale. In this module, layers keep
their types.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from models.base import Model, ModelError

# the parameters of a linear layer whose last two axes are its outputs and its inputs (or groups of
# inputs)
_MATRIX_PARAMETERS = ("weight", "scales", "biases")

# the modules of a block that are replicated without a declaration
_REPLICATED_TYPES = (nn.RMSNorm, nn.LayerNorm)


class TensorParallelGroup(Protocol):
    """The group of ranks. rank: the rank of this process, from 0. size: the number of ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_sum(self, x: mx.array) -> mx.array:
        """Returns the sum over all ranks, which is bit-identical on each rank. It is lazy, and all
        ranks must evaluate it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """The division of a module, by the names of its children and parameters. All others are
    replicated.

    column_parallel: linear layers whose outputs are divided. row_parallel: linear layers whose
    inputs are divided and whose outputs are partial sums. first_axis: modules and parameters whose
    first axis is divided. segments: the split points, as in `mx.split`, of those that are
    concatenations. Each segment is divided separately. counts: attributes to divide, which are
    numbers or lists of numbers. partial_sum: whether the output of the module is the partial sum,
    so that its row-parallel layers are not summed.
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

# a gated MLP, or a stack of gated MLPs
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
    """Reduces `model` to this rank's part, in place. Nothing is evaluated.

    Raises ModelError for a model with a module that does not declare its sharding, and for sizes
    that are not divisible by the number of ranks.
    """
    layers: Any = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, list):
        raise ModelError(
            f"model_type {model_type!r} cannot be sharded, because it runs through mlx-lm's class"
        )
    try:
        for number, layer in enumerate(layers):
            _shard_block(layer, group, f"layer {number}")
    except ModelError as error:
        raise ModelError(f"model_type {model_type!r}: {error}") from None


def _shard_block(block: Any, group: TensorParallelGroup, path: str) -> None:
    """Shards each child of one layer of the stack."""
    replicated: Sequence[str] = getattr(block, "replicated", ())
    for name, part in list(block.children().items()):
        if isinstance(part, _REPLICATED_TYPES) or name in replicated:
            continue
        if getattr(part, "shard_spec", None) is None:
            raise ModelError(f"{path}.{name} cannot be sharded")
        block[name] = _shard_module(part, group, f"{path}.{name}")


def _shard_module(part: Any, group: TensorParallelGroup, path: str) -> Any:
    """Returns the sharded module, wrapped in AllSum if its output is a partial sum."""
    # read before anything changes, because it may be computed from counts
    spec: ShardSpec = part.shard_spec
    # counts come first, because an error about heads is clearer than an error about rows
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
    """Shards [.., out, in] to [.., out / n, in]."""
    for name in _MATRIX_PARAMETERS:
        if name in layer:
            layer[name] = _take_shard(layer[name], -2, group, path, split_points)
    if "bias" in layer:
        layer.bias = _take_shard(layer.bias, -1, group, path, split_points)


def _shard_inputs(layer: Any, group: TensorParallelGroup, path: str) -> None:
    """Shards [.., out, in] to [.., out, in / n]. Quantized weights are split in whole groups."""
    groups = layer.get("scales")
    if groups is not None and groups.shape[-1] % group.size:
        width = groups.shape[-1] * layer.group_size
        raise ModelError(
            f"{path} has {width} inputs, quantized in groups of {layer.group_size}: the groups "
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
    parameter = part[name]
    if isinstance(parameter, mx.array):
        part[name] = _take_shard(parameter, 0, group, path, split_points)
        return
    for inner, array in list(parameter.items()):
        if isinstance(array, mx.array):
            parameter[inner] = _take_shard(array, 0, group, path, split_points)


def _take_shard(
    array: mx.array, axis: int, group: TensorParallelGroup, path: str, split_points: Sequence[int]
) -> mx.array:
    """Returns this rank's part of each segment of the axis."""
    what = "inputs" if axis == -1 else "outputs"
    parts = list[mx.array]()
    for segment in mx.split(array, list(split_points), axis=axis):
        length = _divide_count(segment.shape[axis], group, path, what)
        start = group.rank * length
        parts.append(mx.split(segment, [start, start + length], axis=axis)[1])
    # contiguous, because a slice would keep the whole array in memory
    return mx.contiguous(mx.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0])


def _divide_count(count: Any, group: TensorParallelGroup, path: str, unit: str) -> Any:
    """Returns a rank's part of a number, or of each number of a list."""
    if isinstance(count, list):
        return [_divide_count(each, group, path, unit) for each in count]
    if count % group.size:
        raise ModelError(f"{path}: {count} {unit} cannot be split over {group.size} ranks")
    return count // group.size
