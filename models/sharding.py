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
_MATRICES = ("weight", "scales", "biases")

# of one layer of the stack, what is whole without having to say so
_WHOLE = (nn.RMSNorm, nn.LayerNorm)


class Share(Protocol):
    """Which of `size` ranks this is, from 0, and how they add."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def total(self, x: mx.array) -> mx.array:
        """The sum over all ranks, the same to the bit on each. Lazy; all ranks must evaluate it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a module is divided, by the names of what it holds; the rest of it is whole.

    rows: linear layers of which a rank has some outputs. columns: of which it has some inputs, and
    whose outputs are summands. firsts: modules and parameters of which it has a part of the first
    axis. segments: where in one of these several things lie behind each other, each to be divided
    by itself: their ends, as `mx.split` takes them. counts: numbers, or lists of such, that are
    divided. partial: what the module itself returns is a summand, so its columns need no sum.
    """

    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    firsts: Sequence[str] = ()
    segments: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    counts: Sequence[str] = ()
    partial: bool = False


# parts that say of themselves that every rank has all of them
WHOLE = Cut()

# grouped-query attention under the usual names
HEADS = Cut(rows=("q_proj", "k_proj", "v_proj"), columns=("o_proj",), counts=("heads", "kv_heads"))

# a gated MLP, or many of them stacked
INNER = Cut(rows=("gate_proj", "up_proj"), columns=("down_proj",))


class Summed(nn.Module):
    """A module whose results are summands, one on each rank."""

    def __init__(self, part: nn.Module, share: Share) -> None:
        super().__init__()
        self.part = part
        self._total = share.total

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        part: Any = self.part
        return self._total(part(*args, **kwargs))


def divide(model: Model, share: Share, kind: str) -> None:
    """Leave of `model` what this rank has, in place; nothing is evaluated. kind: its model_type.

    Raises ModelError for a model of which some part does not say how it is cut, and for numbers
    that cannot be divided among so many ranks.
    """
    layers: Any = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, list):
        raise ModelError(f"model_type {kind!r} cannot be sharded: it runs through mlx-lm's class")
    try:
        for number, layer in enumerate(layers):
            _divide_parts(layer, share, f"layer {number}")
    except ModelError as error:
        raise ModelError(f"model_type {kind!r}: {error}") from None


def _divide_parts(block: Any, share: Share, path: str) -> None:
    """Each part of one layer of the stack."""
    for name, part in list(block.children().items()):
        if isinstance(part, _WHOLE):
            continue
        if getattr(part, "cut", None) is None:
            raise ModelError(f"{path}.{name} cannot be sharded")
        block[name] = _divided(part, share, f"{path}.{name}")


def _divided(part: Any, share: Share, path: str) -> Any:
    """The part, or what sums it up."""
    # asked before anything changes: it may be derived from counts
    cut: Cut = part.cut
    # and counted first, because heads say more to a reader than rows
    counts = {name: _counted(getattr(part, name), share, path, name) for name in cut.counts}
    for name, inner in list(part.children().items()):
        if getattr(inner, "cut", None) is not None:
            part[name] = _divided(inner, share, f"{path}.{name}")
    for name in cut.rows:
        _cut_rows(part[name], share, f"{path}.{name}", cut.segments.get(name, ()))
    for name in cut.columns:
        _cut_columns(part[name], share, f"{path}.{name}")
        if not cut.partial:
            part[name] = Summed(part[name], share)
    for name in cut.firsts:
        _cut_firsts(part, name, share, f"{path}.{name}", cut.segments.get(name, ()))
    for name, count in counts.items():
        setattr(part, name, count)
    return Summed(part, share) if cut.partial else part


def _cut_rows(layer: Any, share: Share, path: str, ends: Sequence[int]) -> None:
    """[.., out, in] -> [.., out / n, in]."""
    for name in _MATRICES:
        if name in layer:
            layer[name] = _piece(layer[name], -2, share, path, ends)
    if "bias" in layer:
        layer.bias = _piece(layer.bias, -1, share, path, ends)


def _cut_columns(layer: Any, share: Share, path: str) -> None:
    """[.., out, in] -> [.., out, in / n], what is quantised in whole groups."""
    groups = layer.get("scales")
    if groups is not None and groups.shape[-1] % share.size:
        width = groups.shape[-1] * layer.group_size
        raise ModelError(
            f"{path} takes {width} inputs, quantised in groups of {layer.group_size}: the groups "
            f"cannot be split over {share.size} ranks"
        )
    for name in _MATRICES:
        if name in layer:
            layer[name] = _piece(layer[name], -1, share, path, ())
    if "bias" in layer and share.rank > 0:
        layer.bias = mx.zeros_like(layer.bias)


def _cut_firsts(part: Any, name: str, share: Share, path: str, ends: Sequence[int]) -> None:
    held = part[name]
    if isinstance(held, mx.array):
        part[name] = _piece(held, 0, share, path, ends)
        return
    for inner, array in list(held.items()):
        if isinstance(array, mx.array):
            held[inner] = _piece(array, 0, share, path, ends)


def _piece(array: mx.array, axis: int, share: Share, path: str, ends: Sequence[int]) -> mx.array:
    """This rank's part of each of the segments that end there, along the axis."""
    what = "inputs" if axis == -1 else "outputs"
    parts = list[mx.array]()
    for segment in mx.split(array, list(ends), axis=axis):
        length = _counted(segment.shape[axis], share, path, what)
        start = share.rank * length
        parts.append(mx.split(segment, [start, start + length], axis=axis)[1])
    # contiguous: a mere slice would keep all of it in memory
    return mx.contiguous(mx.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0])


def _counted(count: Any, share: Share, path: str, what: str) -> Any:
    """A rank's part of a number of things, or of each of a list of such."""
    if isinstance(count, list):
        return [_counted(each, share, path, what) for each in count]
    if count % share.size:
        raise ModelError(f"{path}: {count} {what} cannot be split over {share.size} ranks")
    return count // share.size
