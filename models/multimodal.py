"""Extracts the tensors of the text model, or of the vision modules, from a checkpoint that may be
multimodal.

Knows: the names of parts among the tensors. Must not know: config.json, architectures, disks.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

# the prefix of a tensor name -> its prefix in a text-only checkpoint; the first match applies
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.", ""),
)

# the modules of a backbone that was saved without a head, as in embedding models (Qwen3-Embedding)
_BACKBONE_PREFIXES = ("embed_tokens.", "layers.", "norm.")

# the modules of a multimodal model next to which there may be other modules, and modules of the
# text model that are never dropped
_CONTAINERS = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
_TEXT_MODULES = frozenset(
    f"{parent}{name}."
    for parent in _CONTAINERS
    for name in ("embed_tokens", "layers", "lm_head", "model", "norm")
)

_VISION_MODULES = frozenset(
    {
        "connector",
        "embed_vision",
        "image_newline",
        "mm_projector",
        "multi_modal_projector",
        "vision_embedder",
        "vision_model",
        "vision_tower",
        "visual",
    }
)

# vision and audio modules and their projectors, and the draft model in Ollama's store
_NON_TEXT_MODULES = _VISION_MODULES | {"audio_tower", "draft", "embed_audio"}


def get_text_weights(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Returns the tensors of the text model, with the names of a text-only checkpoint."""
    named = {
        plain: array
        for name, array in weights.items()
        if not _is_non_text(name) and not _is_non_text(plain := strip_text_prefix(name))
    }
    if "embed_tokens.weight" not in named:
        return named
    return {
        f"model.{name}" if name.startswith(_BACKBONE_PREFIXES) else name: array
        for name, array in named.items()
    }


def get_vision_weights(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Returns the tensors of vision modules and their projectors, without the prefix `model.`."""
    return {
        plain: array
        for name, array in weights.items()
        if (plain := name.removeprefix("model.")).partition(".")[0] in _VISION_MODULES
    }


def drop_other_modules(weights: Mapping[str, mx.array], model: Any) -> dict[str, mx.array]:
    """Returns the tensors of a multimodal checkpoint without those of modules that the text model
    does not have, such as vision and audio modules and their projectors. A module counts as part of
    the text model if its parent is a layer or any other part of it, so that a tensor that a layer
    lacks is still an error. weights: with the names of the model. model: an mlx.nn.Module."""
    return {name: array for name, array in weights.items() if not _is_in_other_module(name, model)}


def _is_in_other_module(name: str, model: Any) -> bool:
    *path, _ = name.split(".")
    parent, prefix = model, ""
    for part in path:
        if prefix not in _CONTAINERS:
            return False
        if part not in parent:
            return f"{prefix}{part}." not in _TEXT_MODULES
        parent, prefix = parent[part], f"{prefix}{part}."
        if not isinstance(parent, dict):  # a list of layers
            return False
    return False


def lacks_lm_head(weights: Mapping[str, mx.array]) -> bool:
    """Returns whether a checkpoint is a backbone without a head, whatever its config declares."""
    return "embed_tokens.weight" in weights and "lm_head.weight" not in weights


def strip_text_prefix(name: str) -> str:
    for prefix, plain in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _is_non_text(name: str) -> bool:
    return name.removeprefix("model.").partition(".")[0] in _NON_TEXT_MODULES
