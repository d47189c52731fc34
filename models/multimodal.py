"""The text part of a checkpoint that may hold more.

Knows: how multimodal checkpoints name their parts, in config.json and among the tensors. Must not
know: architectures, disks.
"""

from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx

_TIE_KEY = "tie_word_embeddings"
_PART_KEYS = ("text_config", "vision_config", "audio_config")

# what a name begins with -> what it begins with where there is only text; the first that fits
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.", ""),
)

# the parts of a trunk that was saved without what stands around it, as those of models for vectors
# are (Qwen3-Embedding)
_BACKBONE_PREFIXES = ("embed_tokens.", "layers.", "norm.")

# the parts that see and hear, and what leads from them to the text; Ollama's drafting model
_NON_TEXT_MODULES = frozenset(
    {
        "audio_tower",
        "connector",
        "draft",
        "embed_audio",
        "embed_vision",
        "image_newline",
        "mm_projector",
        "multi_modal_projector",
        "vision_model",
        "vision_tower",
        "visual",
    }
)


def is_multimodal(config: Mapping[str, Any]) -> bool:
    return any(isinstance(config.get(part), Mapping) for part in _PART_KEYS)


def get_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text part, with whatever the whole says that the part does not. In some
    the text's keys have no object of their own, and stand beside that of the pictures."""
    part = config.get("text_config")
    if not isinstance(part, Mapping):
        return config
    part = cast(Mapping[str, Any], part)
    whole = {key: value for key, value in config.items() if key not in _PART_KEYS}
    text = {**whole, **part}
    # the head is the whole's in newer files and the part's in older: the tensors tell which is true
    if whole.get(_TIE_KEY, text.get(_TIE_KEY)) != text.get(_TIE_KEY):
        del text[_TIE_KEY]
    return text


def get_text_weights(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The tensors of the text part, named as if there were nothing else but a head."""
    named = {
        strip_text_prefix(name): array for name, array in weights.items() if not _is_non_text(name)
    }
    if "embed_tokens.weight" not in named:
        return named
    return {
        f"model.{name}" if name.startswith(_BACKBONE_PREFIXES) else name: array
        for name, array in named.items()
    }


def lacks_lm_head(weights: Mapping[str, mx.array]) -> bool:
    """Whether a checkpoint is a trunk alone, whatever its config says of a head."""
    return "embed_tokens.weight" in weights and "lm_head.weight" not in weights


def strip_text_prefix(name: str) -> str:
    for prefix, plain in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _is_non_text(name: str) -> bool:
    return name.removeprefix("model.").partition(".")[0] in _NON_TEXT_MODULES
