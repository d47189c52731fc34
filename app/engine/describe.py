"""What can be said of a model before it is loaded.

Knows: `models`, configs. Must not know: tensors' contents, requests. Needs no engine thread: it
makes no arrays.
"""

import logging
from dataclasses import replace

import models
from app.core.errors import AppError, ErrorKind
from app.core.files import ModelFiles
from models.base import ModelError
from models.checkpoint import get_text_config, is_multimodal

log = logging.getLogger(__name__)


def complete_config(files: ModelFiles) -> ModelFiles:
    """The same files, whose config is that of the text part and says how long a context and how
    many ids there are, which some leave to the architecture.

    Raises AppError(MODEL_FILES) for an architecture that is not here or a config that lacks
    what it needs.
    """
    try:
        facts = models.read_info(files.config)
    except ModelError as error:
        raise AppError(ErrorKind.MODEL_FILES, f"{files.path}: {error}") from error
    if is_multimodal(files.config):
        log.info(
            "%s: loading the text model only; image and audio inputs are not supported", files.name
        )
    config = {
        **get_text_config(files.config),
        "max_position_embeddings": facts.context_length,
        "vocab_size": facts.vocab_size,
    }
    return replace(files, config=config)
