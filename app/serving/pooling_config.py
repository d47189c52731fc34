"""How the authors of a model compute its embeddings and scores.

Knows: the config keys of encoders, the configuration files of sentence-transformers. Must not know:
tensors, tokenizers, requests.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from app.core.model_files import ModelFiles, read_embedding_modules
from app.core.requests import PoolingType

# a configuration file of sentence-transformers, its key, and module types that can be ignored: they
# do not affect the embeddings or are always computed; an encoder also has dense layers
POOLING_MODE = "pooling_mode"
_POOLING_FILE, _POOLING_FLAG_PREFIX = "1_Pooling/config.json", "pooling_mode_"
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_ENCODER_MODULES = (*_KNOWN_MODULES, "Dense")
_KNOWN_POOLINGS: Mapping[str, PoolingType] = {
    "cls": "cls",
    "cls_token": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
}

# the part of a name that shows that a Qwen3 was trained to rank documents
_RERANKER_NAME = "reranker"

# classifier: a classification head scores the pair of texts. yes_no: the logits of the tokens "yes"
# and "no" that follow the template of Qwen3-Reranker score it.
RankMethod = Literal["classifier", "yes_no"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """The pooling configured by the model's authors. unsupported: a clause with the reason why the
    pooling is not supported; None if it is supported."""

    pooling: PoolingType = "mean"
    unsupported: str | None = None


def read_pooling_config(files: ModelFiles) -> PoolingConfig:
    """Reads the pooling that sentence-transformers would use for the model's folder. The default is
    mean pooling. Reads modules.json and 1_Pooling/config.json, as saved by sentence-transformers
    5.1. The config of a GGUF file has the mode itself."""
    encoder = files.is_encoder
    bidirectional = files.config.get("use_bidirectional_attention")
    if not encoder and (files.config.get("is_causal") is False or bidirectional):
        return PoolingConfig(
            unsupported="it needs bidirectional attention, and only causal attention is supported"
        )
    for kind, _ in read_embedding_modules(files.path):
        if kind not in (_ENCODER_MODULES if encoder else _KNOWN_MODULES):
            return PoolingConfig(unsupported=f"modules.json contains the unsupported module {kind}")
    config = files.config if POOLING_MODE in files.config else None
    if config is None:
        config = _read_json_object(files.path / _POOLING_FILE)
    return PoolingConfig() if config is None else _parse_pooling(config, encoder=encoder)


def find_rank_method(files: ModelFiles) -> RankMethod | None:
    """Returns how the model scores a document for a query, or None if it was not trained for that.
    Sources: sentence-transformers' CrossEncoder; Zhang et al. 2025 (arXiv:2506.05176) for Qwen3."""
    if files.is_encoder:
        return "classifier" if files.num_scores == 1 else None
    if files.config.get("model_type") == "qwen3" and _RERANKER_NAME in files.name.lower():
        return "yes_no"
    return None


def _parse_pooling(config: Mapping[str, Any], *, encoder: bool) -> PoolingConfig:
    """Parses 1_Pooling/config.json. Newer files contain a name, older files one flag per pooling
    mode. The first token of a model with causal attention knows nothing of the others."""
    mode = config.get(POOLING_MODE)
    flags = [
        key.removeprefix(_POOLING_FLAG_PREFIX)
        for key in config
        if key.startswith(_POOLING_FLAG_PREFIX) and config[key]
    ]
    poolings = [str(mode)] if mode is not None else flags
    pooling = _KNOWN_POOLINGS.get(poolings[0]) if len(poolings) == 1 else None
    if pooling is not None and (encoder or pooling != "cls"):
        return PoolingConfig(pooling=pooling)
    return PoolingConfig(unsupported=f"its pooling is {' and '.join(poolings) or 'none'}")


def _read_json_object(path: Path) -> Mapping[str, Any] | None:
    """Parses a JSON object. Returns None if the file is missing or invalid."""
    try:
        value: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return cast(Mapping[str, Any], value) if isinstance(value, dict) else None
