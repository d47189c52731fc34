"""Runs architectures that are not implemented here with mlx-lm's model classes.

Knows: the names and the constructors of mlx-lm's models, the interface of models/base.py. Must not
know: individual architectures.

This is the only module that imports mlx-lm, and only when such a model is loaded. transformers, on
which mlx-lm depends, is not imported. Nothing is downloaded, and no code from a model's folder is
run.

Linear layers, experts and norms are replaced by ours, and the attention is computed by our caches
(models/mlx_lm_cache.py) where the class permits it. A trial, whose forward passes are never
evaluated, finds this out, because a class may do anything with the output of a cache. The rows of a
batch share a pass if the class can compute a batch, and if this does not change a bit on a CPU;
otherwise they are computed one by one. Context shift is not supported, because it would need to
know how a class rotates its keys.
"""

import ast
import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import io
import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from models.attention_pieces import device_of_shape
from models.attention_route import longest_query
from models.base import Model, ModelError, SelectPositions, select_all, select_last
from models.checkpoint_config import explain_missing_library, num_query_heads
from models.conv import DepthwiseConv
from models.experts import ExpertLinear
from models.image_inputs import ImageInputs, ImageRules
from models.kv import LayerCache, evaluate_caches
from models.layers import CenteredNorm
from models.mlx_lm_cache import (
    LEAK_PRIMITIVE,
    AttentionTrait,
    MlxLmBatch,
    MlxLmLayerCache,
    list_traits,
    make_attention,
    share_traits,
    wrap_caches,
)
from models.mlx_lm_config import ClassKeys, find_class_keys, find_modules, normalize_config
from models.mlx_lm_ssm import make_ssm_update
from models.quant import replace_leaves

_LIBRARY = "mlx_lm"
_ALIAS_TABLES = ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING")

# the config keys of the context length, in order of preference
_CONTEXT_LENGTH_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "model_max_length",
    "max_context_length",
    "n_positions",
    "n_ctx",
    "seq_length",
    "block_size",
)
_MAX_INT32 = 1 << 31
_VOCAB_SIZE_KEYS = ("vocab_size", "padded_vocab_size", "n_vocab")

# the prefixes of the text model in multimodal classes; see models/multimodal.py
_TEXT_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))

_GPT_PREFIX = "transformer"
_EMBEDDING = "model.embed_tokens."

# Classes that multiply by the weight of the embedding, or do not scale the logits, if the embedding
# is the output layer, and the name of their output layer otherwise.
_HEAD_NAMES: Mapping[str, str] = {
    "llama4_text": "output",
    "minicpm": "lm_head",
    "minicpm3": "lm_head",
    "seed_oss": "lm_head",
}

# the modules that compute hidden states, to which a class applies its output layer
_BACKBONES = ("language_model.model", "model", "transformer", "backbone")

# Operations of MLX whose result for a row may depend on the number of rows or on their layout. The
# means of norms that our operations do not compute end in `Rsqrt`.
_VARIANT_PRIMITIVES = frozenset(
    {
        "AddMM",
        "BlockMaskedMM",
        "Convolution",
        "GatherMM",
        "GatherQMM",
        "LayerNorm",
        "LogSumExp",
        "Matmul",
        "QuantizedMatmul",
        "RMSNorm",
        "Rsqrt",
        "ScaledDotProductAttention",
        "SegmentedMM",
    }
)

