"""MLX architectures: a config and tensors in, a model out.

Knows: tensors. Must not know: servers, disks, text. Entered through `build`.
"""

import importlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from models.base import Model, ModelError
from models.quant import quantization, quantize

# model_types that are another architecture under a new name
ALIASES: Mapping[str, str] = {}

# files of this folder that are not architectures
_SHARED = frozenset(
    {
        "attention",
        "base",
        "batch",
        "builtin",
        "kv",
        "layout",
        "quant",
        "recurrent",
        "rope",
        "window",
    }
)

_NAMED = 5


def build(config: Mapping[str, Any], weights: dict[str, mx.array]) -> Model:
    """The model that `config` describes, holding `weights`; nothing is evaluated yet.

    Raises ModelError, naming what is wrong: an architecture that is not here, a config key that
    is missing, a tensor that is missing, extra or misshapen.
    """
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
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelError("config.json has no model_type")
    name = ALIASES.get(kind, kind)
    # the name goes into an import: letters only, and none of our own shared files
    if re.fullmatch(r"[a-z][a-z0-9_]*", name) and name not in _SHARED:
        try:
            return importlib.import_module(f"models.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"models.{name}":
                raise
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
