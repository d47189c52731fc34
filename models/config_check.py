"""Checks the values of config.json against the types that an architecture's `Config` declares.

Knows: annotations, plausible ranges of common keys, which keys change the logits. Must not know:
architectures, tensors.

`build` reports contradictions between the config and the tensors. This module rejects
invalid values that would fail before that, such as a string instead of a number, or a billion
layers.
"""

import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, cast, get_args, get_origin

# Limits on layers, on other counts (heads, experts) and on widths: several times larger than in any
# trained model, and small enough to be allocated.
_MAX_LAYERS = 1024
_MAX_COUNT = 4096
_MAX_WIDTH = 1 << 24
_MAX_HEAD_DIM = 1 << 12

# in MLX, every dimension of an array and every position is an int32
_MAX_INT32 = (1 << 31) - 1

# keys whose value must be at least 1
_POSITIVE_KEYS = frozenset(
    {
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
    }
)

# suffixes of keys for periods in layers, which are used as divisors
_PERIOD_SUFFIXES = ("_freq", "_interval", "_pattern", "_step")

# keys of attention, rope, windows and scales: they change the logits if their value is not neutral
_CRITICAL_KEY = re.compile(
    r"rope_(?!interleave)|rotary|theta|soft_?cap|multiplier|scaling|logits?_scale|scale_emb|"
    r"query_pre_attn|temperature_tuning|attention_chunk_size|alpha_factor|beta_factor|"
    r"sliding_window|window_size|(attn|attention)_scale|scale_depth|clip_qkv"
)
# keys among them that do not matter: precision of intermediate results, training, other parts, and
# keys that are only used with others
_HARMLESS_KEY = re.compile(
    r"_in_fp32$|^rope_(parameters|scaling|theta)$|_layers?_(pattern|interval)$|^max_window_layers$|"
    r"^use_sliding_window$|^_?sliding_window(_pattern)?$|^scale_attn_weights$|^rope_interleave$|"
    r"^rope_traditional$|^attn_scale$|_loss|dropout"
)
_NEUTRAL_VALUES: tuple[Any, ...] = (None, False, 1, 1.0, 0, 0.0, "", -1)

_MAX_SHOWN_CHARS = 60  # maximum number of characters of a config value in a message


def find_invalid_value(values: Mapping[str, Any], annotations: Mapping[str, Any]) -> str | None:
    """Returns the first invalid value as a clause that names its key, or None if all values are
    valid.

    values: the values by key, without null values. annotations: the annotations by key.
    """
    for key, value in values.items():
        if not matches_annotation(value, annotations[key]):
            return (
                f"{key} is {_format_value(value)}, but must be "
                f"{_describe_annotation(annotations[key])}"
            )
        if isinstance(value, int | float) and not isinstance(value, bool):
            low, high = _bounds(key, value)
            if not low <= value <= high:
                return (
                    f"{key} is {_format_value(value)}, but must be between {low:.12g} "
                    f"and {high:.12g}"
                )
    return None


def find_inconsistency(values: Mapping[str, Any]) -> str | None:
    """Returns an invalid combination of keys as a clause, or None if there is none. values: all
    values that the architecture reads, including defaults. Each value is valid on its own."""
    heads, shared = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if heads is None:
        return None
    if shared is not None and heads % shared:
        return f"num_key_value_heads is {shared}, which does not divide {heads} attention heads"
    hidden = values.get("hidden_size")
    if hidden is None or values.get("head_dim") or 0 < hidden // heads <= _MAX_HEAD_DIM:
        return None
    return f"hidden_size is {hidden}, which cannot be split into {heads} attention heads"


def changes_logits(key: str, value: Any) -> bool:
    """Returns whether a model that ignores this key computes different logits, judging by the name
    of the key: it belongs to rope, a window, a scale or a cap, and its value is not neutral."""
    if not _CRITICAL_KEY.search(key) or _HARMLESS_KEY.search(key):
        return False
    if isinstance(value, Mapping | list):
        return bool(value)
    return value not in _NEUTRAL_VALUES


def matches_annotation(value: Any, annotation: Any) -> bool:
    """Returns whether a JSON value has the annotated type. An integer is also a float, but true and
    false are not numbers."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(matches_annotation(value, choice) for choice in inner)
    if origin is Literal:
        return value in inner
    kind = origin or annotation
    if kind is bool or kind is str or kind is types.NoneType:
        return value is None if kind is types.NoneType else isinstance(value, kind)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    if not isinstance(kind, type):
        return True  # Any, type variables
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping) and _all_match(
            cast("Mapping[str, Any]", value).values(), inner[1:]
        )
    if issubclass(kind, Sequence):
        return isinstance(value, list | tuple) and _all_match(
            cast("Sequence[Any]", value), inner[:1]
        )
    return True


def _all_match(values: Any, annotation: tuple[Any, ...]) -> bool:
    return not annotation or all(matches_annotation(value, annotation[0]) for value in values)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer with hundreds of digits
        return False


def _bounds(key: str, value: float) -> tuple[float, float]:
    """Returns the minimum and the maximum valid value of the key, depending on its name."""
    if key.endswith("_theta"):
        return 1e-3, math.inf
    if key.endswith("_eps"):
        return 1e-30, 1
    if isinstance(value, float):
        return -math.inf, math.inf
    needed = key in _POSITIVE_KEYS or key.endswith(_PERIOD_SUFFIXES)
    low = 1 if needed else -1  # some configs use -1 for "none"
    if key.endswith("head_dim"):
        return low, _MAX_HEAD_DIM
    if key.endswith("_layers"):
        return low, _MAX_LAYERS
    if "num_" in key or key.startswith("n_") or key.endswith(("_heads", "_experts")):
        return low, _MAX_COUNT
    if key.endswith(("_size", "_dim", "_rank")):
        return low, _MAX_WIDTH
    return low, _MAX_INT32


def _describe_annotation(annotation: Any) -> str:
    """Returns the type as a phrase for users."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(
            _describe_annotation(choice) for choice in inner if choice is not types.NoneType
        )
    if origin is Literal:
        return " or ".join(map(repr, inner))
    kind = origin or annotation
    descriptions: dict[Any, str] = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
    }
    if kind in descriptions:
        return descriptions[kind]
    if isinstance(kind, type) and issubclass(kind, Sequence):
        return (
            f"a list whose items are each {_describe_annotation(inner[0])}" if inner else "a list"
        )
    return "an object"


def _format_value(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not format integers with thousands of digits
        return "a very long number"
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
