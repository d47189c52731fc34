"""Finds the architecture of a checkpoint, and builds its model from a config and its tensors.

Knows: tensors, the interface of an architecture. Must not know: servers, disks, text.
"""

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from models import base, kernels
from models.base import Model, ModelError, dtype_name
from models.checkpoint_config import (
    WHOLE_MODEL_TYPES,
    architecture_name,
    get_text_config,
    is_draft,
    is_multimodal,
)
from models.gguf.layers import StoredBlocks, replace_with_gguf_layers
from models.multimodal import (
    drop_other_modules,
    get_text_weights,
    get_vision_weights,
    lacks_lm_head,
)
from models.ollama_names import to_mlx_names
from models.published_formats import Conversion, convert_published
from models.quant import check_quant_method, quantize_model, replace_quantized_layers
from models.vision.build import build_tower
from models.vision.tower import VisionTower

_MAX_NAMED = 5


class TensorError(ModelError):
    """Some tensors are missing, unexpected or invalid. tensors: the names of these tensors in the
    model."""

    def __init__(self, message: str, names: Iterable[str]) -> None:
        super().__init__(message)
        self.tensors = tuple(names)


class TowerError(ModelError):
    """The vision tower of a multimodal checkpoint is invalid. Its text model may be valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The properties of a model that a server needs before it builds the model. context_length: the
    number of positions that the model was trained for. vocab_size: the size of its output layer. A
    tokenizer may have fewer tokens. num_scores: see `models.encoder.Encoder`."""

    context_length: int
    vocab_size: int
    num_scores: int = 0


def read_info(config: Mapping[str, Any]) -> ModelInfo:
    """Reads the properties from config.json, with the defaults of the architecture. Raises
    ModelError for an invalid config and for weights in an unsupported quantization."""
    whole, config = config, get_text_config(config)
    check_quant_method(config)
    read = _find_architecture(config, whole).Config.from_dict(config)
    return ModelInfo(
        context_length=read.max_position_embeddings,
        vocab_size=read.vocab_size,
        num_scores=getattr(read, "num_scores", 0),
    )


def build(
    config: Mapping[str, Any],
    weights: Mapping[str, mx.array],
    *,
    bits: int | None = None,
    blocks: Sequence[StoredBlocks] = (),
    vision: bool = True,
    processor: Mapping[str, Any] | None = None,
) -> Model:
    """Builds the model that `config` describes, with `weights`. Nothing is evaluated yet. For a
    multimodal checkpoint, the result is the text model; its attribute `vision` is the vision tower,
    or None.

    weights: the tensors, with the names of the original checkpoint, of MLX or of Ollama's store.
    Their packing is inferred from the tensors and not from the config. Formats of other quantizers
    are converted (models/published_formats.py). bits: the number of bits to which unquantized
    weights of the text model are quantized; None leaves them unchanged. blocks: the blocks of
    weights from a GGUF file, which are used if the CPU kernels are. vision: whether to build the
    vision tower, if models/vision/ supports it and the checkpoint contains it. processor:
    preprocessor_config.json.

    Raises ModelError for an unsupported architecture or quantization, for a missing config key, and
    for a tensor that is missing, unexpected, or has a wrong shape or type; if it is one of the
    vision tower, TowerError.
    """
    whole, config = config, get_text_config(config)
    check_quant_method(config)
    named = to_mlx_names(weights)
    weights = get_text_weights(named)
    weights, conversion = convert_published(config, weights)
    architecture = _find_architecture(config, whole)
    # a checkpoint of only the backbone has no head, although some configs declare one
    # (Qwen3-Embedding-8B)
    if lacks_lm_head(named) or "tie_word_embeddings" not in config:
        config = {**config, "tie_word_embeddings": "lm_head.weight" not in weights}
    model = _build_architecture(architecture, config)
    weights = dict(model.sanitize(weights))
    if is_multimodal(whole):
        weights = drop_other_modules(weights, model)
    packed = kernels.ops() is not None and replace_with_gguf_layers(model, weights, blocks)
    packed |= _load_tensors(model, weights)
    if bits is not None:
        if packed:
            raise ModelError("the weights are already quantized and cannot be quantized again")
        quantize_model(model, bits)
    model.vision = _build_tower(whole, named, processor, blocks) if vision else None
    model.eval()
    model.conversion = conversion
    return model


