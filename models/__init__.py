"""MLX architectures: a config and tensors in, a model out.

Knows: tensors. Must not know: servers, disks, text. Entered through `build`.
"""

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from models import base
from models.base import Model, ModelError
from models.checkpoint import text_config, text_weights
from models.quant import quantization, quantize

# model_types that are another architecture under a new name
ALIASES: Mapping[str, str] = {}

_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a server must know of a model before there is one. context_length: positions that it
    was made for. vocab_size: ids that it scores; a tokenizer may have fewer."""

    context_length: int
    vocab_size: int


def facts(config: Mapping[str, Any]) -> Facts:
    """From config.json, or where that is silent from the architecture's defaults. Raises
    ModelError."""
    config = text_config(config)
    read = _architecture(config).Config.from_dict(config)
    return Facts(context_length=read.max_position_embeddings, vocab_size=read.vocab_size)


def build(config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> Model:
    """The model that `config` describes, holding `weights`; nothing is evaluated yet. Of a
    multimodal one, the text part.

    Raises ModelError, naming what is wrong: an architecture that is not here, a config key that
    is missing, a tensor that is missing, extra or misshapen.
    """
    config = text_config(config)
    weights = text_weights(weights)
    if "tie_word_embeddings" not in config:
        config = {**config, "tie_word_embeddings": "lm_head.weight" not in weights}
    architecture = _architecture(config)
    model = architecture.Model(architecture.Config.from_dict(config))
    weights = model.sanitize(weights)
    spec = quantization(config)
    if spec is not None:
        quantize(model, spec, weights)
    _check(model, weights)
    model.load_weights(list(weights.items()), strict=False)
    model.eval()
    return model


def _architecture(config: Mapping[str, Any]) -> Any:
    """The module of that name: one that has a Config of its own and a Model."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelError("config.json has no model_type")
    name = ALIASES.get(kind, kind)
    # the name goes into an import: letters only
    if re.fullmatch(r"[a-z][a-z0-9_]*", name):
        try:
            found = importlib.import_module(f"models.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"models.{name}":
                raise
        else:
            if {"Config", "Model"} <= vars(found).keys() and found is not base:
                return found
    raise ModelError(f"model_type {kind!r} is not supported")


def _check(model: nn.Module, weights: Mapping[str, mx.array]) -> None:
    """The checkpoint must hold exactly the tensors of the model, in the model's shapes."""
    flat: Any = tree_flatten(model.parameters())
    wanted: dict[str, mx.array] = dict(flat)
    complaints = [
        *_complaint("lacks", sorted(wanted.keys() - weights.keys())),
        *_complaint("has unknown", sorted(weights.keys() - wanted.keys())),
        *_complaint(
            "has misshapen",
            [
                f"{name} ({list(weights[name].shape)}, expected {list(array.shape)})"
                for name, array in sorted(wanted.items())
                if name in weights and weights[name].shape != array.shape
            ],
        ),
    ]
    if complaints:
        raise ModelError(f"the checkpoint {'; it '.join(complaints)}")


def _complaint(verb: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{verb} tensors: {', '.join(names[:_NAMED])}{more}"]
