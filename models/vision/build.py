"""Builds the vision tower of a checkpoint.

Knows: which model types have a tower here. Must not know: text models, codecs, the engine.

A family is one file, which exports `Config` and `Tower`, and a line of the table.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from models.base import ModelError
from models.checkpoint_config import get_text_config
from models.vision import qwen3_vl
from models.vision.tower import VisionTower

# model_type in config.json -> the module
_FAMILIES: Mapping[str, Any] = {
    "qwen3_5": qwen3_vl,
    "qwen3_5_moe": qwen3_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
}

# keys of towers and projectors outside `vision_config`
_OUTER_KEYS: tuple[str, ...] = ()


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
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None or not isinstance(config.get("vision_config"), Mapping) or not weights:
        return None
    try:
        read = family.Config.from_dict(_read_keys(config))
        tower: VisionTower = family.Tower(read, processor or {})
    except ModelError as error:
        raise ModelError(f"the vision tower: {error}") from error
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ModelError(f"config.json does not describe a valid vision tower: {error}") from error
    return tower, tower.sanitize(dict(weights))


def _read_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of `vision_config`, those outside it that towers read, and the text model's
    config as `text_config`."""
    outer = {key: config[key] for key in _OUTER_KEYS if key in config}
    return {**outer, **config["vision_config"], "text_config": get_text_config(config)}