# the largest difference of logits between a batch and its rows on a GPU, which rounds differently,
# as a part of the largest logit
_MAX_BATCH_DIFFERENCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The config values that the server needs. mlx-lm reads all other values."""

    max_position_embeddings: int
    vocab_size: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        return cls(
            max_position_embeddings=_first_positive_int(
                config, _CONTEXT_LENGTH_KEYS, "context length"
            ),
            vocab_size=_first_positive_int(config, _VOCAB_SIZE_KEYS, "vocabulary size"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Has the same attributes as an architecture module: Config and Model."""

    Config: type[AdapterConfig]
    Model: Callable[[AdapterConfig], Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelClasses:
    """The classes of an architecture in mlx-lm. keys: the config keys that they use. wraps: whether
    they expect the text config inside the config of a multimodal model."""

    kind: str
    model: Any
    arguments: Any
    keys: ClassKeys
    wraps: bool = False


def find_architecture(
    config: Mapping[str, Any], whole: Mapping[str, Any] | None = None
) -> Architecture:
    """Returns mlx-lm's class for a checkpoint. config: the config of the text model. whole: the
    config of the whole model; None if it is a text model. mlx-lm's class for the whole model is
    preferred. Raises ModelError if there is none, or if the library is not installed."""
    kind: str = config["model_type"]
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is None:
        raise ModelError(explain_missing_library(kind))
    if config.get("model_file") is not None:
        raise ModelError(
            "config.json's model_file refers to code in the model folder, which must not be run"
        )
    folders = spec.submodule_search_locations or ()
    # import a class only if no file has that name
    if not any((Path(folder) / "models" / f"{kind}.py").is_file() for folder in folders):
        _resolve_classes(config, whole)

    def make(_: AdapterConfig) -> Model:
        return _build_model(_resolve_classes(config, whole), config, whole)

    return Architecture(Config=AdapterConfig, Model=make)


def _build_model(
    classes: _ModelClasses, config: Mapping[str, Any], whole: Mapping[str, Any] | None
) -> Model:
    normalized = normalize_config(config, classes.keys)
    given = normalized.config
    if classes.wraps:
        # mlx-lm's classes may modify the config
        outer = copy.deepcopy(dict(whole)) if whole is not None else {"model_type": classes.kind}
        given = {**outer, "text_config": given}
    lacking = [
        field.name
        for field in dataclasses.fields(classes.arguments)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in given
    ]
    if lacking:
        raise ModelError(f"config.json lacks {', '.join(lacking)}")
    with _as_model_error(
        f"mlx-lm's {classes.kind} implementation does not support this config.json"
    ):
        heads = num_query_heads(normalized.config)
        tied = bool(config.get("tie_word_embeddings"))
        subclass = _subclass_model(classes, heads, normalized.window, tied=tied)
        made: Any = subclass(classes.arguments.from_dict(given))
    normalized.check_rope(made)
    _replace_layers(made)
    head = _HEAD_NAMES.get(classes.keys.name)
    if head is not None and made.args.tie_word_embeddings:
        _tie_head(made, head)
    # fail here rather than at the first request
    with _as_model_error(
        f"mlx-lm's {classes.kind} implementation cannot create caches for this config.json"
    ):
        made.make_kv()
    return made


def _replace_layers(model: nn.Module) -> None:
    """Replaces layers of mlx-lm and MLX with ours, which have CPU kernels. Their parameters have
    the same names."""
    from mlx_lm.models.switch_layers import SwitchLinear

    def replace(_: str, layer: Any) -> Any:
        if type(layer) is SwitchLinear:
            experts, outputs, inputs = layer.weight.shape
            return ExpertLinear(inputs, outputs, experts, bias="bias" in layer)
        if type(layer) is nn.Conv1d and _is_causal_and_depthwise(layer):
            return DepthwiseConv(layer.weight.shape[0], layer.weight.shape[1], bias="bias" in layer)
        if type(layer) is nn.LayerNorm:
            return CenteredNorm(
                layer.dims, layer.eps, weight="weight" in layer, bias="bias" in layer
            )
        return layer

    replace_leaves(model, replace)


def _tie_head(model: Any, head: str) -> None:
    """Lets a model apply the embedding like a separate output layer. head: the name of such a
    layer. The class of the model is only used by this model."""
    model.args = copy.copy(model.args)
    model.args.tie_word_embeddings = False
    if "tie_word_embeddings" in vars(model):
        model.tie_word_embeddings = False
    setattr(type(model), head, property(lambda self: self.model.embed_tokens.as_linear))


def _is_causal_and_depthwise(layer: Any) -> bool:
    """Returns whether a convolution has one filter per channel. The caller pads the input."""
    return (layer.groups, layer.stride, layer.padding, layer.dilation) == (
        layer.weight.shape[0],
        1,
        0,
        1,
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    """How the caller uses a class, as found by forward passes that evaluate nothing.

    traits: those of the attention layers. selects: whether positions can be selected before the
    output layer. batches: whether a pass over several sequences is possible. Without a trial,
    nothing is.
    """

    traits: Sequence[AttentionTrait]
    selects: bool
    batches: bool


def _subclass_model(classes: _ModelClasses, heads: int, window: int | None, *, tied: bool) -> Any:
    """Returns mlx-lm's class with our interface. The result is a subclass, so that parameters keep
    their checkpoint names. heads: the number of query heads. window: the window of all layers; None
    if the class creates its caches."""
    base, cache = classes.model, _import_cache()

    class MlxLmModel(base):
        kv_dtype: mx.Dtype | None = None
        image_rules: ImageRules | None = None
        # positions are selected before the output layer, whatever the device is
        selects_logits: ClassVar[bool] = True
        _traits: Sequence[AttentionTrait] | None = None
        _trial: _Trial | None = None
        _shares: bool | None = None

        @property
        def batch_invariant(self) -> bool:
            """Whether all operations of a pass are batch-invariant, with the layers that the model
            has now. Nothing is evaluated."""
            kv: Any = self.make_kv()
            outputs = self._forward(mx.zeros((1, 3), mx.int32), kv)
            return self._has_invariant_steps() and not _has_variant_operations(outputs, kv)

        def __call__(
            self,
            tokens: mx.array,
            kv: Sequence[Any],
            select: SelectPositions = select_all,
            images: ImageInputs | None = None,
        ) -> mx.array:
            """Returns the logits [B, L, V] of tokens [B, L]. They are lazy. `logits` returns its
            input."""
            assert images is None
            self._find_trial()
            if not isinstance(kv[0], MlxLmBatch):
                return _forward_in_parts(self._forward, tokens, kv, select)
            if self.shares_pass:
                return self._forward_batch(tokens, kv, select)
            return _forward_rows(self._forward, tokens, kv, select)

        def logits(self, hidden: mx.array) -> mx.array:
            return hidden

        def make_kv(self) -> list[LayerCache]:
            if window is None:
                made = cache.make_prompt_cache(self)
            else:
                made = [cache.RotatingKVCache(max_size=window) for _ in self.layers]
            layers = wrap_caches(made, cache, heads=heads, dtype=self.kv_dtype)
            if self._traits is None:
                self._keep("_traits", tuple(list_traits(layers)))
            share_traits(layers, self._traits or ())
            return layers

        def shift(self, kv: Sequence[LayerCache], start: int, end: int) -> bool:
            return False

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            weights = _add_text_prefix(weights, self.parameters())
            weights = _strip_gpt_prefix(weights, classes.keys)
            if tied and "lm_head" in self:
                # the class has its own head, to which it applies a scale
                for name in [name for name in weights if name.startswith(_EMBEDDING)]:
                    head = f"lm_head.{name.removeprefix(_EMBEDDING)}"
                    weights.setdefault(head, weights[name])
            if hasattr(base, "sanitize"):
                reason = f"mlx-lm's {classes.kind} implementation rejects these tensors"
                with _as_model_error(reason):
                    weights = super().sanitize(weights)
            head = _HEAD_NAMES.get(classes.keys.name)
            if head is None or head in self:
                return weights
            # a tied head that the file also has
            return {k: v for k, v in weights.items() if not k.startswith("lm_head.")}

        @property
        def may_share_pass(self) -> bool:
            """Whether the rows of a batch can be computed in one pass. On a CPU, this must not
            change a bit. Nothing is evaluated."""
            return self._find_trial().batches and (not _on_cpu() or self._has_invariant_steps())

        @property
        def shares_pass(self) -> bool:
            """Whether the rows of a batch are computed in one pass. The first call evaluates a
            short batch, because a class may use the positions of a batch in a way that only the
            numbers show."""
            if self._shares is None:
                equal = self.may_share_pass and self._has_equal_rows(exact=_on_cpu())
                self._keep("_shares", equal)
            return bool(self._shares)

        def _has_invariant_steps(self) -> bool:
            """Whether the result for a row does not depend on other rows, if each of them has one
            position. Recurrent classes may compute several positions differently."""
            if not self._find_trial().batches:
                return False
            # from the start, so that the graph has steps only
            rows: list[list[Any]] = [self.make_kv() for _ in range(2)]
            tokens = mx.zeros((2, 1), mx.int32)
            together = self._forward_batch(tokens, _batch(rows))
            alone: Any = self.make_kv()
            outputs = [together, self._forward(tokens[:1], alone)]
            return not _has_variant_operations(outputs, [*rows[0], *rows[1], *alone])

        def _has_equal_rows(self, *, exact: bool) -> bool:
            kv, twins = self._make_short_caches(), self._make_short_caches()
            tokens = mx.zeros((len(kv), 1), mx.int32)
            together = self._forward_batch(tokens, _batch(kv))
            alone = _forward_rows(self._forward, tokens, _batch(twins))
            if exact:
                return bool(mx.array_equal(together, alone, equal_nan=True).item())
            difference = mx.abs(together - alone).max() / mx.abs(alone).max()
            return bool((difference < _MAX_BATCH_DIFFERENCE).item())

        def _make_short_caches(self) -> list[list[Any]]:
            """Returns the caches of sequences of different lengths."""
            rows: list[list[Any]] = []
            for length in (3, 2):
                rows.append(self.make_kv())
                self._forward(mx.arange(length)[None], rows[-1])
            return rows

        def _find_trial(self) -> _Trial:
            if self._trial is None:
                self._keep("_trial", _Trial(self._traits or (), selects=False, batches=False))
                self._keep("_trial", self._run_trial())
            assert self._trial is not None
            return self._trial

        def _run_trial(self) -> _Trial:
            self.make_kv()
            traits = self._traits or ()
            # the source text shows that a pass would be evaluated
            if classes.keys.reads("item", "tolist", "eval"):
                return _Trial(traits, selects=False, batches=False)
            for trait in traits:
                trait.calls = 0
            kv: Any = self.make_kv()
            for tokens in (mx.zeros((1, 3), mx.int32), mx.zeros((1, 1), mx.int32)):
                self._forward(tokens, kv)
            for trait in traits:
                trait.attends, trait.calls = trait.calls == 2, None
            if self._uses_cached_keys_elsewhere(traits):
                for trait in traits:
                    trait.attends = False
            self._keep("_trial", _Trial(traits, selects=True, batches=False))
            kv = self.make_kv()
            shape = self._forward(mx.zeros((1, 3), mx.int32), kv, select_last).shape
            selects = shape[:-1] == (1, 1)
            self._keep("_trial", _Trial(traits, selects=selects, batches=False))
            return _Trial(traits, selects=selects, batches=self._can_batch())

        def _uses_cached_keys_elsewhere(self, traits: Sequence[AttentionTrait]) -> bool:
            """Whether anything but the attention of its own layer depends on the keys and values
            that a layer got from its cache. They would have to be those of all positions."""
            for trait in traits:
                trait.marks = trait.attends
            kv: Any = self.make_kv()
            outputs = [self._forward(mx.zeros((1, length), mx.int32), kv) for length in (3, 1)]
            for trait in traits:
                trait.marks = False
            return LEAK_PRIMITIVE in _list_primitives(_list_graph(outputs, kv))

        def _can_batch(self) -> bool:
            try:
                kv = self._make_short_caches()
                logits = self._forward_batch(mx.zeros((len(kv), 1), mx.int32), _batch(kv))
            except Exception:  # the class may do anything with a batch
                return False
            return logits.shape[:-1] == (2, 1)

        def _keep(self, name: str, value: Any) -> None:
            # not among the parameters, as MLX's modules keep sequences
            object.__setattr__(self, name, value)

        def _forward(
            self,
            tokens: mx.array,
            kv: Sequence[MlxLmLayerCache],
            select: SelectPositions = select_all,
        ) -> mx.array:
            end = kv[0].offset + tokens.shape[1]
            wrapped = [layer.to_mlx_lm(cache) for layer in kv]
            with _as_model_error(f"mlx-lm's {classes.kind} implementation fails with this config"):
                logits = self._select_logits(tokens, wrapped, select)
            for layer, given in zip(kv, wrapped, strict=True):
                if not layer.update_from_mlx_lm(given, tokens.shape[1]) or layer.offset != end:
                    raise _unsupported_cache_error(classes.kind)
            return logits

        def _forward_batch(
            self, tokens: mx.array, kv: Sequence[MlxLmBatch], select: SelectPositions = select_all
        ) -> mx.array:
            wrapped = [layer.to_mlx_lm(cache) for layer in kv]
            logits = self._select_logits(tokens, wrapped, select)
            for layer, given in zip(kv, wrapped, strict=True):
                layer.update_from_mlx_lm(given)
            return logits

        def _select_logits(
            self, tokens: mx.array, wrapped: Sequence[Any], select: SelectPositions
        ) -> mx.array:
            backbone = _find_backbone(self) if self._find_trial().selects else None
            if backbone is None:
                return select(super().__call__(tokens, cache=wrapped))
            with _select_outputs(backbone, select):
                return super().__call__(tokens, cache=wrapped)

    return MlxLmModel


def _on_cpu() -> bool:
    return mx.default_device().type == mx.DeviceType.cpu


def _find_backbone(model: Any) -> Any:
    """Returns the module that computes hidden states, to which the model applies its output layer.
    Returns None if it is not known."""
    for path in _BACKBONES:
        module = model
        for name in path.split("."):
            module = module.get(name) if isinstance(module, nn.Module) else None
        if isinstance(module, nn.Module):
            return module
    return None


@contextlib.contextmanager
def _select_outputs(module: nn.Module, select: SelectPositions) -> Generator[None]:
    """While the context is active, calls of the module return a selection of positions."""
    kind: Any = type(module)

    class Selecting(kind):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return select(super().__call__(*arguments, **options))

    module.__class__ = Selecting
    try:
        yield
    finally:
        module.__class__ = kind


def _batch(rows: Sequence[Sequence[Any]]) -> list[MlxLmBatch]:
    """Returns the batch of each layer, for the caches of several sequences."""
    offsets = mx.array([row[0].offset for row in rows])
    return [layers[0].make_batch(layers, offsets) for layers in zip(*rows, strict=True)]


def _has_variant_operations(outputs: Any, layers: Sequence[LayerCache]) -> bool:
    """Returns whether the graph of arrays and of layer caches, which are not evaluated, has
    operations of `_VARIANT_PRIMITIVES`."""
    return bool(_list_primitives(_list_graph(outputs, layers)) & _VARIANT_PRIMITIVES)


def _list_graph(outputs: Any, layers: Sequence[LayerCache]) -> Sequence[mx.array]:
    """Returns the arrays of a pass and of layer caches."""
    flat: Any = tree_flatten([outputs, [layer.state() for layer in layers]])
    return [array for _, array in flat]


def _list_primitives(arrays: Sequence[mx.array]) -> set[str]:
    """Returns the names of the operations in the graph of arrays that are not evaluated."""
    # to the path of a file, MLX would write each line with a system call
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return set(re.findall(r'label ="([^"]*)", shape=rectangle', graph.getvalue()))


_Forward = Callable[[mx.array, Sequence[MlxLmLayerCache], SelectPositions], mx.array]


def _forward_rows(
    forward: _Forward,
    tokens: mx.array,
    kv: Sequence[Any],
    select: SelectPositions = select_all,
) -> mx.array:
    """Computes one row of a batch at a time. kv: an MlxLmBatch per layer."""
    rows: Any = zip(*(layer.rows for layer in kv), strict=True)
    return mx.concatenate(
        [
            forward(tokens[i : i + 1], row, select)
            for i, row in enumerate(cast(Sequence[Sequence[MlxLmLayerCache]], list(rows)))
        ]
    )


def _forward_in_parts(
    forward: _Forward,
    tokens: mx.array,
    kv: Sequence[MlxLmLayerCache],
    select: SelectPositions,
) -> mx.array:
    """Computes fewer positions at a time if the scores of all of them would not fit into one piece
    (models/attention_route.py), because mlx-lm does not compute pieces."""
    length = tokens.shape[1]
    step = _longest_part(kv, length)
    if step >= length:
        return forward(tokens, kv, select)
    parts: list[mx.array] = []
    for start in range(0, length, step):
        if parts:
            evaluate_caches(kv)
        parts.append(forward(tokens[:, start : start + step], kv, select_all))
    return select(mx.concatenate(parts, axis=1))


def _longest_part(kv: Sequence[MlxLmLayerCache], length: int) -> int:
    """Returns the number of positions that are computed together, at most `length`."""
    if length == 1:
        return 1
    total = kv[0].offset + length
    return min(
        (
            longest_query(device_of_shape(shape), shape, total, length)
            for layer in kv
            for shape in layer.attention_shapes
        ),
        default=length,
    )


def _unsupported_cache_error(kind: str) -> ModelError:
    return ModelError(
        f"mlx-lm's {kind} implementation has a cache that does not advance by one entry per "
        "position, which is not supported"
    )


# names


def _add_text_prefix(weights: Mapping[str, mx.array], parameters: Any) -> dict[str, mx.array]:
    """Returns the tensors under the names that the class uses. The text model of a multimodal
    checkpoint is passed to this function with the names of a text-only checkpoint."""
    for nested, plain in _TEXT_PREFIXES:
        inner: Any = parameters
        for key in nested.split(".")[:-1]:
            inner = inner.get(key, {}) if isinstance(inner, dict) else {}
        if inner:
            return {
                nested + name.removeprefix(plain) if name.startswith(plain) else name: array
                for name, array in weights.items()
            }
    return dict(weights)


def _strip_gpt_prefix(weights: Mapping[str, mx.array], keys: ClassKeys) -> dict[str, mx.array]:
    """Returns the tensors of a GPT-2 without the prefix that transformers saves. Classes that know
    the prefix name it."""
    if any(_GPT_PREFIX in name for name in keys.used):
        return dict(weights)
    return {name.removeprefix(f"{_GPT_PREFIX}."): array for name, array in weights.items()}


def _first_positive_int(config: Mapping[str, Any], names: Sequence[str], meaning: str) -> int:
    for name in names:
        value = config.get(name)
        if type(value) is int and 0 < value < _MAX_INT32:  # not isinstance, because True is an int
            return value
    raise ModelError(f"config.json does not define the {meaning}: add {names[0]}")


# the library


def _resolve_classes(
    config: Mapping[str, Any], whole: Mapping[str, Any] | None = None
) -> _ModelClasses:
    """Looks up the classes of the whole model, and then those of the text model. See
    `find_architecture`."""
    if whole is not None and isinstance(whole.get("model_type"), str):
        found = _resolve_kind(whole["model_type"], whole)
        if found is not None and "text_config" in found.keys.arguments:
            return dataclasses.replace(found, wraps=True)
    kind: str = config["model_type"]
    found = _resolve_kind(kind, config)
    if found is not None:
        return found
    # some models have a class only for the multimodal model
    base = kind.removesuffix("_text")
    if base != kind and (found := _resolve_kind(base, config)) is not None:
        return dataclasses.replace(found, kind=base, wraps="text_config" in found.keys.arguments)
    raise ModelError(f"model_type {kind!r} is not supported, and mlx-lm does not support it either")


def _resolve_kind(kind: str, config: Mapping[str, Any]) -> _ModelClasses | None:
    """Looks up the classes in the same order as mlx-lm: by architecture, by alias, by name."""
    with _as_model_error("mlx-lm cannot be read"):
        aliases = _read_aliases()
    declared: Any = config.get("architectures")
    names = [str(name) for name in (declared if isinstance(declared, list) else [declared])]
    byname = aliases["MODEL_ARCHITECTURE_REMAPPING"]
    remapped = [byname[kind, name] for name in names if (kind, name) in byname]
    module = _import_model_module(
        remapped[0] if remapped else aliases["MODEL_REMAPPING"].get(kind, kind)
    )
    if module is None:
        return None
    keys = find_class_keys(module)
    _replace_functions(find_modules(module))
    return _ModelClasses(kind=kind, model=module.Model, arguments=module.ModelArgs, keys=keys)


def _import_model_module(name: str) -> Any:
    """Returns the module of an architecture. Returns None if there is no module of that name, or if
    it is not an architecture."""
    # the name is used in an import, so its characters are restricted
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        return None
    module_name = f"{_LIBRARY}.models.{name}"
    with _as_model_error(f"{module_name} cannot be imported"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != module_name:
                raise
            return None
    return module if {"Model", "ModelArgs"} <= vars(module).keys() else None


def _import_package() -> Path:
    """Makes the modules of mlx-lm importable, and returns its folder. Its own `__init__` is not
    run, because it imports transformers, which takes seconds and a hundred megabytes, and lowers
    the limit of open files, which cannot be raised again."""
    package = sys.modules.get(_LIBRARY)
    if package is None:
        spec = importlib.util.find_spec(_LIBRARY)
        if spec is None:
            raise ModelError(explain_missing_library("of this model"))
        package = sys.modules[_LIBRARY] = importlib.util.module_from_spec(spec)
    return Path(package.__path__[0])


def _read_aliases() -> Mapping[str, Any]:
    """Returns the tables of alternative names of model types, from the source text of a module that
    would import transformers."""
    tree = ast.parse((_import_package() / "utils.py").read_text("utf-8"))
    tables = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in _ALIAS_TABLES
    }
    if tables.keys() != {*_ALIAS_TABLES}:
        raise ModelError(
            "this version of mlx-lm is not supported: install the one that mlxrunner requires"
        )
    return tables


def _import_cache() -> Any:
    from mlx_lm.models import cache

    return cache


def _replace_functions(modules: Iterable[ModuleType]) -> None:
    """Replaces functions that the modules have imported, by ours, which call the original for what
    they do not compute."""
    from mlx_lm.models import base, ssm

    attention: Any = base.scaled_dot_product_attention
    ssm_update: Any = ssm.ssm_update
    replacements = ((attention, make_attention), (ssm_update, make_ssm_update))
    for module in modules:
        for original, make in replacements:
            if vars(module).get(original.__name__) is original:
                setattr(module, original.__name__, make(original))


@contextlib.contextmanager
def _as_model_error(message: str) -> Generator[None]:
    """Converts any exception of mlx-lm's code to a ModelError with a message of one line."""
    try:
        yield
    except ModelError:
        raise
    except (Exception, SystemExit) as error:  # mlx-lm's olmo exits if a package is missing
        # MLX's messages for wrong arguments have many lines
        summary = str(error).partition("\n")[0]
        raise ModelError(f"{message}: {type(error).__name__}: {summary}") from error
