"""Builds the vision tower of a checkpoint.

Knows: which model types have a tower here. Must not know: text models, codecs, the engine.

A family is one file, which defines the config and the tower, and lines of the table.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import mlx.core as mx

from models.base import ModelError
from models.checkpoint_config import get_text_config
from models.vision import (
    gemma3,
    gemma4,
    gemma4_unified,
    lfm2_vl,
    pixtral,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    smolvlm,
)
from models.vision.tower import VisionTower

# model_type in config.json -> the classes of the config and of the tower
_FAMILIES: Mapping[str, tuple[Any, Callable[[Any, Mapping[str, Any]], VisionTower]]] = {
    "gemma3": (gemma3.Config, gemma3.Tower),
    "gemma4": (gemma4.Config, gemma4.Tower),
    "gemma4_unified": (gemma4_unified.Config, gemma4_unified.Tower),
    "idefics3": (smolvlm.Config, smolvlm.Tower),
    "lfm2-vl": (lfm2_vl.Config, lfm2_vl.Tower),
    "lfm2_vl": (lfm2_vl.Config, lfm2_vl.Tower),
    "mistral3": (pixtral.MergingConfig, pixtral.Tower),
    "pixtral": (pixtral.Config, pixtral.Tower),
    "qwen2_5_vl": (qwen2_5_vl.Config, qwen2_5_vl.Tower),
    "qwen2_vl": (qwen2_vl.Config, qwen2_vl.Tower),
    "qwen3_5": (qwen3_vl.Config, qwen3_vl.Tower),
    "qwen3_5_moe": (qwen3_vl.Config, qwen3_vl.Tower),
    "qwen3_vl": (qwen3_vl.Config, qwen3_vl.Tower),
    "qwen3_vl_moe": (qwen3_vl.Config, qwen3_vl.Tower),
    "smolvlm": (smolvlm.Config, smolvlm.Tower),
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
    read, make = _FAMILIES[_find_type(config)]
    try:
        tower = make(read.from_dict(_read_keys(config)), processor or {})
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
