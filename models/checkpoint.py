"""The text part of a checkpoint that may hold more.

Knows: how multimodal checkpoints name their parts, in config.json and among the tensors. Must not
know: architectures, disks.
"""

from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx

_TIED = "tie_word_embeddings"
_PARTS = ("text_config", "vision_config", "audio_config")

# what a name begins with -> what it begins with where there is only text; the first that fits
_TEXT = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.", ""),
)

# the parts of a trunk that was saved without what stands around it, as those of models for vectors
# are (Qwen3-Embedding)
_TRUNK = ("embed_tokens.", "layers.", "norm.")

# the parts that see and hear, and what leads from them to the text; Ollama's drafting model
_OTHERS = frozenset(
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
    return any(isinstance(config.get(part), Mapping) for part in _PARTS)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text part, with whatever the whole says that the part does not. In some
    the text's keys have no object of their own, and stand beside that of the pictures."""
    part = config.get("text_config")
    if not isinstance(part, Mapping):
        return config
    part = cast(Mapping[str, Any], part)
    whole = {key: value for key, value in config.items() if key not in _PARTS}
    text = {**whole, **part}
    # the head is the whole's in newer files and the part's in older: the tensors tell which is true
    if whole.get(_TIED, text.get(_TIED)) != text.get(_TIED):
        del text[_TIED]
    return text


def text_weights(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The tensors of the text part, named as if there were nothing else but a head."""
    named = {text_name(name): array for name, array in weights.items() if not _is_other(name)}
    if "embed_tokens.weight" not in named:
        return named
    return {
        f"model.{name}" if name.startswith(_TRUNK) else name: array for name, array in named.items()
    }


def is_trunk(weights: Mapping[str, mx.array]) -> bool:
    """Whether a checkpoint is a trunk alone, whatever its config says of a head."""
    return "embed_tokens.weight" in weights and "lm_head.weight" not in weights


def text_name(name: str) -> str:
    for prefix, plain in _TEXT:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _is_other(name: str) -> bool:
    return name.removeprefix("model.").partition(".")[0] in _OTHERS