def _build_tower(
    config: Mapping[str, Any],
    weights: Mapping[str, mx.array],
    processor: Mapping[str, Any] | None,
    blocks: Sequence[StoredBlocks],
) -> VisionTower | None:
    try:
        built = build_tower(config, get_vision_weights(weights), processor)
        if built is None:
            return None
        tower, tensors = built
        if kernels.ops() is not None:
            replace_with_gguf_layers(tower, tensors, blocks)
        _load_tensors(tower, tensors)
    except TensorError as error:
        raise TowerError(f"the vision tower: {error}") from error
    except ModelError as error:
        raise TowerError(str(error)) from error
    return tower


def _load_tensors(model: Any, weights: dict[str, mx.array]) -> bool:
    """Sets the parameters of the model. Returns whether some are quantized."""
    packed = replace_quantized_layers(model, weights)
    _check_tensors(model, weights)
    model.load_weights(list(weights.items()), strict=False)
    return packed


def get_conversion(model: Model) -> Conversion | None:
    """Returns how the weights of a model from `build` were converted, if they were in a format of
    another quantizer."""
    return getattr(model, "conversion", None)


def get_tower(model: Model) -> VisionTower | None:
    """Returns the vision tower of a model from `build`, if it has one."""
    return getattr(model, "vision", None)


def _build_architecture(architecture: Any, config: Mapping[str, Any]) -> Any:
    """Builds the model. Layers may raise an error for an invalid combination of sizes, although
    each key is valid. All computations here use only values of config.json, so any error is caused
    by the config."""
    read = architecture.Config.from_dict(config)
    try:
        return architecture.Model(read)
    except ModelError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ModelError(f"config.json does not describe a valid model: {error}") from error


def _find_architecture(config: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> Any:
    """Returns the module named after the model type, if it has its own Config and Model. Otherwise
    it returns mlx-lm's class, if that library is installed. config: the config of the text model.
    whole: the config of the whole model."""
    name = architecture_name(config)
    if name is None:
        raise ModelError("config.json has no model_type")
    if is_draft(config):
        raise ModelError(
            f"config.json describes a draft model for speculative decoding (model_type {name!r}), "
            "which is not supported: serve the model for which it proposes tokens"
        )
    needs_whole = whole is not None and whole.get("model_type") in WHOLE_MODEL_TYPES
    # the name is used in an import, so its characters are restricted
    if not needs_whole and re.fullmatch(r"[a-z][a-z0-9_]*", name):
        try:
            module = importlib.import_module(f"models.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"models.{name}":
                raise
        else:
            if {"Config", "Model"} <= vars(module).keys() and module is not base:
                return module
    # imported here, because few models need it
    from models import mlx_lm_adapter

    return mlx_lm_adapter.find_architecture(
        config, whole if needs_whole or (whole is not None and is_multimodal(whole)) else None
    )


def _check_tensors(model: nn.Module, weights: Mapping[str, mx.array]) -> None:
    """Raises TensorError unless the checkpoint has exactly the tensors of the model, with the same
    shapes and types."""
    flat: Any = tree_flatten(model.parameters())
    parameters: dict[str, mx.array] = dict(flat)
    extra = sorted(weights.keys() - parameters.keys())
    pairs = [
        (name, weights[name], array)
        for name, array in sorted(parameters.items())
        if name in weights
    ]
    misshapen = {
        name: f"{name} ({list(given.shape)}, expected {list(array.shape)})"
        for name, given, array in pairs
        if given.shape != array.shape
    }
    mistyped = {
        name: f"{name} ({_dtype_kind(given)}, expected {_dtype_kind(array)})"
        for name, given, array in pairs
        if _dtype_kind(given) != _dtype_kind(array)
    }
    complaints = [
        *_format_tensor_names("lacks", sorted(parameters.keys() - weights.keys())),
        *_format_tensor_names("has unexpected", extra),
        *_format_tensor_names("has wrongly shaped", misshapen.values()),
        *_format_tensor_names("has wrongly typed", mistyped.values()),
    ]
    if complaints:
        raise TensorError(
            f"the checkpoint {'; it '.join(complaints)}", [*extra, *misshapen, *mistyped]
        )


def _dtype_kind(array: mx.array) -> str:
    """Returns the type for the comparison. All floating point types are equivalent."""
    if mx.issubdtype(array.dtype, mx.floating):
        return "floating point"
    return dtype_name(array.dtype)


def _format_tensor_names(verb: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    if not names:
        return []
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return [f"{verb} tensors: {', '.join(names[:_MAX_NAMED])}{more}"]
