"""Low-rank adapters (LoRA, Hu et al. 2021) of one model, selected per row of a batch.

Knows: linear layers, the tensors of adapters in PEFT's and mlx-lm's formats. Must not know:
architectures, requests, disks.

The adapted model is a second tree of modules, which shares all weights with the model. In it, each
layer that an adapter changes also computes scale * B(A(x)) for the rows that use the adapter. A
batch without adapters uses the model itself, so adapters cost it nothing.

Both products are batch-invariant where those of the model are (models/cpu_layout.py), and an
unused row is not touched, so a row has the same bits alone and in a batch with any other adapters.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from models.base import Model, ModelError
from models.cpu_layout import restore_methods, to_cpu_layer
from models.gguf.layers import GgufLinear
from models.multimodal import strip_text_prefix
from models.quant import replace_leaves

# The kernels multiply blocks of this number of rows of a weight.
_RANK_STEP = 16

# A larger rank than any published adapter has.
_MAX_RANK = 4096

# The names of both factors of a layer: PEFT's [r, in] and [out, r], mlx-lm's [in, r] and [r, out].
_PEFT_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_MLX_NAME = re.compile(r"(.+)\.lora_([ab])")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFactors:
    """The factors of one layer: a [rank, in], b [out, rank], and the scale of their product."""

    a: mx.array
    b: mx.array
    scale: float


# The factors by the name of the layer.
LoraWeights = Mapping[str, LoraFactors]


def read_lora_weights(
    config: Mapping[str, Any], tensors: Mapping[str, mx.array]
) -> dict[str, LoraFactors]:
    """Returns the factors of an adapter. config: adapter_config.json. Raises ModelError for an
    adapter that changes more than linear layers, and for an unknown or incomplete format."""
    peft = "peft_type" in config
    _check_supported(config, peft=peft)
    pattern = _PEFT_NAME if peft else _MLX_NAME
    halves: dict[str, dict[str, mx.array]] = {}
    for name, array in tensors.items():
        match = pattern.fullmatch(name)
        if match is None:
            raise foreign_tensor_error(name)
        layer, half = strip_text_prefix(match[1]), match[2].lower()
        halves.setdefault(layer, {})[half] = array if peft else array.T
    if not halves:
        raise ModelError("the adapter has no tensors")
    found: dict[str, LoraFactors] = {}
    for layer, both in sorted(halves.items()):
        a, b = pair_factors(layer, both)
        scale = _find_scale(layer, a.shape[0], config, peft=peft)
        found[layer] = LoraFactors(a=a, b=b, scale=scale)
    return found


def foreign_tensor_error(name: str) -> ModelError:
    return ModelError(
        f"the adapter has the tensor {name}, which is not a factor of a linear layer: only LoRA of "
        "linear layers is supported"
    )


def _check_supported(config: Mapping[str, Any], *, peft: bool) -> None:
    kind = config.get("peft_type") if peft else config.get("fine_tune_type", "lora")
    if str(kind).lower() != "lora":
        raise ModelError(f"adapter_config.json declares the type {kind!r}: only LoRA is supported")
    for key, allowed in (("use_dora", (False,)), ("bias", ("none",)), ("modules_to_save", ([],))):
        value = config.get(key)
        if value is not None and value not in allowed:
            raise ModelError(f"adapter_config.json: {key} = {value!r} is not supported")


def pair_factors(layer: str, both: Mapping[str, mx.array]) -> tuple[mx.array, mx.array]:
    """Returns the factors a and b of a layer. Raises ModelError if one is missing, or if their
    shapes do not match."""
    a, b = both.get("a"), both.get("b")
    if a is None or b is None:
        raise ModelError(f"the adapter has only one factor of {layer}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not 0 < a.shape[0] <= _MAX_RANK:
        raise ModelError(
            f"the factors of {layer} have the shapes {list(a.shape)} and {list(b.shape)}, which do "
            "not match"
        )
    return a, b


def _find_scale(layer: str, rank: int, config: Mapping[str, Any], *, peft: bool) -> float:
    """Returns PEFT's alpha / rank, or alpha / sqrt(rank) with rslora, or mlx-lm's scale."""
    if not peft:
        parameters: Any = config.get("lora_parameters")
        scale: Any = parameters.get("scale") if isinstance(parameters, Mapping) else None
        if not isinstance(scale, int | float):
            raise ModelError("adapter_config.json has no lora_parameters.scale")
        return float(scale)
    alpha: Any = config.get("lora_alpha")
    patterns: Any = config.get("alpha_pattern")
    if isinstance(patterns, Mapping):
        for pattern, value in cast(Mapping[str, Any], patterns).items():
            if re.search(rf"(.*\.)?({pattern})$", layer):
                alpha = value
    if not isinstance(alpha, int | float):
        raise ModelError("adapter_config.json has no lora_alpha")
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


class RowAdapters:
    """The adapters of the rows of the next forward pass: for each adapter in use, its index and the
    rows, or None for all rows."""

    def __init__(self) -> None:
        self.groups: Sequence[tuple[int, mx.array | None]] = ()

    def select(self, adapters: Sequence[int | None]) -> None:
        """adapters: the adapter of each row; None for a row without one."""
        used = sorted({adapter for adapter in adapters if adapter is not None})
        if len(used) == 1 and None not in adapters:
            self.groups = [(used[0], None)]
            return
        self.groups = [
            (adapter, mx.array([row for row, one in enumerate(adapters) if one == adapter]))
            for adapter in used
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """The change of a layer's output, scale * b(a(x)), in the layout of the device."""

    a: Any
    b: Any
    scale: float

    @staticmethod
    def create(factors: LoraFactors) -> "_Change":
        """Pads the rank with zeros."""
        padding = -factors.a.shape[0] % _RANK_STEP
        return _Change(
            a=_make_linear(mx.pad(factors.a, [(0, padding), (0, 0)])),
            b=_make_linear(mx.pad(factors.b, [(0, 0), (0, padding)])),
            scale=factors.scale,
        )

    def __call__(self, x: mx.array) -> mx.array:
        return self.scale * self.b(self.a(x))


