"""Builds the vision tower of a checkpoint.

Knows: which model types have a tower here. Must not know: text models, codecs, the engine.

A family is one file, which defines the config and the tower, and lines of the table.
"""

import importlib
from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx

from models.base import ModelError
from models.checkpoint_config import get_text_config
from models.vision.tower import VisionTower

# model_type in config.json -> the module of the tower, which is imported when one is built, and the
# class of its config
_FAMILIES: Mapping[str, tuple[str, str]] = {
    "gemma3": ("gemma3", "Config"),
    "gemma4": ("gemma4", "Config"),
    "gemma4_unified": ("gemma4_unified", "Config"),
    "idefics3": ("smolvlm", "Config"),
    "lfm2-vl": ("lfm2_vl", "Config"),
    "lfm2_vl": ("lfm2_vl", "Config"),
    "mistral3": ("pixtral", "MergingConfig"),
    "pixtral": ("pixtral", "Config"),
    "qwen2_5_vl": ("qwen2_5_vl", "Config"),
    "qwen2_vl": ("qwen2_vl", "Config"),
    "qwen3_5": ("qwen3_vl", "Config"),
    "qwen3_5_moe": ("qwen3_vl", "Config"),
    "qwen3_vl": ("qwen3_vl", "Config"),
    "qwen3_vl_moe": ("qwen3_vl", "Config"),
    "smolvlm": ("smolvlm", "Config"),
}

# keys of towers and projectors outside `vision_config`
_OUTER_KEYS = (
    "downsample_factor",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_bias",
    "projector_hidden_act",
    "projector_hidden_size",
    "projector_use_layernorm",
    "scale_factor",
    "spatial_merge_size",
    "vision_feature_layer",
)


def is_supported(config: Mapping[str, Any]) -> bool:
    """Returns whether config.json describes a tower that can be built. The checkpoint may lack its
    weights."""
    return _find_type(config) in _FAMILIES and isinstance(config.get("vision_config"), Mapping)


def build_tower(
    config: Mapping[str, Any],
    weights: Mapping[str, mx.array],
    processor: Mapping[str, Any] | None = None,
) -> tuple[VisionTower, dict[str, mx.array]] | None:
    """Builds the tower of a model, without its weights. Returns it with the tensors under our
    names, which are neither checked nor loaded. Returns None if the model has no tower that is
    supported, or if the checkpoint has only its text part.

    config: config.json. weights: the tensors of the vision modules, without the prefix `model.`.
    processor: preprocessor_config.json. Raises ModelError for invalid values of both.
    """
    if not is_supported(config) or not weights:
        return None
    name, config_class = _FAMILIES[_find_type(config)]
    family = importlib.import_module(f"models.vision.{name}")
    read = getattr(family, config_class).from_dict
    try:
        tower: VisionTower = family.Tower(read(_read_keys(config)), processor or {})
    except ModelError as error:
        raise ModelError(f"the vision tower: {error}") from error
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ModelError(f"config.json does not describe a valid vision tower: {error}") from error
    return tower, tower.sanitize(dict(weights))


def _find_type(config: Mapping[str, Any]) -> str:
    """Returns the model type that determines the tower. LLaVA's classes are used with several."""
    kind, vision = str(config.get("model_type")), config.get("vision_config")
    if kind == "llava" and isinstance(vision, Mapping):
        return str(cast(Mapping[str, Any], vision).get("model_type"))
    return kind


def _read_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of `vision_config`, those outside it that towers read, and the text model's
    config as `text_config`."""
    outer = {key: config[key] for key in _OUTER_KEYS if key in config}
    return {**outer, **config["vision_config"], "text_config": get_text_config(config)}
