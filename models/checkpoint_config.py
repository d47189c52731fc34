"""Facts about a checkpoint that can be read from config.json without MLX: its text model, and
whether it is supported.

Knows: the keys of config.json, the names of our architectures. Must not know: tensors, MLX.
Commands that list models import this module, and not MLX.
"""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from models.published_config import find_unsupported_format

_TIE_KEY = "tie_word_embeddings"
_PART_KEYS = ("text_config", "vision_config", "audio_config")

# quantization methods whose tensors MLX can use unchanged, except for their names
_SUPPORTED_METHODS = ("mxfp4", "mxfp8")

# the library that models/mlx_lm_adapter.py uses for other architectures; our own extra is not named
# in the hint, because our name may belong to another project on a package index
_LIBRARY = "mlx_lm"
_INSTALL_HINT = 'pip install "mlx-lm>=0.32.2,<0.33"'

# The config keys for the number of query heads, and the default if all of them are missing.
_QUERY_HEAD_KEYS = ("num_attention_heads", "num_query_heads", "num_heads", "n_heads", "n_head")
DEFAULT_QUERY_HEADS = 64

# model types that are other names of an architecture
ALIASES: Mapping[str, str] = {
    "camembert": "roberta",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gemma4_unified": "gemma4",
    "gemma4_unified_text": "gemma4",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "lfm2_vl": "lfm2",
    "minicpmv4_7": "qwen3_5",
    "ministral": "mistral",
    "muse_glimmer_text": "muse_glimmer",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen2_vl": "qwen2_5_vl",
    "qwen2_vl_text": "qwen2_5_vl",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_vl_text": "qwen3_vl",
    "xlm-roberta": "roberta",
}

# models whose text part has different tensors than its model type says, so that the whole model
# needs a separate class
WHOLE_MODEL_TYPES = frozenset({"prism_hadamard_qwen35"})

# the classes and the model types of draft models
_DRAFT = re.compile(
    r"Eagle3?$|^Eagle3?[A-Z]\w*ForCausalLM$|DFlash|Draft|MTP|Assistant"
    r"|^eagle3?$|_(assistant|draft|mtp)$"
)

# architectures that compute hidden states only (models/encoder.py)
ENCODERS = frozenset({"bert", "gemma3_encoder", "modernbert", "nomic_bert", "roberta"})


def architecture_name(config: Mapping[str, Any]) -> str | None:
    """Returns the name of the architecture, which is a module of this package or of mlx-lm, or None
    if config.json has no model type. An architecture with attention in both directions has a
    separate module if the same model type also generates text."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return None
    name = ALIASES.get(kind, kind)
    encoder = f"{name}_encoder"
    return encoder if config.get("use_bidirectional_attention") and encoder in ENCODERS else name


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Returns whether the model computes hidden states only, and generates no text."""
    return architecture_name(get_text_config(config)) in ENCODERS


def is_draft(config: Mapping[str, Any]) -> bool:
    """Returns whether the model only proposes tokens for another one, in speculative decoding."""
    classes = config.get("architectures")
    names = cast("list[Any]", classes) if isinstance(classes, list) else []
    kinds = (config.get("model_type"), *names)
    return any(isinstance(kind, str) and _DRAFT.search(kind) is not None for kind in kinds)


def is_multimodal(config: Mapping[str, Any]) -> bool:
    return any(isinstance(config.get(part), Mapping) for part in _PART_KEYS)


def get_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the text model, completed with the keys of the whole config. Some
    configs have the text model's keys at the top level, next to the vision config."""
    part = config.get("text_config")
    if not isinstance(part, Mapping):
        return config
    part = cast(Mapping[str, Any], part)
    inherited = {key: value for key, value in config.items() if key not in _PART_KEYS}
    text = {**inherited, **part}
    # Newer files have the key at the top level, and older files have it in the part. If the two
    # values differ, the tensors decide.
    if inherited.get(_TIE_KEY, text.get(_TIE_KEY)) != text.get(_TIE_KEY):
        del text[_TIE_KEY]
    return text


def find_unsupported_method(config: Mapping[str, Any]) -> str | None:
    """Returns why the quantization method that config.json declares is not supported, or None."""
    hf_config = config.get("quantization_config")
    # mlx-lm writes both keys; in a converted checkpoint, the second key may describe its source
    if config.get("quantization") or not isinstance(hf_config, Mapping):
        return None
    method = cast(Mapping[str, Any], hf_config).get("quant_method")
    if method is None or method in _SUPPORTED_METHODS:
        return None
    return find_unsupported_format(cast(Mapping[str, Any], hf_config))


def has_architecture(config: Mapping[str, Any]) -> bool:
    """Returns whether a file of this package, or of mlx-lm, is named after the model type. If not,
    mlx-lm may still know the model type by a different name, which only importing it shows."""
    name = str(architecture_name(config))
    # the name is used as a file name, so its characters are restricted
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        return False
    library = importlib.util.find_spec(_LIBRARY)
    locations = (library and library.submodule_search_locations) or ()
    folders = [Path(__file__).parent, *(Path(location) / "models" for location in locations)]
    return any((folder / f"{name}.py").is_file() for folder in folders)


def explain_missing_library(kind: str) -> str:
    """The error for a model type that only mlx-lm may support, if it is not installed."""
    return f"model_type {kind!r} is not supported, but mlx-lm may support it: {_INSTALL_HINT}"


def num_query_heads(config: Mapping[str, Any]) -> int:
    """Returns the number of query heads from any of the config keys. For a list with one number per
    layer, returns the maximum."""
    for name in _QUERY_HEAD_KEYS:
        match config.get(name):
            case int(heads):
                return heads
            case [int(), *_] as heads:
                return max(heads)
            case _:
                pass
    return DEFAULT_QUERY_HEADS