def _make_linear(weight: mx.array) -> Any:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = weight
    return to_cpu_layer(layer)


class _Changes:
    """The changes of one layer by the index of the adapter. It is not a dict, because mlx.nn would
    take its keys for names of parameters."""

    def __init__(self) -> None:
        self.by_adapter: dict[int, _Change] = {}
        self.num_calls = 0  # of the layer


class LoraLinear(nn.Module):
    """A linear layer of the adapted model. base: the layer of the model."""

    def __init__(self, base: Any, rows: RowAdapters, changes: _Changes) -> None:
        super().__init__()
        self._base, self._rows, self._changes = base, rows, changes

    def __call__(self, x: mx.array) -> mx.array:
        """Maps [B, L, in] to [B, L, out]."""
        self._changes.num_calls += 1
        y: mx.array = self._base(x)
        for adapter, rows in self._rows.groups:
            change = self._changes.by_adapter.get(adapter)
            if change is None:
                continue
            if rows is None:
                y = y + change(x).astype(y.dtype)
            else:
                y = y.at[rows].add(change(x[rows]).astype(y.dtype))
        return y


class AdaptedModel:
    """A model with adapters.

    model: the tree of modules that computes rows with adapters, after `select`. It has the same
        caches as the model that it was made of.
    """

    def __init__(self, model: Model) -> None:
        self._base = model
        self._rows = RowAdapters()
        self._changes: dict[str, _Changes] = {}
        self._next = 0
        self.model: Model = _copy_modules(model)

    def select(self, adapters: Sequence[int | None]) -> None:
        """Selects the adapter of each row of the next forward pass, by its index."""
        self._rows.select(adapters)

    def add(self, weights: LoraWeights) -> int:
        """Adds an adapter and returns its index, which is never used again. Raises ModelError if
        the model lacks one of its layers, does not call it, or it has a different shape; then no
        row can use the adapter."""
        modules = dict(cast(nn.Module, self._base).named_modules())
        for name, factors in weights.items():
            _check_layer(modules.get(name), name, factors)
        self._wrap(weights.keys() - self._changes.keys())
        index, self._next = self._next, self._next + 1
        for name, factors in weights.items():
            self._changes[name].by_adapter[index] = _Change.create(factors)
        try:
            self._check_called(weights)
        except Exception:
            self.remove(index)
            raise
        return index

    def _check_called(self, names: Iterable[str]) -> None:
        """Raises ModelError unless a prompt and a decode step call each of these layers. Otherwise
        the model uses a weight directly, without the adapter. Nothing is evaluated."""
        self._rows.select([None])
        for length in (2, 1):
            before = {name: self._changes[name].num_calls for name in names}
            kv = self.model.make_kv()
            try:
                self.model.logits(self.model(mx.zeros((1, length), mx.int32), kv))
            except AttributeError as error:  # of the weight of a wrapped layer
                raise ModelError(f"the model does not support this adapter: {error}") from error
            for name, count in before.items():
                if self._changes[name].num_calls == count:
                    raise ModelError(
                        f"the adapter changes {name}, whose weight the model uses directly: an "
                        "adapter of this layer is not supported"
                    )

    def remove(self, adapter: int) -> None:
        """Removes an adapter that no row uses."""
        for changes in self._changes.values():
            changes.by_adapter.pop(adapter, None)

    def parameters(self, adapter: int) -> list[mx.array]:
        """Returns the arrays of an adapter."""
        found = [changes.by_adapter.get(adapter) for changes in self._changes.values()]
        return [layer["weight"] for change in found if change for layer in (change.a, change.b)]

    def _wrap(self, names: Set[str]) -> None:
        """Wraps layers, each before the first adapter changes it."""

        def wrap(name: str, layer: Any) -> Any:
            if name not in names:
                return layer
            changes = self._changes[name] = _Changes()
            return LoraLinear(layer, self._rows, changes)

        replace_leaves(cast(nn.Module, self.model), wrap)


