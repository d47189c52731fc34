"""The config of a model before it is loaded, with the values that its architecture adds.

Knows: which architectures are supported. Must not know: weights, layers. MLX and the architectures
are imported for the first model whose config is not complete, which takes an eighth of a server's
startup time.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles

log = logging.getLogger(__name__)


def complete_config(files: ModelFiles) -> ModelFiles:
    """Returns the same files with the config of the text model, in which the context length and the
    vocabulary size are never missing. The config of a model with a vision tower also keeps the
    parts of the whole config, and the whole model's type. Files with `max_positions` are complete.

    Raises AppError(MODEL_FILES) for an unsupported architecture or an incomplete config.
    """
    if files.max_positions is not None:
        return files
    from models import architectures
    from models.base import ModelError
    from models.checkpoint_config import get_text_config, is_encoder, is_multimodal
    from models.vision.build import is_supported

    try:
        facts = architectures.read_info(files.config)
    except ModelError as error:
        raise AppError(ErrorKind.MODEL_FILES, f"{files.path}: {error}") from error
    whole = files.config
    has_tower = is_supported(whole)
    if is_multimodal(whole) and not has_tower:
        log.info(
            "%s: loading the text model only; image and audio inputs are not supported", files.name
        )
    text = get_text_config(whole)
    config = {
        **(whole if has_tower else {}),
        **text,
        **({"model_type": whole["model_type"]} if has_tower else {}),
        # of a RoBERTa, the number of rows, which is larger
        "max_position_embeddings": text.get("max_position_embeddings") or facts.context_length,
        "vocab_size": facts.vocab_size,
    }
    return replace(
        files,
        config=config,
        is_encoder=is_encoder(config),
        num_scores=facts.num_scores,
        max_positions=facts.context_length,
    )


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Raises AppError(MODEL_FILES) if a model with this config cannot be served."""
    from models import architectures
    from models.base import ModelError

    try:
        architectures.read_info(config)
    except ModelError as error:
        raise AppError(ErrorKind.MODEL_FILES, f"{name}: {error}; nothing was downloaded") from error