def _check_layer(layer: Any, name: str, factors: LoraFactors) -> None:
    """layer: the model's layer of that name, or None."""
    if not isinstance(layer, nn.Linear | nn.QuantizedLinear | GgufLinear):
        raise ModelError(
            f"the adapter changes {name}, which is not a linear layer of the model: use an adapter "
            "that was trained on this model"
        )
    given = (factors.b.shape[0], factors.a.shape[1])
    if given != (shape := _linear_shape(layer)):
        raise ModelError(
            f"the adapter's factors of {name} are for {given[1]} inputs and {given[0]} outputs, "
            f"but the model's layer has {shape[1]} and {shape[0]}: use an adapter that was trained "
            "on this model"
        )


def _linear_shape(layer: Any) -> tuple[int, int]:
    """Returns the numbers of outputs and inputs of a linear layer, quantized or not."""
    if isinstance(layer, GgufLinear):
        return layer.outputs, layer.inputs
    outputs, columns = layer.weight.shape
    return outputs, columns * 32 // layer.bits if "scales" in layer else columns


def _copy_modules(module: Any) -> Any:
    """Copies a tree of modules without its arrays, and without fused operations. Layers without
    children are not copied."""
    if isinstance(module, nn.Module):
        if not module.children():
            return module
        copied = copy.copy(module)
        restore_methods(copied)
        for name, child in module.items():
            copied[name] = _copy_modules(child)
        return copied
    if isinstance(module, list):
        return [_copy_modules(child) for child in cast(list[Any], module)]
    if isinstance(module, tuple):
        return tuple(_copy_modules(child) for child in cast(tuple[Any, ...], module))
    if isinstance(module, dict):
        return {name: _copy_modules(child) for name, child in cast(dict[str, Any], module).items()}
    return module
